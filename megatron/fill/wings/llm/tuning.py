"""``DraftTuning``: drafts for a large model, each trained where those before it fail (SpecInfer, section 3)."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from megatron.fill.errors import TaskError
from megatron.fill.sidetask.checks import check_whole
from megatron.fill.sidetask.data import Samples
from megatron.fill.sidetask.iteration import Course
from megatron.fill.sidetask.state import on_cpu
from megatron.fill.sidetask.training import TrainingJob
from megatron.fill.wings.llm.drafts import INNER, checked_shape, new_draft
from megatron.fill.wings.llm.examples import NOT_LEARNT, Left, Windows, answered

if TYPE_CHECKING:
    from megatron.fill.wings.llm.tokenizers import Tokenizer


class DraftTuning(TrainingJob):
    """Trains drafts on the answers of a large model, one after the other: collective boost-tuning.

    The first draft learns from all answers.  Then the spans are marked in which it expects the large model's own
    tokens, all of them, and the next draft learns from the rest.  An iteration is a step of the optimizer, as for any
    ``TrainingJob``, or a batch whose spans are marked; that one has no backward nodes.  The drafts are written to
    ``drafts/0``, ``drafts/1``, ... in the job's folder.  It reports ``loss``, ``draft`` and ``left``: the share of the
    spans that no draft has got right.
    """

    unit: ClassVar[str] = "iterations"
    _handover: Future[dict[str, Any] | None] | None

    def create(  # type: ignore[override]  # what a draft is trained on, and how it is built, is this class's own
        self,
        model: str,
        requests: str,
        answers: str,
        drafts: int = 1,
        draft: str | None = None,
        shape: dict[str, int] | None = None,
        steps: int = 1000,
        span: int = 4,
        length: int = 128,
        output: str = "drafts",
        batch_size: int = 8,
        micro_batch_sizes: list[int] | None = None,
        optimizer: str = "torch.optim:AdamW",
        optimizer_args: dict[str, Any] | None = None,
        seed: int = 0,
        pieces: int = 24,
        split: str = "auto",
    ) -> None:
        """Read requests and answers, and build the first draft.

        Args:
            model: the large model's folder, for its tokenizer.
            requests: a file in OpenAI's batch format.
            answers: the large model's answers to it, best greedy ones: the output of a ``BatchJob``.
            drafts: number of drafts to train.
            draft: a folder with a small model to begin with; None for a new one.
            shape: shape of a new one: ``layers``, ``hidden`` and ``heads`` of a Llama.
            steps: number of the optimizer's steps, for each draft.
            span: number of tokens in a row that a draft must expect for the next draft not to learn them.
            length: number of tokens that pass through the draft at a time.
            output: the folder of drafts; relative to the job's folder.

        The rest is as for ``TrainingJob``.

        Raises:
            ValueError: an argument is wrong.
            ConfigError: a file does not belong to a batch.
            TaskError: a model cannot be loaded, or the draft has other tokens.
        """
        from megatron.fill.wings.llm.models import load_tokenizer

        check_whole(drafts=(drafts, 1), span=(span, 1), length=(length, 2), steps=(steps, 1), seed=(seed, 0))
        self._shape = checked_shape(draft, shape)
        self._folder = None if draft is None else Path(draft)
        self._tokenizer: Tokenizer = load_tokenizer(Path(model))
        self._length, self._seed = length, seed
        self._windows = Windows(answered(requests, answers, self._tokenizer), length, span)
        if not len(self._windows):
            raise ValueError(f"answers is {answers}: it has no answer to a request of {requests}")
        self._drafts, self._steps = drafts, steps
        self._draft, self._marked = 0, 0
        self._done = ~self._windows.is_span()  # spans that a draft before this one got right, or that are none
        self._right = self._done.copy()  # these, and those of this one
        self._noted: list[tuple[int, np.ndarray]] | None = None  # of a batch that is marked: which labels were right
        self._aside, self._handover = ThreadPoolExecutor(1), None
        self._output = self.context.directory / (Path(output).name if self.context.measuring else output)
        super().create(
            optimizer=optimizer,
            optimizer_args={"lr": 1e-3} | (optimizer_args or {}),
            batch_size=batch_size,
            micro_batch_sizes=micro_batch_sizes,
            steps=steps,
            seed=seed,
            pieces=pieces,
            split=split,
        )
        self.model.eval()  # without dropout: a draft is too small for it
        self.context.total_work = float(drafts * steps)

    def build_model(self) -> Any:
        """The present draft, before it is trained."""
        return self._make(self._draft)

    def build_data(self) -> Any:
        """The spans that no draft so far got right."""
        return Left(self._windows, self._done)

    def loss(self, output: Any, target: Any) -> Any:
        """Cross entropy: the mean over a sample's labels, and over samples; while spans are marked, notes them."""
        import torch

        labels = target["labels"]
        if self._noted is not None:
            right = (output.argmax(-1) == labels).cpu().numpy()
            self._noted += list(zip(target["window"].tolist(), right, strict=True))
        losses = torch.nn.functional.cross_entropy(
            output.float().flatten(0, 1), labels.flatten(), ignore_index=NOT_LEARNT, reduction="none"
        )
        return (losses.view_as(labels).sum(1) / (labels != NOT_LEARNT).sum(1)).mean()

    def iteration_work(self) -> float:
        return 1.0

    def run_next_step(self) -> float:
        """Run one node of a training step, or of a batch that is marked.

        Raises:
            StopIteration: all drafts are trained, or nothing is left to learn.
        """
        if self.next_node == 0 and self._course.finished and self._marked == len(self._samples.source):
            self._hand_over()
            return 0.0
        if not self._marking:
            return super().run_next_step()
        if self.next_node == 0:
            first = self._marked
            batch = range(first, min(first + self._batch_size, len(self._samples.source)))
            self._noted, self._buffers = [], {}
            self._iteration.begin([self._samples.get(index) for index in batch], learning=False)
        self._iteration.run(self.next_node)
        self._synchronize()
        self.next_node = self._iteration.after(self.next_node)
        if self.next_node == 0:
            self._iteration.clear()
            noted, self._noted = self._noted or [], None
            self._marked += len(noted)
            for window, right in noted:
                self._right[window] |= self._windows.matched(window, right)
        return 0.0

    def state_dict(self) -> dict[str, Any]:
        import torch

        masks = {"done": torch.from_numpy(self._done), "right": torch.from_numpy(self._right)}
        return super().state_dict() | masks | {"draft": self._draft, "marked": self._marked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._draft, self._marked = state["draft"], state["marked"]
        self._done, self._right = state["done"].numpy(), state["right"].numpy()
        self._begin_course()
        super().load_state_dict(state)

    def stop(self) -> None:
        if hasattr(self, "_aside"):
            self._aside.shutdown()

    @property
    def _marking(self) -> bool:
        """All steps of the present draft are done; a step counts as done before its optimizer nodes are."""
        return self._course.finished and not self._committed

    def _commit(self) -> float:
        super()._commit()
        return 1.0

    def _begin_course(self) -> None:
        self._samples = Samples(self.build_data())
        self._course = Course(self._samples, self._seed, self._batch_size, None, self._steps, self._report)

    def _hand_over(self) -> None:
        """Write this draft and make the next one, beside the steps, since both take long."""
        self.idle = True
        if self._handover is None:
            spans = int(self._windows.count.sum())
            left = spans - int((self._right & self._windows.is_span()).sum())
            last = self._draft + 1 == self._drafts or left == 0
            self.context.logger.info("draft %d: %d of %d spans are left", self._draft, left, spans)
            self.context.report(draft=self._draft, left=round(left / spans, 4))
            self._handover = self._aside.submit(self._written, on_cpu(self.model.state_dict()), last)
        elif self._handover.done():
            ended, self._handover = self._handover, None
            self.idle = False
            try:
                following = ended.result()
            except Exception as error:
                raise TaskError(f"{self._output}: {error}") from error
            if following is None:
                raise StopIteration
            self.model.load_state_dict(following)  # in place: the pieces go on with it
            self.optimizer.state.clear()
            self._draft, self._marked, self._done = self._draft + 1, 0, self._right.copy()
            self._begin_course()

    def _written(self, weights: dict[str, Any], last: bool) -> dict[str, Any] | None:
        """Write the present draft with these weights, as ``transformers`` does; the next one's, None after the last."""
        folder = self._output / str(self._draft)
        inner = {name.removeprefix(INNER): value for name, value in weights.items()}
        self.model.model.save_pretrained(folder, state_dict=inner)
        self._tokenizer.save(folder)
        return None if last else self._make(self._draft + 1).state_dict()

    def _make(self, number: int) -> Any:
        """A draft that is not trained yet."""
        return new_draft(self._folder, self._shape, self._tokenizer, self._length, self._seed + number)
