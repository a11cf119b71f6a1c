"""The warden: a small process between a rank and its agent (``python -m megatron.fill.agent.warden SPEC``).

An agent that dies, also by SIGTERM, is replaced, one that was stopped is continued, and processes that its workers
leave behind are ended (the warden adopts them once the agent has died).  With ``--fill-between`` it also starts a
keeper when its agent has ended, and until then has a new rank wait for the jobs of its own, dead one.  It does nothing
else, so that little in it can fail.  If it dies anyway, agent and workers die with it, and the rank continues to train
without filling.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron.fill.agent.turn import DeviceTurn, turn_file
from megatron.fill.linux import host
from megatron.fill.linux.reap import end_descendants
from megatron.fill.linux.wakeup import Wakeup, readable

logger = logging.getLogger("pipefill.warden")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0  # before an agent is started again
_HEALTHY_S = 30.0  # lifetime of an agent after which the pause is reset
END_S = 15.0  # time limit for an agent to end its jobs in order
_KEEPER_S = 20.0  # ... for a keeper to take its lock: Python starts slowly at this priority
_DYING_S = 1.0  # ... for a rank to die, of one thread of which the kernel has told
_LOOK_S = 0.02


def start_agent(spec_path: Path, dead: str, descriptors: Collection[int]) -> subprocess.Popen[bytes]:
    """Start an agent with the descriptors of its pages; it gives back the jobs of ``dead``, pids of earlier agents."""
    command = [sys.executable, "-m", "megatron.fill.agent.agent", str(spec_path), str(os.getpid()), dead]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors)


class Pauses:
    """The pauses in seconds before an agent that died is followed by another."""

    def __init__(self) -> None:
        self._next_s = _FIRST_PAUSE_S

    def after(self, lived_s: float) -> float:
        """Return the pause after an agent that lived for ``lived_s`` seconds; it doubles while agents die young."""
        pause_s = _FIRST_PAUSE_S if lived_s > _HEALTHY_S else self._next_s
        self._next_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return pause_s


class Warden:
    """Keeps one agent alive until the training is over; one that is stopped goes on after ``continue_s`` seconds."""

    def __init__(self, spec_path: Path, continue_s: float) -> None:
        spec = json.loads(spec_path.read_text(encoding="utf-8"))
        self.spec_path = spec_path
        self.rank: int = spec["rank"]
        self.parent: int = spec["parent"]
        self.descriptors = [value for name, value in spec.items() if name.endswith("_fd")]
        self.dead: list[str] = []  # pids of earlier agents, whose jobs are to be given back
        self._turn = _turn(spec) if spec.get("between_s") else None  # None: no keeper follows
        self._rank_fd = os.pidfd_open(self.parent)
        self._continue_s = continue_s
        self._holds = False
        self._ended_s: float | None = None  # ``time.monotonic()`` when the rank ended, or somebody asked for the end
        self._pauses = Pauses()
        self._woken = Wakeup()

    def run(self) -> None:
        """Serve until an agent exits with 0, which it does when the training is over."""
        while not self._ending:
            agent, began_s = start_agent(self.spec_path, ",".join(self.dead), self.descriptors), time.monotonic()
            code = self._watch(agent)
            end_descendants()
            if code:
                self.dead.append(str(agent.pid))
            if code == 0 or self._ending:
                break
            pause_s = self._pauses.after(time.monotonic() - began_s)
            logger.warning("its agent ended with %d; another follows in %g s", code, pause_s)
            resumes_s = time.monotonic() + pause_s
            while not self._ending and (left_s := resumes_s - time.monotonic()) > 0:
                self._woken.wait(left_s)  # the end of an orphan cuts it short
        if self._turn is not None:
            self._leave_to_keeper(self._turn)

    def end(self, *_: object) -> None:
        """Handle SIGTERM: the rank has ended, or asks for the end."""
        if self._ended_s is None:
            self._ended_s = time.monotonic()

    @property
    def _ending(self) -> bool:
        return self._ended_s is not None

    def _leave_to_keeper(self, turn: DeviceTurn) -> None:
        """Start a keeper, unless somebody has ended the warden of a rank that goes on, or another rank has come."""
        end_s = time.monotonic() + _DYING_S
        while self._ending and not self._rank_gone:
            if time.monotonic() > end_s:
                return
            self._woken.wait(_LOOK_S)
        self._hold()
        if self._rank_released and turn.wanted:  # before, it may be its own rank's lock
            return
        ended_s = time.monotonic() if self._ended_s is None else self._ended_s
        arguments = str(self.spec_path), str(self._rank_fd), ",".join(self.dead), str(ended_s)
        keeper = subprocess.Popen(
            [sys.executable, "-m", "megatron.fill.agent.keeper", *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=(*self.descriptors, self._rank_fd),
            start_new_session=True,  # a launcher ends what is in its rank's
        )
        # A rank that starts must find one of the two, so this one stays until the keeper has its lock.
        end_s = time.monotonic() + _KEEPER_S
        while self._holds and keeper.poll() is None and not turn.kept and time.monotonic() < end_s:
            self._woken.wait(_LOOK_S)

    @property
    def _rank_gone(self) -> bool:
        """True if the rank is dying or dead."""
        return os.getppid() != self.parent or self._rank_released

    @property
    def _rank_released(self) -> bool:
        """True if the rank is dead and its memory released."""
        return bool(readable(0, self._rank_fd))

    def _hold(self) -> None:
        """Have a rank that starts wait for the jobs of this one, if this one is dead."""
        if self._turn is not None and not self._holds and self._rank_gone:
            self._holds = True
            self._turn.end_jobs()

    def _watch(self, agent: subprocess.Popen[bytes]) -> int:
        """Wait for the agent's end; return its exit code, negative for a signal."""
        continue_at_s = kill_at_s = math.inf
        while True:
            pid, status = os.waitpid(agent.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            now_s = time.monotonic()
            if pid and os.WIFSTOPPED(status):
                continue_at_s = now_s + self._continue_s
            elif pid and os.WIFCONTINUED(status):
                continue_at_s = math.inf
            elif pid:
                agent.returncode = os.waitstatus_to_exitcode(status)
                return agent.returncode
            if self._ending and kill_at_s == math.inf:
                kill_at_s, continue_at_s = now_s + END_S, now_s
                os.kill(agent.pid, signal.SIGTERM)  # not Popen.send_signal, which would reap the agent
            if self._ending:
                self._hold()
            if now_s >= continue_at_s:
                continue_at_s = math.inf
                os.kill(agent.pid, signal.SIGCONT)
            if now_s >= kill_at_s:
                os.kill(agent.pid, signal.SIGKILL)
            if not pid:
                self._woken.wait(min(continue_at_s - now_s, kill_at_s - now_s, 3600.0))


def _turn(spec: dict[str, Any]) -> DeviceTurn | None:
    """Return the turn of the rank's device; None if no keeper may follow: it cannot be locked, or one never left."""
    try:
        turn = DeviceTurn(turn_file(Path(spec["run_dir"]), spec["place"]), create=True)
        return None if turn.kept else turn
    except OSError as error:
        logger.warning("no job goes on after this training: %s", error)
        return None


def main(continue_s: float = 1.5) -> None:
    os.nice(19)  # warden and agent, imports included, must not compete with the training
    warden = Warden(Path(sys.argv[1]), continue_s)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {warden.rank} %(message)s")
    signal.signal(signal.SIGCHLD, lambda *_: None)  # so that it reaches the wake-up descriptor
    signal.signal(signal.SIGTERM, warden.end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training; the warden ends with it
    host.ignore_notices()
    host.use_every_core()
    host.adopt_orphans()
    host.die_with_parent(warden.parent, signal.SIGTERM)
    warden.run()


if __name__ == "__main__":
    main()
