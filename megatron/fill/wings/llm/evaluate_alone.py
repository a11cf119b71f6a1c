"""Checkpoints without a training: this process evaluates on this machine's device what a job has left."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.fill.errors import TaskError
from megatron.fill.sidetask.base import TaskContext
from megatron.fill.wings.llm.evaluate import EvaluateCheckpoints
from megatron.fill.wings.llm.evaluations import publish, read_evaluations, write_evaluations

_LOOK_S = 0.05  # while a checkpoint is read


def evaluate_alone(
    args: Mapping[str, Any], folder: Path, device: str, logger: logging.Logger, told: Callable[[int, int], None]
) -> None:
    """Evaluate every complete checkpoint that is not in the folder's ``evaluations.jsonl``, at full speed.

    It is the job's own code, with its samples and its results: the loss is that which the job would have found.

    Args:
        args: arguments of ``EvaluateCheckpoints``.
        folder: the job's folder, which no worker uses; each result is written there as soon as it is known.
        logger: logs each result.
        told: called after every step with the number of checkpoints evaluated here and of those to do, the one in
            progress included; an exception from it ends the work.

    Raises:
        FillError: an argument is wrong, or a checkpoint cannot be evaluated.
        OSError: a result cannot be written.
    """
    known = read_evaluations(folder)
    with tempfile.TemporaryDirectory(prefix="pipefill-evaluate-") as name:
        private = Path(name)  # the job may have left links in its own
        write_evaluations(private, known.values())
        task = EvaluateCheckpoints()
        task.context = TaskContext(folder.name, private, device, logger=logger)
        try:
            _create(task, args)
            done, left = 0, len(task.left())
            if left:
                task.init()
            while left:
                if task.run_next_step():
                    publish(private, folder)
                    done += 1
                if not task.busy:
                    left = len(task.left())
                told(done, done + left)
                if task.idle:
                    time.sleep(_LOOK_S)
        finally:
            task.stop()


def _create(task: EvaluateCheckpoints, args: Mapping[str, Any]) -> None:
    try:
        task.create(**args)
    except (TypeError, ValueError) as error:
        raise TaskError(f"the job's args are wrong: {error}") from error
