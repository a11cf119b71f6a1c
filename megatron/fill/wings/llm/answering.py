"""From requests to sequences, and from sequences to answers: each request is answered exactly once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.fill.errors import TaskError
from megatron.fill.wings.llm.answers import AnswerFile, Choice, answer, error_answer
from megatron.fill.wings.llm.attention import Context
from megatron.fill.wings.llm.grammar import Grammars
from megatron.fill.wings.llm.logprobs import logprobs_of
from megatron.fill.wings.llm.requests import Refused, Request
from megatron.fill.wings.llm.sequence import GeneratedSequence, Pooling, Wanted
from megatron.fill.wings.llm.tokenizers import Tokenizer

_UNSIGNED = (1 << 64) - 1


@dataclass(slots=True)
class _Begun:
    """A request that is not answered yet."""

    request: Request
    prompt_tokens: int
    sequences: list[GeneratedSequence]  # one for each choice
    left: int  # number of those that have not ended

    @property
    def done(self) -> float:
        """The share of it that is there, 0 to 1."""
        shares = [len(one.generated) / one.wanted.most if one.finish is None else 1.0 for one in self.sequences]
        return sum(shares) / len(shares)


class Answering:
    """The requests of a file, in order, those that are answered already left out.

    Args:
        context: limit on a sequence's tokens, and its reason.
        model: name of the model in the answers.
        seed: seed of requests without one.
        fits: returns True if a sequence can be generated at all; called before any is.
        grammars: the tokenizer's grammars; None if no request has a schema.
        embeds: True if the model returns the hidden states that embeddings are made of.
    """

    def __init__(
        self,
        lines: Iterable[Request | Refused],
        file: AnswerFile,
        tokenizer: Tokenizer,
        context: Context,
        model: str,
        seed: int,
        fits: Callable[[GeneratedSequence], bool],
        vocabulary: int,
        grammars: Grammars | None,
        pooling: Pooling,
        embeds: bool,
    ) -> None:
        self._lines, self._file, self._tokenizer = iter(lines), file, tokenizer
        self._context, self._model, self._seed, self._fits = context, model, seed, fits
        self._vocabulary, self._grammars = vocabulary, grammars
        self._pooling, self._embeds = pooling, embeds
        self._begun: dict[int, _Begun] = {}  # by line
        self._ready: deque[GeneratedSequence] = deque()
        self._kept: dict[tuple[int, int], dict[str, Any]] = {}  # states of sequences, by line and choice
        self.answered = len(file)
        self._counted = float(len(file))  # done, and counted as work, perhaps in another process

    def following(self) -> GeneratedSequence | None:
        """The next sequence; None after the last one.  Its name is its request's line and the choice."""
        while not self._ready:
            line = next(self._lines, None)
            if line is None:
                return None
            if not self._file.answered(line):
                self._begin(line)
        return self._ready.popleft()

    def ended(self, sequence: GeneratedSequence) -> None:
        """A sequence has ended; with the last one of its request, the request is answered."""
        line, _ = sequence.name
        begun = self._begun[line]
        if sequence.grammar is not None and sequence.grammar.error is not None:
            sequence.fail(f"response_format could not be followed: {sequence.grammar.error}")
        sequence.grammar = None  # it takes memory
        begun.left -= 1
        self._answer_if_ended(line)

    def new_work(self) -> float:
        """Requests done since the last call; one in progress counts as the part of its tokens that is there."""
        done = self.answered + sum(begun.done for begun in self._begun.values())
        new, self._counted = done - self._counted, done
        return max(0.0, new)  # what was done before a checkpoint was added up in another order

    def state_dict(self) -> dict[str, Any]:
        """Sequences of requests that are not answered yet."""
        self._file.sync()
        there = [one for begun in self._begun.values() for one in begun.sequences if one.generated or one.finish]
        sequences = [[*one.name, one.state_dict()] for one in there]
        sequences += [[*name, kept] for name, kept in self._kept.items()]  # of requests that were not reached again
        return {"sequences": sequences}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; before the first ``following``."""
        self._kept = {(line, number): kept for line, number, kept in state["sequences"]}

    def _begin(self, line: Request | Refused) -> None:
        if isinstance(line, Refused):
            self._write(error_answer(line))
            return
        try:
            prompts, sequences = self._sequences(line)
        except (ValueError, TaskError) as error:
            self._refuse(line, str(error), 400)
            return
        except Exception as error:  # of a tokenizer or a template, with what it does not expect
            self._refuse(line, _unexpected(error), 500)
            return
        left = [one for one in sequences if one.finish is None]
        begun = _Begun(line, sum(map(len, prompts)), sequences, len(left))
        self._begun[line.line] = begun
        self._counted += begun.done
        self._ready.extend(left)
        self._answer_if_ended(line.line)

    def _sequences(self, request: Request) -> tuple[list[list[int]], list[GeneratedSequence]]:
        """The tokens of a request's prompts, and the sequences of its choices.

        Raises:
            ValueError: it does not suit the model, or the memory.
        """
        if request.encoding is not None and not self._embeds:
            raise ValueError(f"{self._model} gives no hidden states: expected another model for /v1/embeddings")
        prompts, size = prompt_tokens(request, self._tokenizer, self._vocabulary), self._vocabulary
        if wrong := [token for token, _ in request.sampling.logit_bias if token >= size]:
            raise ValueError(f"logit_bias has token {wrong[0]}; expected 0 to {size - 1}")
        sequences = [
            self._sequence(request, tokens, place * request.n + number)
            for place, tokens in enumerate(prompts)
            for number in range(request.n)
        ]
        if too_long := [one.wanted for one in sequences if not self._fits(one)]:
            raise ValueError(
                f"{len(too_long[0].prompt)} tokens and up to {too_long[0].most} more need more memory for keys "
                "and values than there is; expected a smaller max_tokens, or a job with more memory"
            )
        return prompts, sequences

    def _answer_if_ended(self, line: int) -> None:
        begun = self._begun[line]
        if begun.left:
            return
        del self._begun[line]
        request = begun.request
        failed = next((one.text for one in begun.sequences if one.finish == "error"), None)
        if failed is not None:
            self._refuse(request, failed, 500)
        else:
            try:
                choices = [self._choice(one, request) for one in begun.sequences]
            except Exception as error:  # of a tokenizer, with tokens that it does not expect
                self._refuse(request, _unexpected(error), 500)
            else:
                self._write(answer(request, choices, begun.prompt_tokens, self._model))

    def _most(self, request: Request, prompt: int) -> int:
        """New tokens at most, by the context.

        Raises:
            ValueError: there is no room for any, or for fewer than the model itself has room for.
        """
        context, asked = self._context.tokens, request.max_tokens
        embeds = request.encoding is not None  # nothing is generated then, and the prompt may fill the context
        if context < prompt + (not embeds):
            why = "" if self._context.reason is None else f"; {self._context.reason}"
            most = "at most" if embeds else "fewer than"
            raise ValueError(f"the prompt has {prompt} tokens; expected {most} the context, {context}{why}")
        if embeds:
            return 1
        if asked is not None and self._context.reason is not None and prompt + asked > context:
            raise ValueError(
                f"{prompt} tokens and up to {asked} more; expected at most {context} in all: {self._context.reason}"
            )
        return min(asked or context, context - prompt)

    def _sequence(self, request: Request, prompt: list[int], number: int) -> GeneratedSequence:
        most = self._most(request, len(prompt))
        own = (0, self._seed & _UNSIGNED, request.line) if request.seed is None else (1, request.seed & _UNSIGNED)
        special = self._tokenizer.special
        wanted = Wanted(
            tuple(prompt),
            most,
            request.sampling,
            (*own, number),
            request.stop,
            request.logprobs,
            tuple(one for stop in request.stop if (one := special(stop)) is not None),
            tuple(stop for stop in request.stop if special(stop) is None and self._tokenizer.has_special(stop)),
        )
        if request.encoding is not None:
            wanted = Wanted((*prompt, prompt[-1]), most, pooling=self._pooling)
        sequence = GeneratedSequence(wanted, (request.line, number))
        if request.schema is not None:
            assert self._grammars is not None
            sequence.grammar = self._grammars.of(request.schema)
        kept = self._kept.pop((request.line, number), None)
        if kept is not None:
            sequence.load_state_dict(kept)
        return sequence

    def _choice(self, sequence: GeneratedSequence, request: Request) -> Choice:
        assert sequence.finish == "stop" or sequence.finish == "length"
        notes = None if request.logprobs is None else logprobs_of(sequence, self._tokenizer)
        vector = None
        if sequence.pooled is not None:
            length = np.linalg.norm(sequence.pooled) or 1.0  # zeros stay zeros
            vector = tuple(map(float, (sequence.pooled / length).astype(np.float32)))
        _, number = sequence.name
        return Choice(number, sequence.text, sequence.finish, len(sequence.generated), notes, vector)

    def _refuse(self, request: Request, why: str, status_code: int) -> None:
        self._write(error_answer(Refused(request.line, request.custom_id, why, None, status_code)))

    def _write(self, data: dict[str, Any]) -> None:
        self._file.write(data)
        self.answered += 1


def prompt_tokens(request: Request, tokenizer: Tokenizer, vocabulary: int) -> list[list[int]]:
    """The token ids of each of a request's prompts, or of its conversation.

    Args:
        vocabulary: the ids that the model knows are below it.

    Raises:
        ValueError: one has none, or one that the model does not know.
    """
    if request.chat:
        tokens = tokenizer.chat(list(request.messages), list(request.tools) or None, **request.template)
        return [_known(tokens, "the tokens of the messages have", tokenizer, vocabulary)]
    return [_tokens(prompt, tokenizer, vocabulary) for prompt in request.prompts]


def _tokens(prompt: str | tuple[int, ...], tokenizer: Tokenizer, vocabulary: int) -> list[int]:
    if isinstance(prompt, str):
        return _known(tokenizer.encode(prompt), "the tokens of the prompt have", tokenizer, vocabulary)
    return _known(list(prompt), "prompt has token", tokenizer, vocabulary)


def _known(tokens: list[int], where: str, tokenizer: Tokenizer, vocabulary: int) -> list[int]:
    if not tokens:
        if tokenizer.begins is None:
            raise ValueError("the prompt has no tokens, and the model's tokenizer none to begin with; expected some")
        tokens = [tokenizer.begins]
    wrong = [token for token in tokens if not 0 <= token < vocabulary]
    if wrong:
        raise ValueError(f"{where} {wrong[0]}, which the model does not know; expected 0 to {vocabulary - 1}")
    return tokens


def _unexpected(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
