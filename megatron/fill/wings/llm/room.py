"""Sequences that have keys and values on the device, and the memory that these may take."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from megatron.fill.display import mib
from megatron.fill.errors import TaskError
from megatron.fill.wings.llm.cache import PAGE, PagedCache, pages_for
from megatron.fill.wings.llm.sequence import GeneratedSequence

_AHEAD = 2 * PAGE  # tokens that every sequence is expected to have yet, unless it may have no more
# Times as many sequences as there are places for the longest: fewer are not worth copying their pages together in each
# pass, which makes a pass of 16 sequences of 512 tokens 1.5 to 1.7 times as long.
_WORTH_COPIES = 1.5
_LEARNING = 1 / 16  # weight of the latest sequence among those that have ended


class KeyValueRoom:
    """Gives sequences pages for what they have and what the next round needs, and admits others while there are pages.

    A sequence is admitted if the pages suffice until it ends, as far as can be told: all are expected to grow equally
    fast, and to have the share of the tokens that they may have which those before them had.  Where more are needed,
    the youngest lose theirs.  The oldest never does, so every sequence ends.

    While there is room for as many of the longest, each sequence has a place for its longest, for what is evenly apart
    is read without a copy.  What it does not need of that others may take.

    Args:
        caches: each model's cache; all have the same pages.
        spare: columns that a sequence needs besides its tokens, for the nodes of a tree.
    """

    def __init__(self, caches: Sequence[PagedCache], batch: int, spare: int) -> None:
        self._caches, self._spare = list(caches), spare
        self._most_bytes: int | None = None  # at any moment, also while the number of pages changes
        self.batch = batch  # largest number of sequences
        self.active: list[GeneratedSequence] = []  # in the order in which they were admitted
        self.waiting: deque[GeneratedSequence] = deque()  # the next one first
        self.peak_bytes = 0  # the most bytes ever held
        self._free: set[int] = set()
        self._place = 0  # pages of the places that lie evenly apart; 0 for none
        self._share = 1.0  # of the tokens that it may have, a sequence has in the end

    def bytes_for(self, pages: int) -> int:
        """The most that is held at any moment with so many pages, or while they change from or to fewer."""
        return sum(cache.bytes_for(pages) for cache in self._caches)

    def bytes_for_one(self, tokens: int) -> int:
        """Bytes that a sequence of up to this many tokens needs on its own."""
        return self.bytes_for(pages_for(tokens + self._spare))

    def fits(self, sequence: GeneratedSequence) -> bool:
        """True if a sequence can become as long as it may, on its own."""
        return self._most_bytes is None or self.bytes_for_one(sequence.most_tokens) <= self._most_bytes

    def admit(self) -> None:
        """Give pages to all for the next round, and then to those that wait, as long as they fit.

        Raises:
            TaskError: the next one does not fit although there is no other.
        """
        self._note()
        for sequence in self._by_age():
            while sequence.cached and self._lacking(sequence) > self._left():
                self._drop_youngest()
            if sequence.cached:
                self._extend(sequence)
        peak, before = 0, len(self.active)
        while self.waiting and len(self.active) < self.batch:
            following = self.waiting[0]
            worst = self._worst(following)
            needed = max(worst, self._peak([*self.active, following]))
            if needed > self._most_pages():
                if not self.active:
                    raise TaskError(
                        f"a sequence of {following.most_tokens} tokens needs {mib(self.bytes_for(worst))} of "
                        f"keys and values; expected at most {mib(self._most_bytes or 0)}"
                    )
                break
            self.waiting.popleft()
            following.cached = [0] * len(self._caches)
            self.active.append(following)
            peak = needed
        if len(self.active) > before and self._put_back(before):
            peak = self._peak(self.active)
        if len(self.active) > before and not self._placed(before):
            self._take_unneeded()
            self._grow(peak)
            for sequence in self.active[before:]:
                self._extend(sequence)

    def release(self, sequence: GeneratedSequence, clean: bool = False) -> None:
        """Take its pages.

        Args:
            clean: leave nothing of it, though it is not known to be tainted.
        """
        self._note()
        self.active.remove(sequence)
        if clean or sequence.tainted:
            for cache in self._caches:
                cache.wipe(sequence.pages)
        self._free.update(sequence.pages)
        sequence.cached, sequence.pages = [], []
        if sequence.generated and sequence.finish in ("stop", "length"):
            self._share += _LEARNING * (len(sequence.generated) / sequence.wanted.most - self._share)

    def wipe_rest(self, sequence: GeneratedSequence) -> None:
        """Set to zero what its pages have beyond a sequence's tokens: NaN stays NaN where it is masked."""
        for cache, columns in zip(self._caches, sequence.cached, strict=True):
            cache.wipe(sequence.pages, columns)

    def limit(self, most_bytes: int | None) -> None:
        """Hold no more than this from now on: the youngest lose their pages, and wait to be computed again."""
        self._most_bytes = most_bytes
        while self.active and self._peak(self.active) > self._most_pages():
            self._drop_youngest()
        if self._caches[0].pages > self._most_pages():
            self._take_unneeded()
            self._resize(int(self._most_pages()), [len(sequence.pages) for sequence in self.active])

    def narrow(self, batch: int) -> None:
        """No more sequences than this from now on."""
        self.batch = batch
        while len(self.active) > batch:
            self._drop_youngest()

    def _note(self) -> None:
        self.peak_bytes = max(self.peak_bytes, sum(cache.held_bytes for cache in self._caches))

    def _by_age(self) -> list[GeneratedSequence]:
        """The oldest first: the one with most tokens."""
        return sorted(self.active, key=lambda sequence: -len(sequence.generated))

    def _drop_youngest(self) -> None:
        youngest = self._by_age()[-1]
        self.release(youngest, clean=True)
        youngest.pooled = youngest.finish = None  # all of it is computed again
        self.waiting.appendleft(youngest)

    def _most_pages(self) -> float:
        if self._most_bytes is None:
            return math.inf
        return max(0, self._most_bytes // (self.bytes_for(2) - self.bytes_for(1)) - 1)

    def _worst(self, sequence: GeneratedSequence) -> int:
        """Pages that it may need in the end."""
        return pages_for(sequence.most_tokens + self._spare)

    def _left(self) -> float:
        """Pages that nobody needs, with those that could be made."""
        needed = sum(min(len(one.pages), len(one.pages) + self._lacking(one)) for one in self.active)
        return self._most_pages() - needed

    def _lacking(self, sequence: GeneratedSequence) -> int:
        """Pages that it needs for the next round besides those that it has."""
        return pages_for(sequence.length + self._spare) - len(sequence.pages)

    def _extend(self, sequence: GeneratedSequence) -> None:
        """Give it pages for the next round; nobody needs these, or they can be made."""
        lacking = self._lacking(sequence)
        if lacking <= 0:
            return
        if lacking > len(self._free):
            self._take_unneeded()
            self._grow(self._caches[0].pages + lacking - len(self._free))
        pages = list(sequence.pages) or self._side_by_side(sequence, lacking)
        self._free.difference_update(pages)
        while self._lacking(sequence) + len(sequence.pages) > len(pages):
            pages.append(pages[-1] + 1 if pages and pages[-1] + 1 in self._free else max(self._free))
            self._free.remove(pages[-1])
        sequence.pages = pages

    def _side_by_side(self, sequence: GeneratedSequence, count: int) -> list[int]:
        """So many free pages that follow each other, before others that it may need, if there are such.

        Those of the oldest are the lowest, and all others take the highest: so it stays where it is read without a
        copy for long.
        """
        free = np.array(sorted(self._free))
        for length in (self._worst(sequence), count):
            begins = np.flatnonzero(free[length - 1 :] - free[: max(0, len(free) - length + 1)] == length - 1)
            if len(begins):
                first = int(free[begins[0 if sequence is self.active[0] else -1]])
                return list(range(first, first + count))
        return []

    def _take_unneeded(self) -> None:
        """Take what sequences do not need of their places."""
        self._place = 0
        for sequence in self.active:
            needed = len(sequence.pages) + min(0, self._lacking(sequence))
            self._free.update(sequence.pages[needed:])
            sequence.pages = sequence.pages[:needed]

    def _put_back(self, before: int) -> bool:
        """Have those beyond the places wait again if they are too few to be worth copies; True if some wait again."""
        most = self._most_pages() / self._place_of_longest()
        if not most < len(self.active) < _WORTH_COPIES * most or before > most:
            return False
        while len(self.active) > most:
            sequence = self.active.pop()
            sequence.cached = []
            self.waiting.appendleft(sequence)
        return True

    def _place_of_longest(self) -> int:
        """Pages of a place for the longest sequence, even: else it would change with nearly every sequence."""
        return 2 * -(-max(map(self._worst, self.active)) // 2)

    def _placed(self, before: int) -> bool:
        """Give places to all but the first ones, which are there already; whether there is room for as many places."""
        place = self._place_of_longest()
        most = self._most_pages() / place
        if len(self.active) > (most if self._place or not before else most / 2):  # not one round so, the next so
            return False
        if self._place >= place:
            places = [range(at + 1, at + 1 + self._place) for at in range(0, self._caches[0].pages, self._place)]
            free = [one for one in places if self._free.issuperset(one)]
            if len(free) >= len(self.active) - before:
                for sequence, pages in zip(self.active[before:], free, strict=False):
                    sequence.pages = list(pages)
                    self._free.difference_update(pages)
                return True
        self._place, count = place, int(min(most, self.batch, len(self.active) + len(self.waiting)))
        self._resize(count * place, [place] * len(self.active))
        return True

    def _grow(self, least: int) -> None:
        """Have so many pages; if they are to become more, an eighth more at once if there may be, for it is a copy."""
        now = self._caches[0].pages
        if least > now:
            most = min(self._most_pages(), max(least, now + now // 8))
            self._resize(int(most), [len(sequence.pages) for sequence in self.active])

    def _peak(self, sequences: Sequence[GeneratedSequence]) -> int:
        """The pages that these need at the worst moment: that is when one of them is about to end."""
        left = np.array([self._expected(sequence) for sequence in sequences])
        lengths = np.array([sequence.length for sequence in sequences]) + self._spare
        there = left[None] >= left[:, None]  # at the end of each: the others that are not over
        return int((there * -(-(lengths + left[:, None]) // PAGE)).sum(1).max())

    def _expected(self, sequence: GeneratedSequence) -> int:
        most = math.ceil(self._share * sequence.wanted.most) - len(sequence.generated)
        return min(sequence.left, max(_AHEAD, most))

    def _resize(self, pages: int, counts: Sequence[int]) -> None:
        """Change the number of pages; each sequence has so many then, side by side."""
        ends = list(accumulate(counts, initial=1))
        tables = [list(range(begin, end)) for begin, end in pairwise(ends)]
        kept = {
            old: new
            for sequence, table in zip(self.active, tables, strict=True)
            for old, new in zip(sequence.pages, table, strict=False)
        }
        for cache in self._caches:
            others = sum(other.held_bytes for other in self._caches if other is not cache)
            self.peak_bytes = max(self.peak_bytes, others + cache.resize(pages, kept))
        for sequence, table in zip(self.active, tables, strict=True):
            sequence.pages = table
        self._free = set(range(ends[-1], pages + 1))
