"""Bubble cycles from files, and when they have drifted."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from megatron.fill.errors import ConfigError
from megatron.fill.planner.files import load_cycles
from megatron.fill.planner.plan import drifted
from megatron.fill.profiles import BubbleCycle, BubbleSlot, cycle_from_dict
from megatron.fill.report.cycle import write_cycles
from megatron.fill.report.schema import RankCycle
from megatron.fill.types import BubbleKind
from tests.support.recorded_runs import cycle_bubble

CYCLE = BubbleCycle(
    1_000_000,
    (
        BubbleSlot(BubbleKind.FWD_BWD, 300_000, 4000),
        BubbleSlot(BubbleKind.INTERIOR, 5_000, 2000),
        BubbleSlot(BubbleKind.DRAIN, 200_000, 3000),
    ),
)


@pytest.fixture
def bubbles_file(tmp_path):
    """As the report's room writes it."""
    training = [cycle_bubble(BubbleKind.FILL, 10, p10_ms=1.5), cycle_bubble(BubbleKind.DRAIN, 0, p10_ms=2.25)]
    evaluation = [cycle_bubble(BubbleKind.FILL, 7, p10_ms=7)]
    path = tmp_path / "bubbles.json"
    ranks = [
        RankCycle(rank=1, stage=1, iteration_ms=20.5, training=training, evaluation=evaluation),
        RankCycle(rank=3, stage=3, iteration_ms=None, training=[], evaluation=[]),
    ]
    write_cycles(path, ranks)
    return path


def test_the_report_s_file_is_read(bubbles_file):
    cycles = load_cycles(bubbles_file)
    assert list(cycles) == [1, 3]
    assert cycles[1].period_ns == 20_500_000
    assert [(slot.kind, slot.duration_ns) for slot in cycles[1].slots] == [("fill", 1_500_000), ("drain", 2_250_000)]
    assert cycles[1].slots[0].free_bytes == 10
    assert cycles[1].slots[1].free_bytes > 2**60  # not measured: no limit
    assert cycles[3].slots == ()


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("ranks", 0, "training", 1, "p10_ms"), -1, r"ranks.0.training.1.p10_ms is -1: .*greater than or equal to 0"),
        (("ranks", 0, "training", 0, "kind"), "nap", r"ranks.0.training.0.kind is 'nap': .*'fill'"),
        (("ranks", 0, "iteration_ms"), None, r"ranks.0.iteration_ms is null: expected the time of an iteration"),
        (("ranks", 0, "iteration_ms"), 0, r"ranks.0.iteration_ms is 0: .*greater than 0"),
        (("ranks",), 3, r"ranks is 3: expected a list"),
    ],
)
def test_a_wrong_field_is_named(bubbles_file, where, value, message):
    data = json.loads(bubbles_file.read_text())
    target = data
    for key in where[:-1]:
        target = target[key]
    target[where[-1]] = value
    bubbles_file.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=message) as caught:
        load_cycles(bubbles_file)
    assert str(caught.value).startswith(str(bubbles_file))
    assert "\n" not in str(caught.value)


def test_a_file_of_another_kind_is_told_what_was_expected(tmp_path):
    path = tmp_path / "report.json"
    path.write_text('{"schema_version": 2, "ranks": [{"rank": 0}]}')
    with pytest.raises(ConfigError, match=r"is missing; expected a file of --fill-profile-only"):
        load_cycles(path)


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read: No such file"):
        load_cycles(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("bubbles!")
    with pytest.raises(ConfigError, match=r"text\.json: is not JSON: Expecting value"):
        load_cycles(tmp_path / "text.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"bytes\.json: cannot be read: is not UTF-8"):
        load_cycles(tmp_path / "bytes.json")


def test_json_form_is_read_back():
    assert cycle_from_dict(json.loads(json.dumps(asdict(CYCLE)))) == CYCLE
    with pytest.raises(ValueError, match="not a bubble cycle: KeyError"):
        cycle_from_dict({"slots": []})


def changed(at: int, **values: Any) -> BubbleCycle:
    slots = list(CYCLE.slots)
    slots[at] = replace(slots[at], **values)
    return replace(CYCLE, slots=tuple(slots))


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (CYCLE, False),
        (changed(0, duration_ns=350_000), False),  # 17%
        (changed(0, duration_ns=230_000), True),
        (changed(2, duration_ns=245_000), True),
        (changed(1, duration_ns=9_000), False),  # a minor bubble
        (changed(1, duration_ns=60_000), True),  # is minor no more
        (changed(1, free_bytes=1599), True),
        (changed(1, free_bytes=1999), False),
        (changed(1, free_bytes=9999), False),
        (changed(1, kind=BubbleKind.DRAIN), True),
        (replace(CYCLE, slots=CYCLE.slots[:2]), True),
        (replace(CYCLE, period_ns=1_300_000), True),
        (BubbleCycle(1_000_000, ()), True),
    ],
)
def test_drift(measured, expected):
    assert drifted(CYCLE, measured) is expected


def test_the_tolerance_is_kept():
    longer = changed(0, duration_ns=350_000)
    assert drifted(CYCLE, longer, tolerance=0.1)
    assert not drifted(CYCLE, longer, tolerance=0.17)
