"""``BatchJob``: answers a file of requests with a language model, in OpenAI's batch format."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.fill.display import mib
from megatron.fill.errors import TaskError
from megatron.fill.given.quantities import parse_bytes
from megatron.fill.profiles import Configuration
from megatron.fill.sidetask.checks import check_texts, check_whole, whole_numbers
from megatron.fill.sidetask.nodes import NodeTask
from megatron.fill.wings.llm import fitting
from megatron.fill.wings.llm.answers import AnswerFile
from megatron.fill.wings.llm.pooling import read_pooling
from megatron.fill.wings.llm.requests import Request, read_requests
from megatron.fill.wings.llm.shapes import most_nodes, read_shapes

if TYPE_CHECKING:
    from megatron.fill.wings.llm.engine import Engine

_RULES = ("matching", "multi_step", "traversal")
_BATCH_SIZES, _CHUNKS = (8, 1), (128, 32)  # the largest and the smallest: each costs seconds of measuring
_REPORT_EVERY = 16  # answers
_MEASURED_TOKENS = 64  # of a sequence that is only measured


class BatchJob(NodeTask):
    """Generates the answers to a file of requests, several at a time; with drafts, by token trees (SpecInfer).

    An iteration is a round of the engine; its nodes are passes of the models, cut by layers.  The answers are written
    to a file as they are ready.  Interrupted and resumed, every request is answered once, and one in progress goes on
    where it stood.  It reports ``answered``, ``tokens`` and ``tokens_per_step`` (of the large model).
    """

    unit: ClassVar[str] = "requests"

    def create(
        self,
        model: str,
        requests: str,
        output: str = "answers.jsonl",
        adapter: str | None = None,
        draft: list[str] | None = None,
        tree: list[int] | str = "auto",
        rule: str = "traversal",
        batch_sizes: list[int] | None = None,
        chunks: list[int] | None = None,
        dtype: str = "auto",
        seed: int = 0,
        kv_bytes: int | str | None = None,
        pieces: int | None = None,
        pooling: str = "auto",
    ) -> None:
        """Load models and requests.

        Args:
            model: a folder that ``transformers`` can load a causal language model from, or a folder of Megatron's
                checkpoints.
            requests: a file in OpenAI's batch format.
            output: the file of answers; relative to the job's folder.
            adapter: a folder with a LoRA adapter of the model, as ``peft`` saves it.
            draft: folders of small models with the same tokens.
            tree: number of tokens that each draft proposes below each node, by depth; ``auto`` chooses the fastest.
            rule: verification of sampled tokens: ``matching``, ``multi_step`` or ``traversal``.
            batch_sizes: numbers of sequences that are generated at a time; None for 8 and 1.
            chunks: numbers of prompt tokens that pass through the model at a time; None for 32 and 128.
            dtype: type of the weights: ``auto`` for that of the files, or ``float32``, ``bfloat16``, ``float16``.
            seed: seed of requests without one.
            kv_bytes: limit for keys and values, such as ``1GiB``; None for what the job's memory leaves.
            pieces: number of pieces of a pass of the large model; None for pieces of a few milliseconds.
            pooling: pooling of embeddings: the hidden state of the ``last`` token, or the ``mean``; ``auto`` for the
                one in the model's folder (``1_Pooling``, of sentence-transformers), or else ``last``.

        Raises:
            ValueError: an argument is wrong.
            ConfigError: the file of requests is none.
            TaskError: a model cannot be loaded, a draft has other tokens, or a package is missing.
        """
        from megatron.fill.wings.llm.grammar import Grammars
        from megatron.fill.wings.llm.models import load_language_model, merge_adapter

        check_texts(draft=draft or [])
        self._shapes = read_shapes(tree) if draft else [()]
        if rule not in _RULES:
            raise ValueError(f"rule is {rule!r}: expected one of {', '.join(_RULES)}")
        self._rule = rule
        self._pooling = read_pooling(pooling, Path(model))
        self._batches = whole_numbers("batch_sizes", batch_sizes, _BATCH_SIZES)
        self._chunks = whole_numbers("chunks", chunks, _CHUNKS)
        self._given = not (batch_sizes is None and chunks is None)
        check_whole(seed=(seed, 0), pieces=(1 if pieces is None else pieces, 1))
        self._seed, self._pieces = seed, pieces
        try:
            self._most_bytes = None if kv_bytes is None else parse_bytes(kv_bytes)
        except ValueError as error:
            raise ValueError(f"kv_bytes is {kv_bytes!r}: {error}") from None
        self._lines = read_requests(requests)
        self._model_name = Path(adapter or model).name
        self._model, self._tokenizer = load_language_model(Path(model), dtype)
        if adapter is not None:
            self._model = merge_adapter(self._model, Path(adapter)).eval()
        with_schema = any(isinstance(line, Request) and line.schema is not None for line in self._lines)
        self._grammars = Grammars(self._tokenizer) if with_schema else None
        self._drafts = []
        for folder in draft or []:
            small, tokenizer = load_language_model(Path(folder), dtype)
            if not tokenizer.same_tokens(self._tokenizer):
                raise TaskError(
                    f"draft {folder} has other tokens than {model}: expected a model with the same tokenizer"
                )
            self._drafts.append(small)
        name = Path(output).name if self.context.measuring else output
        self._file = AnswerFile(self.context.directory / name)
        self.context.total_work = float(len(self._lines))
        self._configuration = self.configurations()[0]
        self._engine: Engine | None = None
        self._state: dict[str, Any] = {"sequences": []}

    def configurations(self) -> list[Configuration]:
        """Every batch size with every length of a chunk; the largest and the smallest if none were given."""
        pairs = product(self._batches, self._chunks) if self._given else zip(self._batches, self._chunks, strict=True)
        return [Configuration(size, chunk=chunk) for size, chunk in pairs]

    def configure(self, configuration: Configuration) -> None:
        self._configuration = configuration
        if self._engine is not None:
            self._engine.abandon()
            self._engine.chunk = configuration.chunk
            self._engine.room.narrow(configuration.batch_size)
            self.next_node = 0

    def init(self) -> None:
        """Move the models to the device, check them, and find out how much is left for keys and values.

        Raises:
            TaskError: a model is not computed right in batches or gives no finite numbers, or nothing is left.
        """
        from megatron.fill.wings.llm import verify
        from megatron.fill.wings.llm.answering import Answering
        from megatron.fill.wings.llm.attention import context_of
        from megatron.fill.wings.llm.engine import Engine
        from megatron.fill.wings.llm.passes import ModelRunner, gives_hidden_states, token_rows
        from megatron.fill.wings.llm.selfcheck import check_finite, check_model

        models = [self._model, *self._drafts]
        for one in models:
            one.to(self.context.device).eval()
            check_model(one)
            check_finite(one)
        device, rows = self.context.device, self._most_rows()
        pieces = [fitting.pieces_of(one, rows, device) for one in models]
        if self._pieces is not None:
            pieces[0] = self._pieces
        size = token_rows(self._model)
        if self._tokenizer.closed:
            size = min(size, self._tokenizer.size)
        runners = [ModelRunner(one, context_of(one).tokens, cut, size) for one, cut in zip(models, pieces, strict=True)]
        self.split = f"layers, {runners[0].passes.pieces} pieces"
        self._engine = Engine(
            runners,
            self._tokenizer.decode,
            self._tokenizer.eos_ids,
            getattr(verify, self._rule),
            self._shapes[-1:] if self.context.measuring else self._shapes,
            self._configuration.batch_size,
            self._configuration.chunk,
            fitting.clock(self.context.device),
        )
        self._engine.taken.update(dict(self._state.get("taken", [])))
        least = self._engine.room.bytes_for_one(2 * _MEASURED_TOKENS)
        taken = fitting.claimed_bytes(device) + fitting.pass_bytes(self._model.config, rows)
        self._engine.room.limit(fitting.key_value_bytes(self._most_bytes, self.context.memory_bytes, taken, least))
        requests = [line for line in self._lines if isinstance(line, Request)]
        embeds = all(one.encoding is None for one in requests) or gives_hidden_states(self._model)
        self._answering = Answering(
            self._lines,
            self._file,
            self._tokenizer,
            context_of(self._model),
            self._model_name,
            self._seed,
            self._engine.room.fits,
            size,
            self._grammars,
            self._pooling,
            embeds,
        )
        self._answering.load_state_dict(self._state)

    def node_names(self) -> tuple[str, ...]:
        return self._running.node_names()

    def iteration_work(self) -> float:
        """A token for each sequence, which is a part of a request; with drafts it may be several."""
        most = [line.max_tokens or 256 for line in self._lines if isinstance(line, Request)]
        return self._configuration.batch_size * len(most) / sum(most) if most else 1.0

    def run_next_step(self) -> float:
        """Run one node of the engine; the work comes with the commit; StopIteration if all requests are answered."""
        engine = self._running
        if self.next_node == 0:
            if self.context.measuring:
                engine.fill_to_measure(_MEASURED_TOKENS)
            elif self._fill_up(engine):
                self._report()
                if work := self._answering.new_work():
                    return work  # answers that took no step: errors
                raise StopIteration
        self.next_node = engine.run(self.next_node)
        fitting.settle(self.context.device)
        if self.next_node or self.context.measuring:
            return 0.0
        reported = self._answering.answered // _REPORT_EVERY
        while engine.finished:
            self._answering.ended(engine.finished.pop())
        if self._answering.answered // _REPORT_EVERY > reported:
            self._report()
        return self._answering.new_work()

    def shrink(self, memory_bytes: int) -> bool:
        """Give back keys and values: the youngest sequences are computed again later."""
        engine, device = self._running, self.context.device
        engine.abandon()  # what a pass in progress holds is given back too
        self.next_node = 0
        held = sum(runner.cache.held_bytes for runner in engine.runners)
        left = memory_bytes - (fitting.held_bytes(device) - held)
        needed = engine.room.bytes_for_one(fitting.longest(self._lines, engine.runners[0].context))
        if needed > left:
            self.context.logger.info(
                "of its %s of keys and values it may keep %s, and its longest sequence needs %s",
                *map(mib, (held, max(0, left), needed)),
            )
            return False
        before = len(engine.room.active)
        engine.room.limit(left)
        fitting.release(device)
        now = sum(runner.cache.held_bytes for runner in engine.runners)
        lost = before - len(engine.room.active)
        self.context.logger.info("gave back %s of keys and values; %d sequences wait for room", mib(held - now), lost)
        return True

    def stop(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def state_dict(self) -> dict[str, Any]:
        """The tokens of the sequences that have not ended; keys and values are computed again."""
        if self._engine is None:
            return self._state
        return self._answering.state_dict() | {"taken": [*self._engine.taken.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state

    @property
    def answered(self) -> int:
        """Requests whose answers are in the file."""
        return self._answering.answered

    @property
    def generated(self) -> int:
        """Tokens that this job has generated, as far as it was saved."""
        return self._running.tokens

    @property
    def _running(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def _fill_up(self, engine: Engine) -> bool:
        """Have sequences wait, so that none is lacking; whether there is nothing left to do."""
        room = engine.room
        while len(room.active) + len(room.waiting) < 2 * room.batch:
            following = self._answering.following()
            if following is None:
                return engine.idle
            room.waiting.append(following)
        return False

    def _most_rows(self) -> int:
        """Tokens in the largest pass."""
        nodes = max(most_nodes(shape, len(self._drafts)) for shape in self._shapes)
        return max(max(self._chunks), max(self._batches) * (1 + nodes))

    def _report(self) -> None:
        tokens, steps = self._running.tokens, self._running.steps
        per_step = round(tokens / steps if steps else 0.0, 3)
        self.context.report(answered=self._answering.answered, tokens=tokens, tokens_per_step=per_step)
