"""What is left of bubbles where the user says nothing else: it depends on how the GPU is shared."""

from __future__ import annotations

import pytest

from megatron.fill.app.listening import fill_rule
from megatron.fill.config import FillSettings
from megatron.fill.device.port import Sharing
from megatron.fill.rank.predictor import BubblePredictor
from megatron.fill.rank.rule import FillRule

MS = 1_000_000


@pytest.mark.parametrize("sharing", [None, Sharing.MPS])
def test_where_nobody_takes_turns_no_end_is_kept_free(sharing):
    rule = fill_rule(FillSettings(), 4, sharing=sharing)
    assert (rule.guard_ns, rule.min_bubble_ns, rule.stages) == (0, MS, 4)


def test_a_time_sliced_gpu_keeps_a_turn_free_and_leaves_short_bubbles_alone():
    rule = fill_rule(FillSettings(), 4, sharing=Sharing.TIMESLICE)
    assert (rule.guard_ns, rule.min_bubble_ns) == (2 * MS, 5 * MS)


@pytest.mark.parametrize("sharing", [None, *Sharing])
def test_what_the_user_says_counts(sharing):
    rule = fill_rule(FillSettings(guard_us=0, min_bubble_us=300), 4, sharing=sharing)
    assert (rule.guard_ns, rule.min_bubble_ns) == (0, 300_000)


def test_replicas_share_what_overruns_may_cost_and_are_predicted_to_end_earlier():
    alone, many = FillRule(overrun=0.004, stages=2), FillRule(overrun=0.004, stages=2, replicas=25)
    assert (BubblePredictor(alone).overrun, BubblePredictor(many).overrun) == (0.002, 0.002 / 25)
    # The 10% quantile is a spread before the median; with an exponential tail, that of 50% / 5^n is n spreads.
    assert (alone.early_spreads, many.early_spreads) == (0.5, pytest.approx(2.5))
