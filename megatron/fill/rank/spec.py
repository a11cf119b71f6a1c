"""The settings of one rank's listener, and its construction, in the rank itself or in its relay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.pages.board import CycleBoard
from megatron.fill.pages.control import AlwaysRunning, RunSwitch
from megatron.fill.pages.gate import SharedGate
from megatron.fill.rank.brake import Brake
from megatron.fill.rank.listener import RankListener
from megatron.fill.rank.predictor import BubblePredictor
from megatron.fill.rank.recorder import Recorder
from megatron.fill.rank.rule import FillRule
from megatron.fill.rank.stillness import StillnessWatch
from megatron.fill.types import RankInfo


@dataclass(frozen=True, slots=True)
class RankSpec:
    """The settings of one rank's listener, recorder and brake."""

    info: RankInfo
    record: str  # the file for the rank's record
    rule: FillRule  # the rule for filling a bubble
    trace_iterations: int = 3  # number of last iterations whose compute spans are drawn
    paired_blocks: int = 0  # length of the alternating blocks with and without filling, in iterations; 0 for always on
    max_slowdown: float = 0.0  # slowdown as a fraction above which the brake stops the filling; 0 for no brake

    def listener(
        self,
        free_bytes: Callable[[], int],
        gate: SharedGate | None,
        board: CycleBoard | None,
        control: RunSwitch | None,
    ) -> RankListener:
        """Return the listener; gate and board are sealed: only existing mappings can write to them."""
        for page in (gate, board):
            if page is not None:
                page.seal()
        brake = None
        if gate is not None and self.max_slowdown:
            brake = Brake(self.max_slowdown, self.info.rank, self.rule.guard_ns, self.paired_blocks)
        listener = RankListener(
            gate,
            Recorder(self.info, self.trace_iterations, Path(self.record)),
            BubblePredictor(self.rule),
            free_bytes,
            paired_blocks=self.paired_blocks,
            board=board,
            brake=brake,
            control=control or AlwaysRunning(),
        )
        if board is not None:
            StillnessWatch(listener, self.info, board.beat).start()
        return listener
