"""A generated sequence: its request, and its progress."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatron.fill.wings.llm.sampling import Sampling

if TYPE_CHECKING:
    from megatron.fill.wings.llm.grammar import Grammar

Pooling = Literal["last", "mean"]
Decode = Callable[..., str]  # as Tokenizer.decode


@dataclass(frozen=True, slots=True)
class Wanted:
    """Request for a sequence."""

    prompt: tuple[int, ...]  # token ids, at least one
    most: int  # largest number of new tokens, at least one
    sampling: Sampling = field(default_factory=Sampling)
    seed: tuple[int, ...] = (0,)  # of its randomness: the same numbers, the same draws
    stop: tuple[str, ...] = ()  # texts that end it; they are not in its text
    alternatives: int | None = None  # number of the most probable tokens to record at each place; None for no record
    stop_ids: tuple[int, ...] = ()  # tokens that end it besides those that end every sequence
    special_stops: tuple[str, ...] = ()  # texts that end it, in the text with the names of tokens that have no text
    pooling: Pooling | None = None
    """Pooling for an embedding: nothing is generated, and the hidden states of all tokens but the last one, which
    stands for nothing, become one vector, that of the last of them or their mean; None generates."""


@dataclass(frozen=True, slots=True)
class TokenNote:
    """A token with the logarithm of its probability."""

    token: int
    logarithm: float
    best: tuple[tuple[int, float], ...] = ()  # the most probable ones there, the best first, with their logarithms


@dataclass(slots=True, eq=False)
class GeneratedSequence:
    """A sequence and its tokens so far."""

    wanted: Wanted
    name: Any = None  # its owner's name for it
    generated: list[int] = field(default_factory=list)
    notes: list[TokenNote] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    """Tokens whose keys and values each model has, the large one first; empty while it has no pages."""
    pages: list[int] = field(default_factory=list)  # of its keys and values, for all models
    finish: Literal["stop", "length", "error"] | None = None  # reason of its end
    text: str = ""  # its text without the stop text, or the error's; set at its end
    tainted: bool = False
    """True after a model gave numbers for it that are not finite: its keys and values may have such too."""
    grammar: Grammar | None = None  # that it has to follow
    pooled: np.ndarray | None = None  # the vector so far, ``[hidden]``, not normalised
    _prompt_ids: np.ndarray | None = field(default=None, repr=False)

    @property
    def prompt_ids(self) -> np.ndarray:
        """The different token ids of the prompt."""
        if self._prompt_ids is None:
            self._prompt_ids = np.unique(np.array(self.wanted.prompt, dtype=np.int64))
        return self._prompt_ids

    @property
    def tokens(self) -> list[int]:
        """Prompt and what was generated."""
        return [*self.wanted.prompt, *self.generated]

    @property
    def length(self) -> int:
        return len(self.wanted.prompt) + len(self.generated)

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens that it can have, its prompt included."""
        return len(self.wanted.prompt) + self.wanted.most

    @property
    def left(self) -> int:
        """New tokens that it may still have."""
        return self.wanted.most - len(self.generated)

    def take(self, tokens: Sequence[int], notes: Sequence[TokenNote], ends: Collection[int], decode: Decode) -> int:
        """Add tokens, up to the one that ends it; how many were added.

        Args:
            ends: token ids that end every sequence.
        """
        for count, token in enumerate(tokens, 1):
            self.generated.append(token)
            self.notes.extend(notes[count - 1 : count])
            if token in ends or token in self.wanted.stop_ids:
                self._end("stop", decode(self.generated[:-1]))
            elif (text := self._stopped(decode)) is not None:
                self._end("stop", text)
            elif not self.left:
                self._end("length", decode(self.generated))
            if self.finish is not None:
                return count
        return len(tokens)

    def fail(self, why: str) -> None:
        """End it without an answer."""
        self.finish, self.text = "error", why

    def pool(self, states: Any) -> None:
        """Add the hidden states, ``[tokens, hidden]``, of the tokens after the cached ones; the last of all end it."""
        if not states.isfinite().all():
            self.tainted = True
            self.fail("the model's hidden states are not finite numbers (NaN or infinite)")
        if self.finish is not None:
            return
        last = self.wanted.pooling == "last"
        part = (states[-1:] if last else states).double().sum(0).cpu().numpy()
        self.pooled = part if last or self.pooled is None else self.pooled + part
        if self.cached[0] + len(states) == len(self.wanted.prompt) - 1:
            self.finish = "stop"

    def _stopped(self, decode: Decode) -> str | None:
        """The text before a stop that the latest token completed; None for none."""
        found = [self._before(self.wanted.stop, decode, False), self._before(self.wanted.special_stops, decode, True)]
        return min((text for text in found if text is not None), key=len, default=None)

    def _before(self, stops: Sequence[str], decode: Decode, special: bool) -> str | None:
        """The text before the first of these stops.

        Args:
            special: they are looked for in the text with the names of tokens that have no text.
        """
        if not stops:
            return None
        read = partial(decode, special=True) if special else decode
        # A token may be a single byte, and a character four of them.
        tail = read(self.generated[-(4 * max(map(len, stops)) + 8) :])
        if not any(stop in tail for stop in stops):
            return None
        text = read(self.generated)
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        if not found or not special:
            return text[: min(found)] if found else None
        # The tokens that end before it, and what there is of the next one.
        at, places = min(found), range(len(self.generated) + 1)
        whole = bisect_right(places, at, key=lambda count: len(read(self.generated[:count]))) - 1
        return str(decode(self.generated[:whole]) + text[len(read(self.generated[:whole])) : at])

    def _end(self, finish: Literal["stop", "length"], text: str) -> None:
        self.finish, self.text = finish, text

    def state_dict(self) -> dict[str, Any]:
        """All but keys and values, as JSON has it; half a vector is left out, since it begins anew with them."""
        notes = [[note.token, note.logarithm, [list(pair) for pair in note.best]] for note in self.notes]
        pooled = self.pooled.tolist() if self.pooled is not None and self.finish is not None else None
        ended = {"finish": self.finish, "text": self.text, "pooled": pooled}
        return {"generated": list(self.generated), "notes": notes} | ended

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.generated, self.finish, self.text = list(state["generated"]), state["finish"], state["text"]
        self.pooled = None if state["pooled"] is None else np.array(state["pooled"])
        self.notes = [
            TokenNote(token, logarithm, tuple((other, value) for other, value in best))
            for token, logarithm, best in state["notes"]
        ]
