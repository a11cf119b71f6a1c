"""The training of a chaos run: a small GPT in two stages on the CPU, the same from its seed each time."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import tty
from contextlib import ExitStack
from pathlib import Path

from megatron.fill.errors import ConfigError
from scripts.benchmarks.one_gpu import free_port
from tests.chaos.checkout import SCRIPT
from tests.e2e.launch import Cold, Warm, placed, start_rank
from tests.e2e.training import MODEL, losses
from tests.e2e.warm import REST

RANKS = 2
RESTED = REST in os.environ  # the ranks rest after each iteration, which then lasts three times as long
# Wider than in other tests, and its sequences longer: its iterations are long enough for the faults to meet them.
_LONG = ("--hidden-size", "128", "--seq-length", "64", "--max-position-embeddings", "64", "--global-batch-size", "8")
_MODEL = (*MODEL.split(), *(() if RESTED else _LONG))
_ITERATION = re.compile(rb"iteration +(\d+)/")
_TAIL_BYTES = 4096
_READ_S = 3.0
_STALLED_S = 90.0  # time without an iteration after which it counts as hanging


def find_script(given: Path) -> Path:
    """The absolute path of the training script.

    Raises:
        ConfigError: there is no such file.
    """
    if given.is_file():
        return given.resolve()
    raise ConfigError(f"no training script {given}; expected --script PATH of {SCRIPT.name}")


class ChaosTraining:
    """A training, from its start on.

    Args:
        folder: for its log and losses; created here.
        flags: flags in addition to those of the model.
        python_path: ``PYTHONPATH`` of all its processes.
    """

    def __init__(self, script: Path, folder: Path, iterations: int, flags: list[str], python_path: str) -> None:
        self.folder = folder
        self.iterations = iterations
        folder.mkdir(parents=True)
        self._log = folder / "output.log"
        self._seen, self._seen_s = 0, time.monotonic()
        self._port = ExitStack()
        port = self._port.enter_context(free_port())
        shared = {
            **{name: value for name, value in os.environ.items() if name == REST or not name.startswith("PIPEFILL_")},
            "GLOO_SOCKET_IFNAME": "lo",  # there may be no other
            "OMP_NUM_THREADS": "1",
            "PIPEFILL_CPU_BACKEND": "1",
            "PYTHONPATH": python_path,
        }
        logs = ["--train-iters", str(iterations), "--tensorboard-dir", str(folder / "tensorboard")]
        command = [str(script), *_MODEL, *logs, *flags]
        self._ranks: list[Cold | Warm] = []
        self._readers: list[subprocess.Popen[bytes]] = []
        for rank in range(RANKS):
            self._start(command, script.parent, shared | placed(rank, RANKS, port))

    def _start(self, command: list[str], directory: Path, environment: dict[str, str]) -> None:
        """Start a rank on a terminal of its own, as in a user's shell; its output is copied to the log."""
        ours, theirs = os.openpty()
        tty.setraw(theirs)
        try:
            with self._log.open("ab") as log:
                copy = ["sh", "-c", "exec cat 2> /dev/null"]  # the read at the end fails
                self._readers.append(subprocess.Popen(copy, stdin=ours, stdout=log, env=environment))
            output = theirs, theirs
            self._ranks.append(start_rank(command, environment, output=output, directory=directory, terminal=True))
        finally:
            os.close(ours)
            os.close(theirs)

    @property
    def ranks(self) -> list[int]:
        """The pids of its ranks."""
        return [rank.pid for rank in self._ranks]

    def running(self) -> bool:
        """True while it runs; a training that has lost a rank, or makes no progress for 90 s, is ended."""
        codes = [rank.poll() for rank in self._ranks]
        if None not in codes:
            self.end()
            return False
        if any(codes) or time.monotonic() - self._progress_s() > _STALLED_S:
            self.end()
            return False
        return True

    @property
    def iteration(self) -> int:
        """The last completed iteration; 0 before the first."""
        with self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            found = _ITERATION.findall(log.read())
        if found and int(found[-1]) != self._seen:
            self._seen, self._seen_s = int(found[-1]), time.monotonic()
        return self._seen

    def _progress_s(self) -> float:
        _ = self.iteration
        return self._seen_s

    def failure(self) -> str:
        """The reason why it failed, ``""`` if it did not; valid once it has ended."""
        codes = [rank.wait() for rank in self._ranks]
        if not any(codes):
            return ""
        return f"its ranks ended with {' and '.join(map(str, codes))} after iteration {self.iteration}; see {self._log}"

    def refused(self) -> bool:
        """True if a rank reported a wrong option and ended with 2; the other one may have been killed then."""
        codes = {rank.wait() for rank in self._ranks}
        return 2 in codes and codes <= {2, -signal.SIGKILL} and b"error: " in self._log.read_bytes()

    def end(self) -> None:
        """Kill the processes that are left."""
        self._port.close()
        for rank in self._ranks:
            if rank.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
        for reader in self._readers:
            try:
                reader.wait(_READ_S)  # it ends with the last process on the terminal
            except subprocess.TimeoutExpired:
                reader.kill()
                reader.wait()

    def losses(self) -> dict[int, float]:
        """The loss of every iteration: float32 from TensorBoard, to the bit."""
        return losses(self.folder)
