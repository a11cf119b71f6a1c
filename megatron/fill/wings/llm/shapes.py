"""Choice of the fastest token tree: measured, since it depends on the drafts, the batch and the device."""

from __future__ import annotations

from collections.abc import Sequence

Shape = tuple[int, ...]
AUTO: tuple[Shape, ...] = (
    (),
    (1,),
    (1, 1),
    (1, 1, 1),
    (3, 1),
    (1, 1, 1, 1),
    (1, 1, 1, 1, 1, 1),
    (1, 1, 3, 1, 1, 1, 1, 1),
)
_DECAY = 0.95  # of what was measured, by round
_EXPLORING = 0.02  # of the time
_ROUNDS = 2  # of each shape before any is judged


def read_shapes(tree: list[int] | str) -> list[Shape]:
    """The shapes to choose from, as a jobs file says it; ValueError if it is neither ``auto`` nor a shape."""
    if tree == "auto":
        return list(AUTO)
    if not isinstance(tree, list) or not tree or not all(type(width) is int and width >= 1 for width in tree):
        raise ValueError(f"tree is {tree!r}: expected auto, or numbers of tokens by depth such as [1, 1, 3, 1]")
    return [tuple(tree)]


def most_nodes(shape: Shape, drafts: int) -> int:
    """Nodes of a tree of this shape at most, without the root."""
    level, nodes = 1, 0
    for width in shape:
        level *= width
        nodes += level
    return nodes * drafts


class ShapeChooser:
    """Chooses the shape that gave the most tokens a second.

    The others are tried again from time to time, for a fiftieth of the time.  The empty shape is plain decoding, to
    which it falls back.

    Args:
        shapes: to choose from; with one of them there is no choice.
    """

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.shapes = tuple(shapes)
        self._tokens = dict.fromkeys(self.shapes, 0.0)
        self._seconds = dict.fromkeys(self.shapes, 0.0)
        self._rounds = dict.fromkeys(self.shapes, 0)
        self._latest = dict.fromkeys(self.shapes, 0)  # when it was measured, in rounds
        self._total = self._explored = 0.0
        self._round = 0

    def choose(self) -> Shape:
        """The shape of the next round."""
        new = [shape for shape in self.shapes if self._rounds[shape] < _ROUNDS]
        if new:
            return new[0]
        best = self.best
        others = [shape for shape in self.shapes if shape != best]
        if others and self._explored < _EXPLORING * self._total:
            return min(others, key=self._latest.__getitem__)
        return best

    @property
    def best(self) -> Shape:
        """Fastest of the measured shapes; the first shape before any measurement."""
        return max(self.shapes, key=self._speed)

    def observe(self, shape: Shape, tokens: int | None, seconds: float) -> None:
        """Record the time of a round of this shape.

        Args:
            tokens: number of tokens that it gave; None if the time was not all spent on them.
        """
        if shape != self.best:
            self._explored += seconds
        self._total += seconds
        if tokens is None:
            return
        self._round += 1
        self._latest[shape] = self._round
        self._rounds[shape] += 1
        if self._rounds[shape] == 1:
            return  # what it loads and allocates for the first time is no measure
        self._tokens[shape] = self._tokens[shape] * _DECAY + tokens
        self._seconds[shape] = self._seconds[shape] * _DECAY + seconds

    def _speed(self, shape: Shape) -> float:
        return self._tokens[shape] / self._seconds[shape] if self._seconds[shape] else 0.0
