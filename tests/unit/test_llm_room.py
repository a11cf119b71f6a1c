"""Which sequences have slots, within a limit in bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from megatron.fill.errors import TaskError  # noqa: E402
from megatron.fill.llm.cache import LayerShape, SlotCache  # noqa: E402
from megatron.fill.llm.room import KeyValueRoom  # noqa: E402
from megatron.fill.llm.sequence import GeneratedSequence, Wanted  # noqa: E402


def caches():
    small = SlotCache([LayerShape(1, 2, 2)], torch.float32, "cpu")
    return [SlotCache([LayerShape(2, 4, 4), LayerShape(2, 4, 8), LayerShape(2, 4, 4)], torch.float32, "cpu"), small]


def sequence(prompt=4, most=8, done=0):
    return GeneratedSequence(Wanted((1,) * prompt, most), generated=[2] * done)


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 90)),
    st.tuples(st.just("admit"), st.just(0)),
    st.tuples(st.just("release"), st.integers(0, 7)),
    st.tuples(st.just("limit"), st.integers(1, 6)),
    st.tuples(st.just("narrow"), st.integers(1, 5)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(ACTIONS, max_size=30))
def test_whatever_happens_the_bytes_stay_below_the_limit(actions):
    room = KeyValueRoom(caches(), 4, 3, None)
    largest = room.bytes_for_one(100)
    limit = 4 * largest
    room.limit(limit)
    everyone = []
    for action, value in actions:
        if action == "add":
            everyone.append(sequence(2, value))
            room.waiting.append(everyone[-1])
        elif action == "admit":
            room.admit()
        elif action == "release" and room.active:
            gone = room.active[value % len(room.active)]
            room.release(gone)
            everyone.remove(gone)
        elif action == "limit":
            before, limit = limit, value * largest
            room.limit(limit)
            assert room.peak_bytes <= max(before, limit)
            room.peak_bytes = 0  # while it gave back, it held more
        elif action == "narrow":
            room.narrow(value)
        held = sum(cache.held_bytes for cache in room._caches)
        assert max(held, room.peak_bytes) <= limit
        assert len(room.active) <= min(room.batch, room._caches[0].slots)
        assert sorted(map(id, [*room.active, *room.waiting])) == sorted(map(id, everyone))
        assert all(one.most_tokens + 3 <= room._caches[0].capacity for one in room.active)
    room.admit()
    assert room.active or not everyone  # one fits at least


def test_what_is_kept_stays_where_its_sequence_is():
    room = KeyValueRoom(caches(), 3, 0, None)
    room.waiting.extend([sequence(), sequence(), sequence()])
    room.admit()
    for slot, one in enumerate(room.active):
        one.cached = [3, 2]
        for cache in room._caches:
            for tensor in (*cache._keys, *cache._values):
                tensor[slot] = slot + 1
    last = room.active[2]
    room.release(room.active[0])
    assert room.active[0] is last
    for cache, columns in zip(room._caches, (3, 2), strict=True):
        for tensor in (*cache._keys, *cache._values):
            assert (tensor[0, :, :columns] == 3).all()
    room.waiting.append(sequence(4, 100))
    room.admit()  # the room grows
    assert len(room.active) == 3
    for cache, columns in zip(room._caches, (3, 2), strict=True):
        for tensor in (*cache._keys, *cache._values):
            assert (tensor[0, :, :columns] == 3).all()
            assert (tensor[1, :, :columns] == 2).all()


def test_one_that_does_not_fit_alone_is_said():
    room = KeyValueRoom(caches(), 3, 0, 1000)
    room.waiting.append(sequence(4, 100))
    with pytest.raises(TaskError, match="a sequence of 104 tokens needs"):
        room.admit()


def test_the_youngest_lose_their_room_and_are_the_next_ones():
    room = KeyValueRoom(caches(), 3, 0, None)
    old, middle, young = sequence(done=6), sequence(done=4), sequence(done=1)
    room.waiting.extend([middle, young, old])
    room.admit()
    room.waiting.append(sequence())
    room.limit(room.bytes_for_one(12))
    assert room.active == [old]
    assert list(room.waiting)[:2] == [middle, young]
    assert young.cached == []
    assert len(young.generated) == 1


def test_a_pass_that_is_compacted_reads_all_before_it_writes():
    cache = caches()[0]
    cache.resize(2, 8)
    for tensor in (*cache._keys, *cache._values):
        tensor[:] = torch.arange(9.0)[None, None, :, None]
    cache.compact([1], [[3, 4, 7]], [[2, 3, 4]])
    for tensor in (*cache._keys, *cache._values):
        assert tensor[1, 0, :, 0].tolist() == [0, 1, 3, 4, 7, 5, 6, 7, 8]
        assert tensor[0, 0, :, 0].tolist() == list(range(9))
