"""What a pass sees of keys and values in pages, and rows that pass through a model in groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.small_models import CONTEXT, model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from megatron.fill.wings.llm import passes  # noqa: E402
from megatron.fill.wings.llm.cache import PAGE, CacheView, LayerShape, PagedCache, pages_for  # noqa: E402
from megatron.fill.wings.llm.grouping import PassCost, grouped  # noqa: E402
from megatron.fill.wings.llm.passes import ModelRunner, RowInput  # noqa: E402

SHAPES = [LayerShape(2, 3, 5), LayerShape(1, 4, 4)]


@settings(max_examples=100)
@given(st.data())
def test_a_pass_sees_the_columns_of_each_row_and_padding_is_seen_by_none(data):
    rows, apart = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    lengths = [data.draw(st.integers(1, 3 * PAGE)) for _ in range(rows)]
    if apart:
        tables = [list(range(1 + 4 * row, 5 + 4 * row)) for row in range(rows)]
    else:
        pages = iter(data.draw(st.permutations(range(1, 1 + 4 * rows))))
        tables = [[next(pages) for _ in range(pages_for(length))] for length in lengths]
    cache = PagedCache(SHAPES, torch.float32, "cpu")
    cache.resize(4 * rows, {})
    queries = [data.draw(st.integers(1, length)) for length in lengths]
    columns = np.full((rows, max(queries)), -1)
    for row, (length, new) in enumerate(zip(lengths, queries, strict=True)):
        columns[row, :new] = range(length - new, length)
    view = CacheView(cache, tables, columns, max(lengths))
    for layer, shape in enumerate(SHAPES):
        given = [torch.rand(rows, shape.heads, max(queries), size) for size in (shape.key_size, shape.value_size)]
        for row, new in enumerate(queries):
            for one in given:
                one[row, :, new:] = float("nan")
        for one, seen in zip(given, view.update(*given, layer), strict=True):
            assert seen.shape == (rows, shape.heads, max(lengths), one.shape[3])
            assert not seen.isnan().any()
            for row, (length, new) in enumerate(zip(lengths, queries, strict=True)):
                assert torch.equal(seen[row, :, length - new : length], one[row, :, :new])
                assert (seen[row, :, : length - new] == 0).all()
                assert not apart or (seen[row, :, length:] == 0).all()
    assert cache.held_bytes <= cache.bytes_for(4 * rows)
    if apart:
        assert not cache._copy.numel()  # read where they are


COSTS = st.builds(PassCost, *[st.floats(0.01, 1000) for _ in range(4)])
SIZES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 500)), min_size=1, max_size=7)


def priced(groups, sizes, cost):
    return sum(
        float(cost.of(len(group), max(sizes[at][0] for at in group), max(sizes[at][1] for at in group)))
        for group in groups
    )


@settings(max_examples=300)
@given(SIZES, COSTS, st.integers(500, 5000))
def test_groups_cost_no_more_than_one_batch_or_a_batch_for_each(sizes, cost, room):
    queries, columns = zip(*sizes, strict=True)
    groups = grouped(queries, columns, cost, room)
    assert sorted(at for group in groups for at in group) == list(range(len(sizes)))
    assert all(len(group) * max(sizes[at][1] for at in group) <= room for group in groups)
    found = priced(groups, sizes, cost)
    assert found <= priced([[at] for at in range(len(sizes))], sizes, cost) * (1 + 1e-9)
    if len(sizes) * max(columns for _, columns in sizes) <= room:
        assert found <= priced([list(range(len(sizes)))], sizes, cost) * (1 + 1e-9)


def test_a_long_row_beside_short_ones_is_a_batch_of_its_own():
    cost = PassCost(batch=1000, token=10, column=1, copied=1)
    assert sorted(grouped([1] * 6, [20, 20, 2000, 20, 20, 20], cost, 10**6)) == [[0, 1, 3, 4, 5], [2]]
    assert grouped([1] * 6, [20, 20, 60, 20, 20, 20], cost, 10**6) == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("pieces", [1, 3])
def test_groups_give_what_one_batch_gives(pieces, monkeypatch):
    runner = ModelRunner(model(), CONTEXT, pieces)
    sizes = [(3, 70), (9, 9), (1, 40), (2, 2)]
    found = []
    for groups in ([[0, 1, 2, 3]], [[2, 0], [1, 3]], [[3], [0], [1], [2]]):
        monkeypatch.setattr(passes, "grouped", lambda *_, groups=groups: groups)
        runner.cache.resize(20, {})
        tables = [[1, 7, 2, 8, 3], [4], [5, 9, 6], [20]]
        for begun in (False, True):
            rows = [
                RowInput.following(pages, [(3 * at) % 37 for at in range(begin, end)], begin)
                for pages, (new, length) in zip(tables, sizes, strict=True)
                for begin, end in [(length - new, length) if begun else (0, max(1, length - new))]
            ]
            runner.begin(rows)
            assert [runner.passes.run() for _ in range(pieces)] == [False] * (pieces - 1) + [True]
        found.append([runner.passes.result[at, :new] for at, (new, _) in enumerate(sizes)])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert (one - other).abs().max() < 1e-4


@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_model_gets_its_cache_by_the_name_that_its_release_has():
    runner = ModelRunner(model(), CONTEXT)
    runner.cache.resize(1, {})
    runner.begin([RowInput.following([1], [1, 2, 3], 0)])
    assert runner.passes.run()
