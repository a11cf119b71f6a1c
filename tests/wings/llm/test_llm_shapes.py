"""Which token tree is chosen."""

from __future__ import annotations

import pytest

from megatron.fill.wings.llm.shapes import AUTO, ShapeChooser, most_nodes


def play(chooser, seconds, tokens, rounds):
    """The shapes of so many rounds, each of which takes and gives what the shape does."""
    chosen = []
    for _ in range(rounds):
        shape = chooser.choose()
        chosen.append(shape)
        chooser.observe(shape, tokens[shape], seconds[shape])
    return chosen


def test_the_fastest_shape_is_used_and_the_others_are_tried_for_a_fiftieth_of_the_time():
    shapes = [(), (1,), (1, 1)]
    seconds, tokens = {(): 1.0, (1,): 1.5, (1, 1): 2.0}, {(): 1, (1,): 1.8, (1, 1): 2.2}
    chosen = play(ShapeChooser(shapes), seconds, tokens, 2000)
    others = [shape for shape in chosen[6:] if shape != (1,)]
    assert set(others) == {(), (1, 1)}
    share = sum(seconds[shape] for shape in others) / sum(seconds[shape] for shape in chosen)
    assert 0.005 < share < 0.025


def test_it_follows_when_another_shape_becomes_the_fastest():
    shapes = [(), (1, 1)]
    chooser = ShapeChooser(shapes)
    play(chooser, {(): 1.0, (1, 1): 2.0}, {(): 1, (1, 1): 3}, 200)
    assert chooser.best == (1, 1)
    play(chooser, {(): 1.0, (1, 1): 2.0}, {(): 1, (1, 1): 1}, 400)
    assert chooser.best == ()


def test_a_round_that_did_something_else_too_says_nothing_but_costs_time():
    chooser = ShapeChooser([(), (1,)])
    for _ in range(4):
        chooser.observe(chooser.choose(), 1, 1.0)
    chooser.observe((1,), None, 100.0)
    assert play(chooser, {(): 1.0, (1,): 2.0}, {(): 1, (1,): 1}, 100) == [()] * 100


def test_one_shape_is_no_choice():
    assert play(ShapeChooser([(2, 1)]), {(2, 1): 1.0}, {(2, 1): 1}, 10) == [(2, 1)] * 10


@pytest.mark.parametrize(("shape", "drafts", "nodes"), [((), 1, 0), ((1, 1), 1, 2), ((3, 1), 2, 12), ((2, 2), 1, 6)])
def test_nodes_of_a_tree(shape, drafts, nodes):
    assert most_nodes(shape, drafts) == nodes


def test_one_can_fall_back_to_no_tree_and_the_last_shape_is_the_largest():
    assert () in AUTO
    assert all(len(shape) <= len(AUTO[-1]) and most_nodes(shape, 1) <= most_nodes(AUTO[-1], 1) for shape in AUTO)
