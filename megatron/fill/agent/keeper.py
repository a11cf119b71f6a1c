"""The keeper: has jobs go on between trainings (``python -m megatron.fill.agent.keeper SPEC RANK_FD DEAD ENDED_S``).

With ``--fill-between`` the warden starts it when its agent has ended.  It waits for the end of the rank, and then
stands in for it: a gate that is always open, a board with the rank's last bubble cycle, a control page, and an agent,
which it replaces if it dies.  It leaves when its time is over, when a rank of the run starts on the device, after
``pipefill kill``, and on SIGTERM.  If it dies, the kernel ends its agent, and that the workers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from megatron.fill.agent.spec import AgentSpec
from megatron.fill.agent.turn import DeviceTurn, turn_file
from megatron.fill.agent.warden import END_S, Pauses, start_agent
from megatron.fill.folders import AGENTS, BETWEEN
from megatron.fill.linux import host, safefile
from megatron.fill.linux.reap import end_descendants
from megatron.fill.linux.wakeup import Wakeup, readable
from megatron.fill.pages.board import CycleBoard, CycleBoardReader
from megatron.fill.pages.control import ControlPage, RunState
from megatron.fill.pages.gate import SharedGate
from megatron.fill.pages.lastword import LastWord
from megatron.fill.profiles import BubbleCycle

logger = logging.getLogger("pipefill.keeper")

_LOOK_S = 0.1
# Jobs are saved between bubbles; a step that does not fit before the end waits for the next bubble.
_BUBBLE_S = 60.0
_FREE = 1 << 50  # memory in bytes that no training takes; what the device has free is less, and counts


class Keeper:
    """Serves the jobs of one device after its rank's end.

    Args:
        dead: pids of the rank's agents that died.
        ended_s: ``time.monotonic()`` at the rank's end, if it has ended already.
    """

    def __init__(self, spec: AgentSpec, dead: str, ended_s: float) -> None:
        self.spec = spec
        self.dead = dead
        self._ended_s = ended_s
        self._ending = False
        self._woken = Wakeup()

    def end(self, *_: object) -> None:
        """Handle SIGTERM."""
        self._ending = True

    def run(self, rank_fd: int) -> None:
        """Wait for the rank's end, and serve its jobs if nobody else has the device."""
        spec = self.spec
        if not readable(0, rank_fd):
            while not self._ending and not self._woken.wait(3600.0, rank_fd):
                pass
            self._ended_s = time.monotonic()
        if self._ending or ControlPage(spec.control_fd).state is not RunState.RUNNING:
            return
        turn = DeviceTurn(turn_file(Path(spec.run_dir), spec.place))
        if not turn.keep():
            logger.info("no job runs between two trainings: a rank has started already")
            return
        began_s = time.monotonic()
        if began_s >= self._end_s:
            logger.info("no job runs between two trainings: the time for it was over before one could start")
            return
        why = self._serve(turn, CycleBoardReader(spec.board_fd).read())
        ended_s = time.monotonic()
        logger.info(
            "jobs had the device for %.1f s between two trainings, until %.1f s after the training's end: %s",
            ended_s - began_s,
            ended_s - self._ended_s,
            why,
        )

    @property
    def _end_s(self) -> float:
        return self._ended_s + self.spec.between_s

    def _serve(self, turn: DeviceTurn, cycle: BubbleCycle | None) -> str:
        """Run an agent until the end; return the reason for it.  No process is left, whatever is raised."""
        gate, board, last_word = SharedGate(), CycleBoard(), LastWord.create()
        control = ControlPage.create(self.spec.rank)
        if cycle is not None:
            board.show(BubbleCycle(cycle.period_ns, tuple(replace(slot, free_bytes=_FREE) for slot in cycle.slots)))
        records = Path(self.spec.records) / BETWEEN
        spec = replace(
            self.spec,
            records=str(records),
            parent=os.getpid(),
            gate_fd=gate.reader_fd(),
            board_fd=board.reader_fd(),
            control_fd=control.fd,
            left_fd=last_word.fd,
        )
        gate.seal()
        board.seal()
        path = Path(spec.run_dir) / AGENTS / f"{BETWEEN}{spec.rank}.json"
        with contextlib.ExitStack() as at_end:  # the disk may be full
            at_end.callback(path.unlink, missing_ok=True)
            records.mkdir(exist_ok=True)
            at_end.callback(control.withdraw, control.announce(Path(spec.run_dir), board.fd))
            safefile.write_text(path, spec.to_json(), mode=0o600)
            agent = _Agent(path, self.dead, (spec.gate_fd, spec.board_fd, spec.control_fd, spec.left_fd))
            at_end.callback(agent.end)
            at_end.callback(gate.end)
            return self._stay(gate, agent, control, turn)

    def _stay(self, gate: SharedGate, agent: _Agent, control: ControlPage, turn: DeviceTurn) -> str:
        """Keep the gate open; return the reason for the end."""
        bubble_end_s = 0.0
        while True:
            now_s = time.monotonic()
            if turn.wanted:
                return "a rank has started"
            if now_s >= self._end_s:
                return "their time is over"
            if self._ending:
                return "SIGTERM"
            if not agent.serves(now_s):
                return "their agent has ended"
            if control.state is RunState.KILLED and control.acknowledged:
                return "pipefill kill"
            if now_s >= bubble_end_s:
                gate.close(time.monotonic_ns())
                bubble_end_s = min(self._end_s, now_s + _BUBBLE_S)
                gate.open_alone(round(bubble_end_s * 1e9))
            self._woken.wait(min(_LOOK_S, bubble_end_s - now_s))


class _Agent:
    """The agent of a keeper, or one that follows it when it has died."""

    def __init__(self, spec_path: Path, dead: str, descriptors: Collection[int]) -> None:
        self._spec_path, self._dead, self._descriptors = spec_path, dead, descriptors
        self._pauses = Pauses()
        self._start()

    def _start(self) -> None:
        self._process = start_agent(self._spec_path, self._dead, self._descriptors)
        self._began_s, self._resumes_s = time.monotonic(), math.inf

    def serves(self, now_s: float) -> bool:
        """Have another follow if the agent has died, and one that was stopped go on; False if it has ended of itself.

        Call this again and again.
        """
        code = self._process.poll()
        self._process.send_signal(signal.SIGCONT)  # stopped in a transaction, it would lock the store for everybody
        if code and self._resumes_s == math.inf:
            end_descendants()
            self._dead = ",".join(filter(None, (self._dead, str(self._process.pid))))
            pause_s = self._pauses.after(now_s - self._began_s)
            logger.warning("its agent ended with %d; another follows in %g s", code, pause_s)
            self._resumes_s = now_s + pause_s
        elif code and now_s >= self._resumes_s:
            self._start()
        return code != 0

    def end(self) -> None:
        """Wait for the agent's end, or kill it, and end the processes that it leaves."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._process.kill()
        self._process.wait()
        end_descendants()


def main() -> None:
    spec_path, rank_fd, dead, ended_s = sys.argv[1:]
    spec = AgentSpec.from_json(Path(spec_path).read_text(encoding="utf-8"))
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {spec.rank} %(message)s")
    keeper = Keeper(spec, dead, float(ended_s))
    signal.signal(signal.SIGCHLD, lambda *_: None)  # so that it reaches the wake-up descriptor
    signal.signal(signal.SIGTERM, keeper.end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    host.ignore_notices()
    host.yield_to_other_sessions()
    host.adopt_orphans()
    try:
        keeper.run(int(rank_fd))
    except OSError as error:  # the disk is full, the run folder is gone or read-only
        logger.error("no job runs between two trainings: %s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
