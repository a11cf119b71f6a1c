"""A task of an srun step, for one rank of the training (``python -m megatron.fill.rank.srun SCRIPT ARGS...``).

It sets the variables that ``torch.distributed`` and Megatron read from SLURM's, starts the script, and forwards the
signals that SLURM sends before a time limit or at a cancellation.  After the rank's end it waits until the warden has
given the jobs back, since SLURM kills the other processes of a step as soon as its tasks have ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from megatron.fill.linux import host

INTERRUPTED = "PIPEFILL_INTERRUPTED"  # variable with the file that gets the signal's name, if the rank exits with 0
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)  # before a time limit, by --signal
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STAY_S = 25.0  # longest wait for the warden; a cancelled step is killed 30 s after its first signal (KillWait)
_LOOK_S, _NOTICE_S = 0.05, 0.5


def rank_variables(slurm: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would set, from those of srun; KeyError if srun did not start this process."""
    node = int(slurm["SLURM_NODEID"])
    here = tasks_per_node(slurm["SLURM_STEP_TASKS_PER_NODE"])[node]
    return {
        "RANK": slurm["SLURM_PROCID"],
        "WORLD_SIZE": slurm["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(here),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": slurm["SLURM_STEP_NUM_NODES"],
    }


def tasks_per_node(text: str) -> list[int]:
    """Expand SLURM's short form: ``2(x3),1`` is [2, 2, 2, 1]; ValueError if it is none."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}; expected something like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


class SrunTask:
    """The parent process of a rank.

    The rank starts with the notices (SIGUSR1, SIGUSR2) ignored, so that one that comes while it still imports does not
    end it.  The notice is sent again once the rank has a handler.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self.received: signal.Signals | None = None
        self._started = threading.Event()
        host.adopt_orphans()
        ours = os.getpid()

        def begin() -> None:
            host.ignore_notices()
            host.die_with_parent(ours, signal.SIGTERM)

        for number in _NOTICES:  # before the rank is started, so that none is lost
            signal.signal(number, self._hand_on_later)
        self._rank = subprocess.Popen(command, env=dict(environment), preexec_fn=begin)
        self._started.set()
        for number in _ENDS:
            signal.signal(number, self._hand_on)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._rank.pid, number)

    def _hand_on_later(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        threading.Thread(target=self._hand_on_when_awaited, args=(number,), daemon=True).start()

    def _hand_on_when_awaited(self, number: int) -> None:
        self._started.wait()
        with contextlib.suppress(OSError):  # the rank has ended
            while not _awaits(self._rank.pid, number):
                time.sleep(_NOTICE_S)
            os.kill(self._rank.pid, number)

    def wait(self) -> int:
        """Wait until the rank and its remaining processes have ended, and return the rank's exit code."""
        code = self._rank.wait()
        end_s = time.monotonic() + _STAY_S
        with contextlib.suppress(ChildProcessError):  # none is left
            while time.monotonic() < end_s:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(_LOOK_S)
        return code


def _awaits(pid: int, number: int) -> bool:
    """True if the process has a handler for the signal; OSError if there is no such process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (number - 1) & 1)


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: srun ... python -m megatron.fill.rank.srun SCRIPT ARGS...")
    try:
        variables = rank_variables(os.environ)
    except KeyError as missing:
        sys.exit(f"megatron.fill.rank.srun: {missing.args[0]} is not set; expected to be started by srun")
    except ValueError as error:
        sys.exit(f"megatron.fill.rank.srun: {error}")
    task = SrunTask([sys.executable, "-u", *sys.argv[1:]], os.environ | variables)
    code = task.wait()
    marker = os.environ.get(INTERRUPTED)
    if marker and code == 0 and task.received is not None:
        with contextlib.suppress(OSError):
            Path(marker).write_text(task.received.name + "\n", encoding="ascii")
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
