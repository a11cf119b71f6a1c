"""``EvaluateCheckpoints``: the held-out loss of a training's checkpoints, in the bubbles of that very training."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.fill.errors import TaskError
from megatron.fill.sidetask.base import SideTask
from megatron.fill.sidetask.checks import check_texts, check_whole
from megatron.fill.wings.llm.evaluations import as_text, read_evaluations, write_evaluations, write_to_tensorboard
from megatron.fill.wings.llm.fitting import pieces_of, settle

if TYPE_CHECKING:
    import numpy as np
    import torch

    from megatron.fill.wings.llm.engine import Engine
    from megatron.fill.wings.llm.passes import LayeredPass

_METRICS = ("loss", "samples")
_LOOK, _TAKE, _CHECK, _FORWARD, _ENGINE = 0, 1, 2, 3, 100  # kinds of steps; of passes and the engine there are several
_LOOK_S = 1.0


def _loaded(path: Path, count: int | None) -> tuple[Any, Any, np.ndarray]:
    """Return a checkpoint's model and tokenizer, and so many samples, in host memory."""
    from megatron.fill.wings.llm.heldout import validation_samples
    from megatron.fill.wings.llm.megatron import load_megatron
    from megatron.fill.wings.llm.models import tokenizer_of

    model, args = load_megatron(path)
    return model, tokenizer_of(args), validation_samples(args, count)


