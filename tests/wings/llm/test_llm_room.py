"""Which sequences have pages, within a limit in bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from megatron.fill.errors import TaskError  # noqa: E402
from megatron.fill.wings.llm.cache import PAGE, LayerShape, PagedCache, pages_for  # noqa: E402
from megatron.fill.wings.llm.room import KeyValueRoom  # noqa: E402
from megatron.fill.wings.llm.sequence import GeneratedSequence, Wanted  # noqa: E402


def caches():
    small = PagedCache([LayerShape(1, 2, 2)], torch.float32, "cpu")
    return [PagedCache([LayerShape(2, 4, 4), LayerShape(2, 4, 8), LayerShape(2, 4, 4)], torch.float32, "cpu"), small]


def sequence(prompt=4, most=8, done=0):
    return GeneratedSequence(Wanted((1,) * prompt, most), generated=[2] * done)


def tensors(cache):
    return (*cache._keys, *cache._values)


def check_tables(room):
    """Each page is somebody's or free, and nobody's twice; all caches have as many."""
    pages = room._caches[0].pages
    assert {cache.pages for cache in room._caches} == {pages}
    taken = [page for one in room.active for page in one.pages]
    assert sorted([*taken, *room._free]) == list(range(1, pages + 1))


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 90)),
    st.tuples(st.just("round"), st.integers(1, 9)),
    st.tuples(st.just("round"), st.integers(1, 9)),
    st.tuples(st.just("release"), st.integers(0, 7)),
    st.tuples(st.just("limit"), st.integers(1, 6)),
    st.tuples(st.just("narrow"), st.integers(1, 5)),
)


@settings(max_examples=150)
@given(st.lists(ACTIONS, max_size=40))
def test_whatever_happens_the_bytes_stay_below_the_limit_and_no_page_is_shared(actions):
    room = KeyValueRoom(caches(), 4, 3)
    largest = room.bytes_for_one(100)
    limit = 4 * largest
    room.limit(limit)
    everyone = []
    for action, value in actions:
        if action == "add":
            everyone.append(sequence(2, value))
            room.waiting.append(everyone[-1])
        elif action == "round":
            before = list(room.active)
            oldest = max(before, key=lambda one: len(one.generated), default=None)
            room.admit()
            assert oldest is None or oldest in room.active
            for one in list(room.active):
                assert pages_for(one.length + 3) <= len(one.pages)
                for model, cache in enumerate(room._caches):
                    cache.copy(0, 1)  # as a pass does
                    for tensor in tensors(cache):
                        assert not tensor[:, one.pages].isnan().any()
                    one.cached[model] = one.length
                one.generated += [2] * min(value, one.left)
                if not one.left:
                    one.finish = "length"
                    room.release(one)
                    everyone.remove(one)
        elif action == "release" and room.active:
            gone = room.active[value % len(room.active)]
            gone.tainted = True
            for tensor in (one for cache in room._caches for one in tensors(cache)):
                tensor[:, gone.pages] = float("nan")
            room.release(gone)
            everyone.remove(gone)
        elif action == "limit":
            before_bytes, limit = limit, value * largest
            room.limit(limit)
            assert room.peak_bytes <= max(before_bytes, limit)
            room.peak_bytes = 0  # while it gave back, it held more
        elif action == "narrow":
            room.narrow(value)
        held = sum(cache.held_bytes for cache in room._caches)
        assert max(held, room.peak_bytes) <= limit
        assert len(room.active) <= room.batch
        assert sorted(map(id, [*room.active, *room.waiting])) == sorted(map(id, everyone))
        check_tables(room)
    for _ in range(100 * len(everyone)):
        room.admit()
        assert room.active or not everyone  # one fits at least
        for one in list(room.active):
            one.generated.append(2)
            if not one.left:
                room.release(one)
                everyone.remove(one)
    assert not everyone
    assert len(room._free) == room._caches[0].pages


def test_what_is_kept_is_its_sequences_where_the_pages_change():
    room = KeyValueRoom(caches(), 4, 0)
    room.limit(room.bytes_for(8))
    room.waiting.extend([sequence(20), sequence(40), sequence(3)])
    room.admit()
    assert [len(one.pages) for one in room.active] == [2, 3, 1]
    first, *others = room.active
    for mark, one in enumerate(others, 2):
        for cache in room._caches:
            for tensor in tensors(cache):
                tensor[:, one.pages] = mark
    room.release(first)
    room.waiting.append(sequence(400, 1000))
    room.limit(None)
    room.admit()  # there are places for the longest
    assert len({len(one.pages) for one in room.active}) == 1
    check_tables(room)
    room.limit(room.bytes_for(11))
    assert room.active == others
    assert sorted(page for one in others for page in one.pages) == [1, 2, 3, 4]
    for mark, one in enumerate(others, 2):
        for cache in room._caches:
            assert all((tensor[:, one.pages] == mark).all() for tensor in tensors(cache))


def test_one_that_does_not_fit_alone_is_said():
    room = KeyValueRoom(caches(), 3, 0)
    room.limit(1000)
    room.waiting.append(sequence(4, 100))
    with pytest.raises(TaskError, match="a sequence of 104 tokens needs"):
        room.admit()


def test_the_youngest_lose_their_room_and_are_the_next_ones():
    room = KeyValueRoom(caches(), 3, 0)
    old, middle, young = sequence(done=6), sequence(done=4), sequence(done=1)
    room.waiting.extend([middle, young, old])
    room.admit()
    room.waiting.append(sequence())
    room.limit(room.bytes_for_one(12))
    assert room.active == [old]
    assert list(room.waiting)[:2] == [middle, young]
    assert young.cached == young.pages == []
    assert len(young.generated) == 1


def test_those_that_end_at_different_times_share_pages_that_all_together_would_need_more_of():
    """Each needs 5 pages at its end; one that is half done ends before the other needs them."""
    room = KeyValueRoom(caches(), 8, 0)
    most = 5 * PAGE - 4
    room.limit(room.bytes_for(8))
    room.waiting.extend([sequence(4, most), sequence(4, most)])
    room.admit()
    assert len(room.active) == 1
    room.active[0].generated = [2] * (most // 2)
    room.admit()
    assert len(room.active) == 2
    for _ in range(most):
        room.admit()
        for one in list(room.active):
            one.generated.append(2)
            if not one.left:
                room.release(one)
    assert not room.active
    assert not room.waiting


def test_where_sequences_end_early_more_are_admitted():
    room = KeyValueRoom(caches(), 8, 0)
    room.limit(room.bytes_for(pages_for(1000)))
    for _ in range(60):
        room.waiting.extend(sequence(4, 900) for _ in range(2))
        room.admit()
        for one in list(room.active):
            one.generated, one.finish = [2] * 40, "stop"
            room.release(one)
        room.waiting.clear()
    room.waiting.extend(sequence(4, 900) for _ in range(8))
    room.admit()
    assert len(room.active) > 5


def test_a_pass_that_is_compacted_reads_all_before_it_writes():
    cache = caches()[0]
    cache.resize(5, {})
    for tensor in tensors(cache):
        tensor[:] = torch.arange(6.0 * PAGE).view(6, PAGE, 1)
    before = [tensor.clone() for tensor in tensors(cache)]
    cache.compact([([4, 2], 3, 2), ([4, 2], PAGE, 3), ([4, 2], PAGE + 4, PAGE)])
    for tensor, its in zip(tensors(cache), before, strict=True):
        its[:, 4, 2], its[:, 4, 3], its[:, 2, 0] = 4 * PAGE + 3, 2 * PAGE, 2 * PAGE + 4
        assert torch.equal(tensor, its)


@settings(max_examples=50)
@given(st.integers(0, 3 * PAGE))
def test_what_is_wiped_are_the_columns_from_the_first_one_on(first):
    cache = caches()[0]
    cache.resize(4, {})
    for tensor in tensors(cache):
        tensor[:] = 1
    table = [3, 1, 4]
    cache.wipe(table, first)
    for tensor in tensors(cache):
        columns = tensor[:, table].flatten(1, 2)
        assert (columns[:, :first] == 1).all()
        assert (columns[:, first:] == 0).all()
        assert (tensor[:, [0, 2]] == 1).all()


@pytest.mark.parametrize(("short", "expected"), [(750, 4), (20, 9)])
def test_pages_are_copied_together_only_for_half_as_many_sequences_again(short, expected):
    """Four of the longest fit; without copies there is no room for more of the others."""
    room = KeyValueRoom(caches(), 9, 3)
    room.limit(4 * room.bytes_for_one(1016))  # places are of an even number of pages
    room.waiting.extend([sequence(2, 998), *(sequence(2, short) for _ in range(8))])
    room.admit()
    assert len(room.active) == expected
    check_tables(room)
