"""Which sequences have keys and values on the device, and how much these may take."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megatron.fill.device.port import mib
from megatron.fill.errors import TaskError
from megatron.fill.llm.cache import SlotCache
from megatron.fill.llm.sequence import GeneratedSequence

_ROUND_TO = 32  # columns: else the room would change with nearly every sequence


class KeyValueRoom:
    """Admits sequences to slots while the worst case of all of them fits; the slots in use are always the first ones.

    Args:
        caches: of every model; all have the same slots.
        spare: columns that a sequence needs besides its tokens, for the nodes of a tree.
        most_bytes: of keys and values at any moment, also while the room changes; None for no limit.

    Attributes:
        batch: sequences at most.
        active: in the order of their slots.
        waiting: the next one first.
        peak_bytes: the most that was ever held.
    """

    def __init__(self, caches: Sequence[SlotCache], batch: int, spare: int, most_bytes: int | None) -> None:
        self._caches, self._spare, self._most_bytes = list(caches), spare, most_bytes
        self.batch = batch
        self.active: list[GeneratedSequence] = []
        self.waiting: deque[GeneratedSequence] = deque()
        self.peak_bytes = 0

    def bytes_for(self, slots: int, capacity: int) -> int:
        """The most that is held at any moment with this room, or while it changes from or to a smaller one."""
        return sum(cache.bytes_for(slots, capacity) for cache in self._caches)

    def bytes_for_one(self, tokens: int) -> int:
        """What a sequence that may have so many tokens needs if there is no other."""
        return self.bytes_for(1, self._columns(tokens))

    def admit(self) -> None:
        """Give slots to those that wait, as long as they fit.

        Raises:
            TaskError: the next one does not fit although there is no other.
        """
        while self.waiting and len(self.active) < self.batch:
            following = self.waiting[0]
            cache = self._caches[0]
            if len(self.active) == cache.slots or self._columns_of([following]) > cache.capacity:
                columns = self._columns_of([*self.active, following])
                slots = min(self._slots_for(columns), self.batch, len(self.active) + len(self.waiting))
                if slots <= len(self.active):
                    if not self.active:
                        raise TaskError(
                            f"a sequence of {following.most_tokens} tokens needs {mib(self.bytes_for(1, columns))} of "
                            f"keys and values; expected at most {mib(self._most_bytes or 0)}"
                        )
                    return
                self._resize(slots, columns)
            self.waiting.popleft()
            following.cached = [0] * len(self._caches)
            self.active.append(following)

    def release(self, sequence: GeneratedSequence, clean: bool = False) -> None:
        """Take its slot; the last one moves there.

        Args:
            clean: leave nothing of it, though it is not known to be tainted.
        """
        slot, last = self.active.index(sequence), self.active.pop()
        for cache, columns in zip(self._caches, last.cached, strict=True):
            if clean or sequence.tainted:
                cache.wipe(slot, 0)
            if last is not sequence:
                cache.move(len(self.active), slot, columns)
            if clean or last.tainted:
                cache.wipe(len(self.active), 0)
        if last is not sequence:
            self.active[slot] = last
        sequence.cached = []

    def wipe_rest(self, sequence: GeneratedSequence) -> None:
        """Set to zero what a slot has beyond its sequence's tokens: NaN stays NaN where it is masked."""
        slot = self.active.index(sequence)
        for cache, columns in zip(self._caches, sequence.cached, strict=True):
            cache.wipe(slot, columns)

    def limit(self, most_bytes: int | None) -> None:
        """Hold no more than this from now on: the youngest lose their slots, and wait to be computed again."""
        self._most_bytes = most_bytes
        while self.active and self._slots_for(self._columns_of(self.active)) < len(self.active):
            self._drop_youngest()
        cache = self._caches[0]
        if most_bytes is not None and self.bytes_for(cache.slots, cache.capacity) > most_bytes:
            self._resize(len(self.active), self._columns_of(self.active))

    def narrow(self, batch: int) -> None:
        """No more sequences than this from now on."""
        self.batch = batch
        while len(self.active) > batch:
            self._drop_youngest()

    def _drop_youngest(self) -> None:
        youngest = min(self.active, key=lambda sequence: len(sequence.generated))
        self.release(youngest, clean=True)
        self.waiting.appendleft(youngest)

    def _columns_of(self, sequences: Sequence[GeneratedSequence]) -> int:
        return self._columns(max((sequence.most_tokens for sequence in sequences), default=0))

    def _columns(self, tokens: int) -> int:
        return -(-(tokens + self._spare) // _ROUND_TO) * _ROUND_TO

    def _slots_for(self, columns: int) -> int:
        if self._most_bytes is None:
            return self.batch
        return self._most_bytes // self.bytes_for(1, columns)

    def _resize(self, slots: int, columns: int) -> None:
        columns = columns if slots else 0
        for cache in self._caches:
            others = sum(other.held_bytes for other in self._caches if other is not cache)
            self.peak_bytes = max(self.peak_bytes, others + cache.resize(slots, columns))
