"""The listener of a rank's bubbles: in the rank itself on the CPU, in a relay process on CUDA."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron.fill.config import FillSettings
from megatron.fill.device.margin import CudaAllocator, keep_margin
from megatron.fill.device.meter import free_bytes
from megatron.fill.device.port import Sharing
from megatron.fill.linux.host import FreeHostMemory
from megatron.fill.pages.board import CycleBoard
from megatron.fill.pages.control import AlwaysRunning, ControlPage
from megatron.fill.pages.gate import SharedGate
from megatron.fill.pages.lastword import MOST_BYTES, LastWord
from megatron.fill.pages.ring import Ring
from megatron.fill.rank.blocks import Blocks
from megatron.fill.rank.relay import RelayProcess, RelaySpec
from megatron.fill.rank.rule import TIMESLICED, FillRule
from megatron.fill.rank.signals import cuda_signals
from megatron.fill.rank.spec import RankSpec
from megatron.fill.rank.stream import StreamListener
from megatron.fill.types import RankInfo

logger = logging.getLogger("pipefill")


def rank_spec(settings: FillSettings, info: RankInfo, record: Path, sharing: Sharing | None) -> RankSpec:
    """Return the spec of a rank's listener; ``sharing`` is how jobs share its GPU, None on the CPU.

    All ranks of a stage count as its replicas, those of tensor, context and expert parallelism too: each has a gate
    of its own, and the others wait for the latest of them.
    """
    usual = TIMESLICED if sharing is Sharing.TIMESLICE else FillRule()
    least_us, guard_us = settings.min_bubble_us, settings.guard_us
    rule = replace(
        usual,
        warmup=settings.warmup_iterations,
        overrun=settings.overrun / 100,
        stages=info.stages,
        replicas=max(1, info.world_size // info.stages),
        min_bubble_ns=usual.min_bubble_ns if least_us is None else int(least_us * 1000),
        guard_ns=usual.guard_ns if guard_us is None else int(guard_us * 1000),
    )
    return RankSpec(
        info,
        str(record),
        rule,
        trace_iterations=settings.trace_iterations,
        paired_blocks=settings.paired_blocks,
        max_slowdown=settings.max_slowdown / 100,
    )


class HostListening:
    """Listening on the CPU, where the host waits when the device does; without the rank's pages it measures only."""

    def __init__(
        self, spec: RankSpec, gate: SharedGate | None, board: CycleBoard | None, control: ControlPage | None
    ) -> None:
        self._record = spec.record
        self.free_bytes = FreeHostMemory()  # of the device
        self.listener = spec.listener(self.free_bytes, gate, board, control)

    def finish(self) -> bytes:
        """Write the record, give the gate back to the rank, and return the part that could not be written."""
        if self.listener.finish():
            return b""
        logger.warning("%s could not be written in full", self._record)
        return self.listener.recorder.unwritten(MOST_BYTES)

    def abort(self) -> None:
        self.finish()


class RelayedListening:
    """Listening on CUDA, where the host runs ahead of the device, by a relay process.

    Without the rank's pages it measures only; ``owned_bytes`` is the margin that the training reserves in its own
    allocator.
    """

    def __init__(
        self,
        spec: RankSpec,
        gate: SharedGate | None,
        board: CycleBoard | None,
        control: ControlPage | None,
        log: Path,
        uuid: str | None,
        owned_bytes: int,
    ) -> None:
        info, ring, self._last_word = spec.info, Ring(), LastWord.create()
        signals = cuda_signals(info.device, ring)
        control_fd = None if control is None else control.reader_fd()
        told = RelaySpec(
            spec,
            parent=os.getpid(),
            ring_fd=ring.fd,
            gate_fd=None if gate is None else gate.fd,
            board_fd=None if board is None else board.fd,
            control_fd=control_fd,
            device_uuid=uuid,
            left_fd=self._last_word.fd,
        )
        self._relay = RelayProcess(told, ring, gate, log)
        if control_fd is not None:
            os.close(control_fd)
        self.free_bytes = partial(free_bytes, info.device)
        keep = partial(keep_margin, CudaAllocator(info.device), owned_bytes)
        switch = control or AlwaysRunning()
        blocks = Blocks(spec.rule.warmup, spec.paired_blocks, lambda: switch.settled)
        self.listener = StreamListener(ring, signals, keep, self._relay.alive, self._relay.shut, blocks)
        if not self._relay.wait_ready():
            logger.warning("rank %d: its relay does not start, so nothing is filled; see %s", info.rank, log)
            self.listener.shut()

    def finish(self) -> bytes:
        self.listener.end()
        if not self._relay.finish():
            logger.warning("the relay failed: this rank's record may lack its end")
        return self._last_word.read()

    def abort(self) -> None:
        self._relay.kill()
