"""One rank's agent: takes jobs from the store, runs each in a worker, and sees to its end.

The rank's warden starts it, and its workers are thereby in the rank's session: only there does Linux honour their
idle priority against the rank (autogroups).  It is the workers' parent: nothing they start outlives it, and the kernel
ends it when the warden dies.  It never talks to the rank; both look at the gate.

It has two *seats*: the resident job gets every bubble first, the tail job what the resident one cannot use.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from megatron.fill.agent.claims import Claims
from megatron.fill.agent.crew import Crew
from megatron.fill.agent.ledger import AttemptLedger
from megatron.fill.agent.memory import DeviceMemory
from megatron.fill.agent.mover import Mover
from megatron.fill.agent.ranking import Ranking
from megatron.fill.agent.seat import Seat
from megatron.fill.agent.settling import Settling
from megatron.fill.agent.spec import AgentSpec
from megatron.fill.agent.station import Station
from megatron.fill.agent.submitted import not_yet_submitted, note_submitted
from megatron.fill.agent.verdict import Judge
from megatron.fill.device import MpsDaemon, open_device
from megatron.fill.device.meter import fingerprint
from megatron.fill.linux import host
from megatron.fill.pages.baton import Baton
from megatron.fill.pages.board import CycleBoardReader
from megatron.fill.pages.control import ControlPage, RunState
from megatron.fill.pages.gate import SharedGateReader
from megatron.fill.pages.lastword import LastWord
from megatron.fill.pages.watcher import ControlWatcher
from megatron.fill.profiles import cycle_to_dict
from megatron.fill.records import AgentFile
from megatron.fill.store.port import DeviceEntry

logger = logging.getLogger("pipefill.agent")

_KILL_S = 1.5  # how long a kill may take
_SHRINK_S = 1.0  # how long a worker may take to give memory back, once its step has ended
_RESIDENT_LOOKS_S, _TAIL_LOOKS_S = 1.0, 5.0  # how often an empty seat looks for a job
_SETTLE_S = 0.5  # how often is looked whether jobs have settled
_SHOW_S = 10.0  # how often what runs is written down, and what waits is told why


class Agent:
    """Runs jobs in the bubbles of one rank until the main job is over.

    Six threads: the main one, one for each seat, and those of the claims, the control page and the records; and one
    more until jobs have settled.

    Args:
        dead: the pids of the agents that served this rank before and died: what they held is given back.
    """

    def __init__(self, spec: AgentSpec, dead: list[int]) -> None:
        name = f"rank {spec.rank} of {spec.run_dir} on {os.uname().nodename}"
        self.station = station = self._station(spec, name, dead)
        self.crew = Crew(station)
        last_word = LastWord(spec.left_fd)
        if dead:
            last_word.succeed()
        self.ledger = AttemptLedger(AgentFile(Path(spec.records), spec.rank, len(dead)), last_word)
        judge = Judge()
        self.resident = Seat(station, self.crew, self.ledger, judge, idle=self._look_elsewhere)
        self.tail = Seat(station, self.crew, self.ledger, judge, beside=lambda: self.resident.resident)
        self.mover = Mover(name, spec.run_dir, station.ranking, self.resident.may_run)

    def _station(self, spec: AgentSpec, name: str, dead: list[int]) -> Station:
        mps = MpsDaemon.existing(Path(spec.mps_pipe)) if spec.mps_pipe is not None else None
        device = open_device(spec.device, spec.sharing, mps, spec.device_uuid, spec.parent)
        # It gives memory back between two steps, and a step may run on for its grace.
        memory = DeviceMemory(device, spec.margin_bytes, _SHRINK_S + spec.grace_ns / 1e9)
        board, control, baton_fd = CycleBoardReader(spec.board_fd), ControlPage(spec.control_fd), Baton.create()
        margin_bytes = spec.margin_bytes + device.overhead_bytes
        ranking = Ranking(spec.policy, name, fingerprint(spec.device), board, margin_bytes, memory.room_bytes)
        return Station(
            spec=spec,
            name=name,
            gate=SharedGateReader(spec.gate_fd),
            board=board,
            control=control,
            control_fd=control.reader_fd(),
            baton=Baton(baton_fd),
            baton_fd=baton_fd,
            device=device,
            memory=memory,
            claims=self._claims(spec, name, dead),
            ranking=ranking,
        )

    def _claims(self, spec: AgentSpec, name: str, dead: list[int]) -> Claims:
        run_dir = Path(spec.run_dir)
        owners = [f"{name}, pid {pid}" for pid in (os.getpid(), *dead)]
        # An agent that follows a dead one must not submit again what has finished meanwhile.
        submit = not_yet_submitted(run_dir, spec.store, spec.submit)
        return Claims(
            spec.store,
            owners[0],
            submit or (None if dead else []),
            self.describe,
            spec.lease_s,
            owners[1:],
            submitted=lambda: note_submitted(run_dir, spec.store, spec.submit),
        )

    def describe(self) -> DeviceEntry:
        """This device as the store should know it."""
        station = self.station
        cycle = station.board.read()
        paused = station.control.state is not RunState.RUNNING  # it takes no job, and nobody knows until when
        return DeviceEntry(
            name=station.name,
            run=station.spec.run_dir,
            busy_until_s=math.inf if paused else self.resident.busy_until_s,
            job=self.resident.job_name,
            cycle=None if cycle is None else cycle_to_dict(cycle),
            refuses=station.ranking.misfits.refused,
        )

    def run(self) -> None:
        """Serve until the main job is over."""
        station = self.station
        station.claims.start()
        ControlWatcher(station.control, self._control_changed).start()
        threading.Thread(target=self._show, name="records", daemon=True).start()
        threading.Thread(target=self._settle, name="settling", daemon=True).start()
        threads = [
            threading.Thread(target=self._serve, args=(seat, looks_s), name=str(seat))
            for seat, looks_s in ((self.resident, _RESIDENT_LOOKS_S), (self.tail, _TAIL_LOOKS_S))
        ]
        for thread in threads:
            thread.start()
        self.crew.stand_by()
        for thread in threads:
            thread.join()
        self.crew.stand_down()
        # First: the rank does not wait for the store for long.
        try:
            self.ledger.write()
        except OSError as error:
            logger.warning("what its jobs did cannot be written, and is left to the rank: %s", error)
        station.claims.stop()

    def _control_changed(self, state: RunState) -> None:
        """Say so, and of a kill not before it is done: the seats end their workers at their next look."""
        logger.info("%s", state.name)
        if state is RunState.KILLED:
            self.crew.stand_down()
        end_s = time.monotonic() + _KILL_S
        while state is RunState.KILLED and self.crew.working:
            if time.monotonic() > end_s:
                raise TimeoutError(f"workers {self.crew.working} have not ended")
            time.sleep(0.02)

    def _look_elsewhere(self) -> None:
        """There is no job at all: what is another rank's tail job worth here?"""
        if not self.tail.job_name:
            self.station.claims.ask(self.mover.look)

    def _serve(self, seat: Seat, looks_s: float) -> None:
        while not self.station.over:
            try:
                served = seat.serve()
                if served:
                    self.ledger.write()
            except Exception:  # one seat's trouble is not the other's
                logger.exception("%s failed", seat)
                served = False
            if not served:
                seat.rest(looks_s)

    def _settle(self) -> None:
        """Tell the rank when jobs have settled: paired blocks may begin, and the harvest counts."""
        station = self.station
        spec = station.spec
        settling = Settling(Path(spec.records), spec.rank, spec.ranks, self._stepped, station.control)
        failed = False
        while not station.over:
            try:
                if settling.look():
                    return
            except OSError as error:
                if not failed:
                    logger.warning("whether the jobs of all ranks have settled cannot be told now: %s", error)
                failed = True
            time.sleep(_SETTLE_S)

    def _stepped(self) -> bool | None:
        if self.station.board.read() is None:  # in the warm-up
            return False
        return self.resident.stepped

    def _show(self) -> None:
        """Write down what runs, and tell why the others wait, again and again.

        Of an agent that is killed, what is written down is the last word.
        """
        while not self.station.over:
            self.resident.rest(_SHOW_S)
            for show in (self.ledger.write, lambda: self.station.claims.ask(self.station.ranking.explain)):
                try:
                    show()
                except Exception:
                    logger.exception("what its jobs did, or why others wait, cannot be shown now")


def main() -> None:
    spec_path, warden, dead = sys.argv[1:]
    spec = AgentSpec.from_json(Path(spec_path).read_text(encoding="utf-8"))
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {spec.rank} %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    agent = Agent(spec, [int(pid) for pid in dead.split(",") if pid])

    def on_term(number: int, frame: Any) -> None:
        agent.station.orphaned.set()

    signal.signal(signal.SIGTERM, on_term)
    host.ignore_notices()  # workers inherit this: until they listen to USR1, it is not to end them
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main job; its end ends us
    host.use_every_core()  # only the workers belong on the rank's own
    host.adopt_orphans()
    host.die_with_parent(int(warden), signal.SIGTERM)
    agent.run()


if __name__ == "__main__":
    main()
