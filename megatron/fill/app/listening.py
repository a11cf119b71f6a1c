"""What listens to a rank's bubbles: in the rank itself on the CPU, in a relay beside it on CUDA."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Protocol

from megatron.fill.board import CycleBoard
from megatron.fill.config import FillSettings
from megatron.fill.control import ControlPage
from megatron.fill.device.cuda import FreeDeviceMemory
from megatron.fill.device.host import FreeHostMemory
from megatron.fill.gate import SharedGate
from megatron.fill.hooks import Listener
from megatron.fill.predictor import BubblePredictor
from megatron.fill.rule import FillRule
from megatron.fill.runtime.brake import Brake
from megatron.fill.runtime.rank import RankListener
from megatron.fill.runtime.recorder import Recorder
from megatron.fill.runtime.relay import RelayProcess, RelaySpec
from megatron.fill.stream.listener import StreamListener
from megatron.fill.stream.ring import Ring
from megatron.fill.stream.signals import CudaSignals
from megatron.fill.types import RankInfo

logger = logging.getLogger("pipefill")


class Listening(Protocol):
    """One rank's listener, and who writes its record."""

    @property
    def listener(self) -> Listener:
        """For the bus."""

    def free_bytes(self) -> int:
        """The device memory that is free now."""

    def finish(self) -> None:
        """The training is over: the record is written, and the gate is the rank's."""

    def abort(self) -> None:
        """The training failed."""


def fill_rule(settings: FillSettings, stages: int) -> FillRule:
    """When a rank of a training with so many stages fills."""
    return FillRule(
        warmup=settings.warmup_iterations,
        overrun=settings.overrun / 100,
        stages=stages,
        min_bubble_ns=int(settings.min_bubble_us * 1000),
        guard_ns=int(settings.guard_us * 1000),
    )


class HostListening:
    """On the CPU, where the host waits when the device does.

    Args:
        record: the file for the rank's record.
        gate, board, control: None to measure only.
    """

    def __init__(
        self,
        settings: FillSettings,
        info: RankInfo,
        record: Path,
        gate: SharedGate | None,
        board: CycleBoard | None,
        control: ControlPage | None,
    ) -> None:
        for page in (gate, board):
            if page is not None:
                page.seal()
        self._record = record
        self._recorder = Recorder(info, settings.trace_iterations, record)
        self.free_bytes = FreeHostMemory()
        rule, limit = fill_rule(settings, info.stages), settings.max_slowdown / 100
        self.listener = RankListener(
            gate,
            self._recorder,
            BubblePredictor(rule),
            self.free_bytes,
            settings.paired_blocks,
            board,
            Brake(limit, info.rank, rule.guard_ns, settings.paired_blocks) if gate is not None and limit else None,
            control,
        )

    def finish(self) -> None:
        if not self._recorder.close():
            logger.warning("%s could not be written in full", self._record)

    def abort(self) -> None:
        self.finish()


class RelayedListening:
    """On CUDA, where the host runs ahead of the device.

    Args:
        log: for what the relay has to say.
    """

    def __init__(
        self,
        settings: FillSettings,
        info: RankInfo,
        record: Path,
        gate: SharedGate | None,
        board: CycleBoard | None,
        control: ControlPage | None,
        log: Path,
    ) -> None:
        ring = Ring()
        signals = CudaSignals(info.device, ring.semaphore)
        control_fd = None if control is None else control.reader_fd()
        spec = RelaySpec(
            info=info,
            record=str(record),
            parent=os.getpid(),
            ring_fd=ring.fd,
            gate_fd=None if gate is None else gate.fd,
            board_fd=None if board is None else board.fd,
            control_fd=control_fd,
            trace_iterations=settings.trace_iterations,
            rule=fill_rule(settings, info.stages),
            paired_blocks=settings.paired_blocks,
            max_slowdown=settings.max_slowdown / 100,
        )
        self._relay = RelayProcess(spec, ring, gate, log)
        if control_fd is not None:
            os.close(control_fd)
        self.free_bytes = FreeDeviceMemory(info.device)
        self.listener = StreamListener(ring, signals, self.free_bytes, self._relay.alive, self._relay.shut)
        if not self._relay.wait_ready():
            logger.warning("rank %d: its relay does not start, so nothing is filled; see %s", info.rank, log)
            self.listener.shut()

    def finish(self) -> None:
        self.listener.end()
        if not self._relay.finish():
            logger.warning("the relay failed: this rank's record may lack its end")

    def abort(self) -> None:
        self._relay.kill()
