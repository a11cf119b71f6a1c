"""Schedules from their text form, as ``str`` of a schedule has it."""

from __future__ import annotations

import re

from megatron.fill.pipeline.schedule import Op, Pass, Schedule


def parsed(text: str) -> Schedule:
    """The schedule of a text; ValueError if it is not a valid one."""
    head, *rows = text.splitlines()
    found = re.fullmatch(r"(\S+): (\d+) stages, (\d+) microbatches, (\d+) chunks:", head)
    assert found is not None
    order = tuple(tuple(map(_pass, row.split()[1:])) for row in rows)
    return Schedule(found[1], int(found[2]), int(found[3]), int(found[4]), order)


def _pass(text: str) -> Op:
    microbatch, _, chunk = text[1:].partition(".")
    return Op(Pass(text[0]), int(microbatch), int(chunk or 0))
