"""``BatchInferenceJob``: inference over a data set with any ``torch.nn.Module``, in pieces (PipeFill, section 4.2)."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

from megatron.fill.errors import TaskError
from megatron.fill.profiles import Configuration, Offload
from megatron.fill.sidetask.checks import check_whole, whole_numbers
from megatron.fill.sidetask.modeljob import ModelJob
from megatron.fill.sidetask.parquet import ParquetFile

_BATCH_SIZES = (32, 16, 8, 4, 2, 1)


class BatchInferenceJob(ModelJob):
    """Inference over a data set, with the outputs in a Parquet file: columns ``index`` and ``output``.

    An iteration is one batch: the pieces, then ``write``.  The last batch is filled up with copies of its last sample,
    whose outputs are dropped, so that every batch has the same shape.  The file appears when the job is done; until
    then its parts are in ``<output>.parts``.  When the job is interrupted and resumed, no row is lost or duplicated.
    """

    def create(
        self,
        model: str | None = None,
        model_args: dict[str, Any] | None = None,
        data: str | None = None,
        data_args: dict[str, Any] | None = None,
        output: str = "output.parquet",
        batch_sizes: list[int] | None = None,
        part_rows: int = 1024,
        seed: int = 0,
        pieces: int = 24,
        split: str = "auto",
        offload: list[str] | None = None,
    ) -> None:
        """Build model and data.

        Args:
            model: as for ``TrainingJob``.
            model_args: as for ``TrainingJob``.
            data: as for ``TrainingJob``; targets are ignored.
            data_args: as for ``TrainingJob``.
            output: path of the Parquet file, relative to the job's folder.
            batch_sizes: allowed batch sizes; None for 1 to 32.
            part_rows: rows written at a time.
            seed: seed of the model's weights, if they are random.
            pieces: as for ``split_model``.
            split: as for ``split_model``.
            offload: allowed places of the weights: ``none`` for the device, ``weights`` for host memory, from which
                they are copied piece by piece.  None allows both on a GPU, and only ``none`` on the CPU.

        Raises:
            ValueError: an argument is wrong.
            TaskError: something cannot be built, or a package is missing.
        """
        check_whole(part_rows=(part_rows, 1))
        self._sizes = whole_numbers("batch_sizes", batch_sizes, _BATCH_SIZES)
        self._offloads = self._ways_to_offload(offload)
        args = {"model": model, "model_args": model_args, "data": data, "data_args": data_args}
        self._prepare(args, seed, pieces, split)
        self.model.eval()
        path = self.context.directory / output
        if self.context.measuring:
            path = self.context.directory / path.name
        self._file = ParquetFile(path, part_rows)
        self._done = 0  # number of samples written
        self._ended = False  # True if no samples are left, only the file has to be assembled
        self._streamed: Any = None
        self._configuration = self.configurations()[0]
        if self._samples.length is not None:
            self.context.total_work = float(self._samples.length)

    def configurations(self) -> list[Configuration]:
        """The allowed batch sizes, each with the allowed places of the weights."""
        return [Configuration(size, False, offload) for size in self._sizes for offload in self._offloads]

    def init(self) -> None:
        """Move the model to the device and split it.

        The whole model must fit there, even if its weights are streamed later.
        """
        self.model.to(self.context.device)
        self._stream = self._samples.epoch(None, 0, self._done)
        self._arrange()

    def node_names(self) -> tuple[str, ...]:
        return (*(f"forward {index}" for index in range(self._pieces_made)), "write")

    def iteration_work(self) -> float:
        return float(self._configuration.batch_size)

    def run_next_step(self) -> float:
        """Run a node; the work of a batch is returned by its node ``write``."""
        write = self._pieces_made
        if self.next_node == 0 and not self._ended:
            self._begin()
        if self._ended:
            if self._file.assemble():
                raise StopIteration
            return 0.0
        if self.next_node < write:
            self._runner.forward(self.next_node)
            self._synchronize()
            last = self.next_node + 1 == len(self._runner.split.segments)
            self.next_node = write if last else self.next_node + 1
            return 0.0
        rows, count, full = self.rows(self._runner.output()), len(self._batch), self._full_batch()
        if rows.shape[:1] != (full,):
            raise TaskError(
                f"the model's output is of shape {tuple(rows.shape)}: expected a row for each of {full} samples"
            )
        self.write(rows[:count], list(range(self._done, self._done + count)))
        self._runner.clear()
        self._done += count
        self.next_node = 0
        return float(count)

    def rows(self, output: Any) -> Any:
        """The part of a model's output to write, a tensor with a row per sample.  By default its first tensor."""
        import torch
        from torch.utils import _pytree as pytree

        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                return leaf
        raise TaskError(
            f"the model's output is a {type(output).__name__} without a tensor: expected one, or own rows()"
        )

    def write(self, outputs: Any, indices: list[int]) -> None:
        """Write the outputs of the samples ``indices``.  By default, flattened, as rows of the Parquet file."""
        self._file.add({"index": indices, "output": outputs.float().reshape(len(outputs), -1).cpu().tolist()})

    def stop(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def state_dict(self) -> dict[str, Any]:
        """The state to resume from; a batch that is not written yet is started again."""
        return {"done": self._done, "file": self._file.state_dict(), "result": dict(self.context.result)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._done = state["done"]
        self._file.load_state_dict(state["file"])
        self._ended = self._file.complete
        self.context.report(**state["result"])

    def _arrange(self) -> None:
        """Split the model for the current batch size."""
        from megatron.fill.sidetask.split.streaming import Streamed

        if self._streamed is not None:
            self._streamed.end()
            self._streamed = None
        inputs, _ = self._example(self._configuration.batch_size)
        split = self._split_for(inputs)
        self.split, self._pieces_made = split.how, len(split.segments)
        if self._configuration.offload is Offload.WEIGHTS:
            self._streamed = Streamed(self.model, split, self.context.device)
        self.next_node = 0

    def _resident(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._streamed is None else self._streamed.all_there()

    def _ways_to_offload(self, wanted: list[str] | None) -> list[Offload]:
        known = [Offload.NONE, Offload.WEIGHTS]
        if wanted is None:
            return known[:1] if self.context.device == "cpu" else known
        if not wanted or any(way not in known for way in wanted):
            raise ValueError(f"offload is {wanted}: expected a list of none, weights, or both")
        return [way for way in known if way in wanted]

    def _begin(self) -> None:
        from megatron.fill.sidetask.split.runner import PieceRunner, Randomness
        from megatron.fill.sidetask.split.segments import Call

        self._batch = self._next_batch()
        if not self._batch:
            self._ended = True
            return
        missing = self._full_batch() - len(self._batch)
        inputs, _ = self._collate(self._batch + [self._batch[-1]] * missing)
        split = self._split_for(inputs, prepared=False)
        randomness = Randomness(self.context.device, self._seed, self._done)
        self._runner = PieceRunner(split, randomness, resident=self._streamed)
        self._runner.begin(Call(inputs).leaves)

    def _next_batch(self) -> list[Any]:
        """The next samples; a subclass may have batches of its own (``examples/tasks/embed.py``)."""
        return list(itertools.islice(self._stream, self._full_batch()))

    def _full_batch(self) -> int:
        return self._configuration.batch_size
