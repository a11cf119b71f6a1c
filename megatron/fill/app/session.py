"""PipeFill's part of one rank: its gate, its listener, and its agent under a warden."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from megatron.fill import wings
from megatron.fill.agent.spec import AgentSpec
from megatron.fill.app.listening import HostListening, RelayedListening, rank_spec
from megatron.fill.app.sandboxing import RunSandbox
from megatron.fill.attached import attached
from megatron.fill.config import FillSettings
from megatron.fill.device.margin import DRIVER_BYTES
from megatron.fill.device.mps import MpsDaemon
from megatron.fill.device.port import Limits, Sharing
from megatron.fill.folders import AGENTS
from megatron.fill.hooks import bus
from megatron.fill.linux import safefile
from megatron.fill.linux.reap import end_below
from megatron.fill.pages.board import CycleBoard
from megatron.fill.pages.control import ControlPage
from megatron.fill.pages.gate import SharedGate
from megatron.fill.pages.lastword import LastWord, Left
from megatron.fill.records.account import MOST_SAMPLES, AccountWriter, Traced
from megatron.fill.records.rank import rank_file
from megatron.fill.records.unwritten import Unwritten
from megatron.fill.types import RankInfo
from megatron.fill.work import NewJob

logger = logging.getLogger("pipefill")

_WARDEN_END_S = 20.0
_KILL_S = 5.0  # time to wait for the end of what is below a warden that did not end in its own


@dataclass(eq=False)
class Session:
    """PipeFill's part of one rank of one run."""

    settings: FillSettings
    info: RankInfo
    run_dir: Path
    segment: Path  # the folder for the records
    store: str  # the URL of the job store that this run serves
    jobs: list[NewJob]  # jobs that this rank's agent submits to it
    mps: MpsDaemon | None  # None for time-slicing
    sandbox: RunSandbox
    owns_margin: bool = False  # on a GPU, this process keeps the memory margin in its own allocator

    def __post_init__(self) -> None:
        settings, info = self.settings, self.info
        margin_bytes = int(settings.memory_margin_mib * 2**20)
        # Memory that the rank reserves for itself need not also be free in the driver.
        self._owned_bytes = margin_bytes if self.owns_margin and info.device != "cpu" else 0
        self._margin_bytes = min(margin_bytes, DRIVER_BYTES) if self._owned_bytes else margin_bytes
        self.gate: SharedGate | None = None
        self.board: CycleBoard | None = None
        self.control: ControlPage | None = None
        self.warden: subprocess.Popen[bytes] | None = None
        self._announced: Path | None = None
        self._last_word = LastWord.create()  # the agent's
        traced: deque[Traced] = deque(maxlen=MOST_SAMPLES)  # of the training's own trace
        attached.figures = attached.spans = None
        for module in wings.modules("rank"):
            module.attend(settings, info, traced)
        self._account = AccountWriter(self.segment.resolve(), info, bus.account, lambda: bus.waited, traced)
        self._seen = b""  # the part of this rank's record that could not be written
        if settings.serves:
            self._serve(SharedGate(), CycleBoard(), ControlPage.create(info.rank))
        try:
            self.listening = self._listen()
        except BaseException:  # the caller gets no session, and so could not end its agent
            self.close()
            raise

    def _serve(self, gate: SharedGate, board: CycleBoard, control: ControlPage) -> None:
        """Start the agent; where that is impossible, as on a full disk, this rank only measures."""
        try:
            self.warden = self._start_warden(gate, board, control)
        except OSError as error:
            rank, run_dir = self.info.rank, self.run_dir
            logger.warning("rank %d fills nothing: its agent cannot be started in %s: %s", rank, run_dir, error)
            return
        self.gate, self.board, self.control = gate, board, control
        attached.figures = control.ask
        try:
            self._announced = control.announce(self.run_dir, board.fd)
        except OSError as error:
            logger.warning("rank %d cannot be paused from outside: %s", self.info.rank, error)

    def _listen(self) -> HostListening | RelayedListening:
        record = rank_file(self.segment.resolve(), self.info.rank)  # absolute, since the script may change its folder
        pages = self.gate, self.board, self.control
        if self.info.device == "cpu":
            return HostListening(rank_spec(self.settings, self.info, record, None), *pages)
        sharing = Sharing.TIMESLICE if self.mps is None else Sharing.MPS
        spec = rank_spec(self.settings, self.info, record, sharing)
        log = self.run_dir / AGENTS / f"relay{self.info.rank}.log"
        return RelayedListening(spec, *pages, log, _uuid(self.info.device), self._owned_bytes)

    def finish(self) -> None:
        """Write this rank's records after a complete training; ``measure_alone`` may follow, then ``close``."""
        bus.listener = None
        self._account.close()
        self._seen = self.listening.finish()

    def measure_alone(self, seconds: float) -> None:
        runs = self.control is not None and self.control.running
        if self.gate is not None and runs and not self.gate.ended:
            self.gate.open_alone(time.monotonic_ns() + int(seconds * 1e9))
        time.sleep(seconds)
        if self.gate is not None and runs:
            self.gate.close(time.monotonic_ns())

    def abort(self) -> None:
        """End all processes of PipeFill after the training has failed."""
        bus.listener = None
        self._account.close()
        self.listening.abort()
        self.close()

    def close(self) -> None:
        """Stop the jobs."""
        if self.gate is not None:
            self.gate.end()
        if self.control is not None and self._announced is not None:
            self.control.withdraw(self._announced)
        self._wait_for_warden()

    @property
    def unwritten(self) -> Unwritten:
        """Parts of this rank's records that could not be written; complete after ``finish`` and ``close``."""
        lost = self._last_word.state is Left.LOST
        return Unwritten(self._seen.decode(), self._last_word.read().decode(), lost=lost)

    def _start_warden(self, gate: SharedGate, board: CycleBoard, control: ControlPage) -> subprocess.Popen[bytes]:
        settings = self.settings
        gate_fd, board_fd, control_fd = gate.reader_fd(), board.reader_fd(), control.fd
        spec = AgentSpec(
            run_dir=str(self.run_dir.resolve()),
            records=str(self.segment.resolve()),
            rank=self.info.rank,
            ranks=self.info.world_size,
            parent=os.getpid(),
            gate_fd=gate_fd,
            board_fd=board_fd,
            control_fd=control_fd,
            left_fd=self._last_word.fd,
            device=self.info.device,
            device_uuid=_uuid(self.info.device),
            cpus=sorted(os.sched_getaffinity(0)) if self.info.device == "cpu" else [],
            store=self.store,
            submit=self.jobs,
            policy=settings.policy,
            lease_s=settings.lease_seconds,
            checkpoint_s=settings.checkpoint_seconds,
            grace_ns=int(settings.grace_ms * 1e6),
            max_overruns=settings.max_overruns,
            max_output_bytes=int(settings.max_output_mib * 2**20),
            user=self.sandbox.user,
            namespaces=self.sandbox.namespaces,
            binds=self.sandbox.binds,
            network=settings.network,
            allow=list(settings.allow),
            margin_bytes=self._margin_bytes,
            limits=Limits(None, settings.max_processes, settings.max_files, settings.sm_percentage),
            mps_pipe=None if self.mps is None else str(self.mps.pipe),
            metrics=None if settings.metrics is None else settings.metrics.model_dump(exclude_none=True),
            quota=settings.users_quota,
            dcgm_job_mapping=settings.dcgm_job_mapping,
            between_s=settings.between,
            node=self.info.node,
            place=self.info.local_rank,
        )
        agents = self.run_dir / AGENTS
        spec_path = agents / f"spec{self.info.rank}.json"
        # A file, since thousands of jobs do not fit on a command line, and the store's URL may hold a password.
        safefile.write_text(spec_path, spec.to_json(), mode=0o600)
        with (agents / f"agent{self.info.rank}.log").open("ab") as log:
            warden = subprocess.Popen(
                [sys.executable, "-m", "megatron.fill.agent.warden", str(spec_path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(gate_fd, board_fd, control_fd, self._last_word.fd),
                # Launchers end a rank by a signal to its group.  It stays in the session, that of the autogroup.
                process_group=0 if settings.between else None,
            )
        os.close(gate_fd)
        os.close(board_fd)
        return warden

    def _wait_for_warden(self) -> None:
        if self.warden is None:
            return
        self.warden.send_signal(signal.SIGCONT)  # in case it was stopped; it continues its agent
        try:
            self.warden.wait(_WARDEN_END_S)
        except subprocess.TimeoutExpired:
            logger.warning(
                "rank %d: its fill agent did not end within %g s; it is killed", self.info.rank, _WARDEN_END_S
            )
            self.warden.send_signal(signal.SIGSTOP)  # so that what it has started cannot escape to another parent
            end_below(self.warden.pid, _KILL_S)
            self.warden.kill()
            self.warden.wait()


def _uuid(device: str) -> str | None:
    """Return the GPU's UUID, which names it to workers whatever its number is there; None on the CPU."""
    if device == "cpu":
        return None
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