class EvaluateCheckpoints(SideTask):
    """Watches a training's ``--save`` folder, and evaluates every new checkpoint.

    The loss is that of Megatron's own validation on the same samples: those that a training's first evaluation takes.
    Results are in ``evaluations.jsonl`` in the job's folder, with TensorBoard's scalars beside it, and the latest ones
    in the report.  A checkpoint that is being written is not there yet; one that is deleted meanwhile is left out.
    """

    unit: ClassVar[str] = "checkpoints"

    def create(
        self,
        checkpoints: str,
        metrics: list[str] | None = None,
        samples: int | None = None,
        prompts: list[str] | None = None,
        new_tokens: int = 64,
        batch_size: int = 4,
    ) -> None:
        """Check the arguments.

        Args:
            checkpoints: the training's ``--save`` folder; it need not be there yet.
            metrics: ``loss``, ``samples``; None for the loss, and samples if there are prompts.
            samples: sequences of the validation split; None for as many as the training's own evaluation has.
            prompts: texts that the model continues, greedily; of one that is longer than its context, the last tokens.
            new_tokens: number of tokens generated after each prompt; fewer where the context ends.
            batch_size: sequences in a pass.

        Raises:
            ValueError: an argument is wrong.
            TaskError: the ``evaluations.jsonl`` that is there cannot be read.
        """
        check_texts(metrics=metrics or [], prompts=prompts or [])
        self._metrics = metrics or ["loss", *(["samples"] if prompts else [])]
        for metric in self._metrics:
            if metric not in _METRICS:
                raise ValueError(f"metrics has {metric!r}: expected some of {', '.join(_METRICS)}")
        if "samples" in self._metrics and not prompts:
            raise ValueError("metrics has samples and prompts is empty: expected texts to go on with")
        check_whole(
            new_tokens=(new_tokens, 1), batch_size=(batch_size, 1), samples=(1 if samples is None else samples, 1)
        )
        self._folder, self._count, self._prompts = Path(checkpoints), samples, prompts or []
        self._new_tokens, self._batch = new_tokens, batch_size
        # Iterations that were evaluated, here or by "pipefill evaluate", or that cannot be any more.
        self._done = list(read_evaluations(self.context.directory))
        self._tries: dict[int, int] = {}
        self._aside = ThreadPoolExecutor(1)  # a checkpoint is read beside the steps: that is long and needs no device
        self._looked_s = 0.0

    def init(self) -> None:
        """Import what a step would take long to import."""
        with contextlib.suppress(ImportError):
            import torch.utils.tensorboard  # noqa: F401
        from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401

        from megatron.fill.wings.llm import engine, heldout, megatron_weights, models, passes, selfcheck, verify  # noqa: F401

        if not self._folder.is_dir():
            self.context.logger.info("%s is not there, or this job may not see it (--fill-bind)", self._folder)
        self._loading: Future[tuple[Any, Any, np.ndarray]] | None = None
        self._work: Iterator[tuple[int, float]] | None = None
        self._iteration = 0
        self.idle, self.next_node = True, _LOOK

    def run_next_step(self) -> float:
        """Look for a checkpoint, or do the next piece of its evaluation."""
        self.idle = False
        if self._work is not None:
            try:
                self.next_node, work = next(self._work)
            except StopIteration:
                self._work, self.next_node, work = None, _LOOK, 1.0
            settle(self.context.device)
            return work
        if self._loading is None:
            self._look()
        elif self._loading.done():
            loading, self._loading = self._loading, None
            try:
                found = loading.result()
            except Exception as error:
                self._leave_out(error)
            else:
                self._work, self.next_node = self._evaluation(*found), _TAKE
                return 0.0
        self.idle = True
        return 0.0

    def state_dict(self) -> dict[str, Any]:
        """The evaluated checkpoints and the result; a checkpoint in progress is evaluated again from its beginning."""
        return {"done": self._done, "result": dict(self.context.result)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._done = list(dict.fromkeys([*state["done"], *self._done]))
        self.context.report(**state["result"])

    def stop(self) -> None:
        if hasattr(self, "_aside"):
            self._aside.shutdown()

    @property
    def busy(self) -> bool:
        """True while a checkpoint is read or evaluated."""
        return self._work is not None or self._loading is not None

    def left(self) -> dict[int, Path]:
        """The checkpoints that are complete and not evaluated, by iteration, in order."""
        from megatron.fill.wings.llm.megatron import checkpoints

        return {at: path for at, path in checkpoints(self._folder).items() if at not in self._done}

    def _look(self) -> None:
        """Begin with the oldest checkpoint that is complete and not evaluated."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        if waiting := self.left():
            self._iteration, path = next(iter(waiting.items()))
            self._behind = len(waiting) - 1
            self._loading = self._aside.submit(_loaded, path, self._count)

    def _leave_out(self, error: Exception) -> None:
        """Skip a checkpoint that was deleted in the meantime; one that is there and cannot be read is an error.

        Raises:
            TaskError: the checkpoint is there and no model can be made of it.
        """
        from megatron.fill.wings.llm.megatron import IncompleteCheckpoint, checkpoints

        if isinstance(error, IncompleteCheckpoint):
            if self._iteration not in checkpoints(self._folder):
                self._done.append(self._iteration)
                self.context.logger.info("iteration %d: deleted before it was evaluated", self._iteration)
                return
            self._tries[self._iteration] = self._tries.get(self._iteration, 0) + 1
            if self._tries[self._iteration] < 3:  # it may have been written just now
                return
        raise TaskError(f"iteration {self._iteration}: {error}") from error

    def _evaluation(self, model: Any, tokenizer: Any, samples: np.ndarray) -> Iterator[tuple[int, float]]:
        """The steps of one evaluation, each with the kind of the next one; the last step ends it.

        Raises:
            TaskError: the model is not computed right.
        """
        import torch

        from megatron.fill.wings.llm.passes import LayeredPass, decoder_layers, layer_by_layer
        from megatron.fill.wings.llm.selfcheck import check_model

        device, found = self.context.device, {}
        for module in model.modules():  # a few weights at a time
            for name, parameter in module.named_parameters(recurse=False):
                if str(parameter.device) != device:
                    setattr(module, name, torch.nn.Parameter(parameter.to(device), requires_grad=False))
                    yield _TAKE, 0.0
        model.to(device).eval()
        yield _CHECK, 0.0
        try:
            for _ in layer_by_layer(decoder_layers(model), lambda: check_model(model, "samples" in self._metrics)):
                yield _CHECK, 0.0
        except TaskError as error:
            raise TaskError(f"iteration {self._iteration}: {error}") from error
        yield (_FORWARD if "loss" in self._metrics else _ENGINE), 0.0
        if "loss" in self._metrics:
            length = samples.shape[1] - 1
            passes = LayeredPass(decoder_layers(model), pieces_of(model, self._batch * length, device))
            total = 0.0
            for first in range(0, len(samples), self._batch):
                batch = torch.from_numpy(samples[first : first + self._batch]).to(device)
                for piece, loss in _losses(model, passes, batch):
                    total += loss
                    yield _FORWARD + piece, 0.0
            found["loss"] = total / (len(samples) * length)
        texts: list[str] = []
        if "samples" in self._metrics:
            engine = self._engine(model, tokenizer)
            node = 0
            while not engine.idle:
                node = engine.run(node)
                yield _ENGINE + node, 0.0
            texts = [one.text for one in sorted(engine.finished, key=lambda one: one.name)]
        self._note(found, texts)

    def _engine(self, model: Any, tokenizer: Any) -> Engine:
        from megatron.fill.wings.llm.attention import context_of
        from megatron.fill.wings.llm.engine import Engine
        from megatron.fill.wings.llm.fitting import clock
        from megatron.fill.wings.llm.passes import ModelRunner
        from megatron.fill.wings.llm.sequence import GeneratedSequence, Wanted
        from megatron.fill.wings.llm.verify import matching

        device, context = self.context.device, context_of(model).tokens
        runner = ModelRunner(model, context, pieces_of(model, 64, device), tokenizer.size)
        engine = Engine([runner], tokenizer.decode, tokenizer.eos_ids, matching, [()], self._batch, 64, clock(device))
        for number, prompt in enumerate(self._prompts):
            tokens = tokenizer.encode(prompt)[1 - context :] or sorted(tokenizer.eos_ids)[:1]
            most = min(self._new_tokens, context - len(tokens))
            engine.room.waiting.append(GeneratedSequence(Wanted(tuple(tokens), most), number))
        return engine

    def _note(self, found: dict[str, float], texts: list[str]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in found.items()}  # as JSON has them
        line: dict[str, Any] = {"iteration": self._iteration, **finite}
        if texts:
            line["samples"] = [{"prompt": p, "text": text} for p, text in zip(self._prompts, texts, strict=True)]
        folder = self.context.directory
        known = {at: one for at, one in read_evaluations(folder).items() if at != self._iteration}
        write_evaluations(folder, [*known.values(), line])
        self.context.logger.info("%s; %d checkpoints behind", as_text(line), self._behind)
        for one in texts:
            self.context.logger.info("  %s", one)
        write_to_tensorboard(folder, self._iteration, found, line.get("samples", []))
        self._done.append(self._iteration)
        self.context.report(iteration=self._iteration, evaluated=len(known) + 1, behind=self._behind, **found)


def _losses(model: Any, passes: LayeredPass, batch: torch.Tensor) -> Iterator[tuple[int, float]]:
    """The pieces of a pass over samples, ``[samples, length + 1]``: the next piece, and at the end the summed loss."""
    import torch

    def function() -> float:
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return float(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum")
        )

    passes.begin([function])
    piece = 0
    while not passes.run():
        piece += 1
        yield piece, 0.0
    yield 0, passes.result[0]
