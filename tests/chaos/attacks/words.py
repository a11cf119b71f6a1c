"""Attacks on readers of what a job reports: its last word, its work, its results."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from functools import partial

from megatron.fill.pages.steplog import MOST_WORD_BYTES
from tests.chaos import memfiles
from tests.chaos.attacks.base import Attack, Ground
from tests.chaos.kind import attack, fatal

_WORD: dict[str, object] = {
    "cause": "finished",
    "detail": "",
    "then": "",
    "unit": "steps",
    "total_work": None,
    "result": {},
}
_ESCAPES = "\x1b[2J\x1b]0;owned\x07\x1b[31m\r\n\u202e\x00red"


def _leave(word: bytes, ground: Ground) -> str:
    """Report this as the last word, and exit."""
    memfiles.step_log().leave_word(word[:MOST_WORD_BYTES])
    os._exit(0)


def _saying(**changes: object) -> bytes:
    return json.dumps({**_WORD, **changes}).encode()


def _linger(ground: Ground) -> str:
    """Report that the job is done, and stay."""
    memfiles.step_log().leave_word(_saying())
    while True:
        time.sleep(60.0)


def _amounts(value: float, ground: Ground) -> str:
    log = memfiles.step_log()
    for _ in range(3):
        log.step_ended(time.monotonic_ns(), time.monotonic_ns(), value, False)
    log.total_work = log.base_work = value
    return ""


def _report(ground: Ground) -> str:
    """Report results that a task may not report."""
    nested: list[object] = []
    for _ in range(900):
        nested = [nested]
    (ground.directory / "result.json").write_text(json.dumps({_ESCAPES: nested, "big": 10**300}), encoding="utf-8")
    return ""


def _tables() -> Iterator[Attack]:
    ends = partial(attack, either=True)
    spoiling = partial(ends, exact=False)
    nested = b'{"cause": "finished", "detail": "", "then": "", "result": {"x": ' + b"[" * 3000 + b"]" * 3000 + b"}}"
    huge = b'{"cause": "finished", "detail": "", "then": "", "total_work": 1' + b"0" * 400 + b"}"
    long = b'{"cause": "finished", "detail": "", "then": "", "total_work": 1' + b"0" * 900_000 + b"}"
    yield Attack(fatal("word-brackets", "a last word of 200,000 brackets"), partial(_leave, b"[" * 200_000))
    yield Attack(fatal("word-integer", "a last word with an integer of 10^400"), partial(_leave, huge))
    yield Attack(fatal("word-digits", "a last word with an integer of 900,000 digits"), partial(_leave, long))
    yield Attack(fatal("word-nested", "a last word with a result of 3,000 nested lists"), partial(_leave, nested))
    yield Attack(
        fatal("word-types", "a last word whose parts are of wrong types"),
        partial(_leave, _saying(detail=[1], unit={"a": 1}, then=["saved"])),
    )
    yield Attack(
        fatal("word-nan", "a last word with NaN as all its work"), partial(_leave, _saying(total_work=float("nan")))
    )
    yield Attack(
        fatal("word-escapes", "terminal escapes as the reason of its failure"),
        partial(_leave, _saying(cause="failed", detail=_ESCAPES * 50)),
    )
    yield Attack(
        fatal("word-long", "a megabyte as the reason of its failure"),
        partial(_leave, _saying(cause="failed", detail="x" * (MOST_WORD_BYTES - 200))),
    )
    yield Attack(fatal("word-linger", "says that it is done, and stays"), _linger)
    yield Attack(fatal("word-cancelled", "says that it was cancelled"), partial(_leave, _saying(cause="cancelled")))
    for name, value in (("inf", float("inf")), ("nan", float("nan")), ("most", 1.7e308), ("negative", -1e18)):
        yield Attack(
            spoiling(f"work-{name}", f"its step log says that it did {value} steps"), partial(_amounts, value), 2.0
        )
    yield Attack(ends("result-odd", "a result of 900 nested lists, escapes and 10^300"), _report)


ATTACKS = tuple(_tables())
