"""How one rank's bubbles are listened to: one value and one way to begin, in the rank itself and in its relay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.pages.board import CycleBoard
from megatron.fill.pages.control import RankSwitch
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
    """The settings of one rank's listener, recorder and brake.

    Attributes:
        record: the file for the rank's record.
        trace_iterations: of how many last iterations the compute spans are kept.
        paired_blocks: as ``RankListener`` has it.
        max_slowdown: above which the brake stops the filling, as a fraction; 0 for no brake.
    """

    info: RankInfo
    record: str
    rule: FillRule
    trace_iterations: int = 3
    paired_blocks: int = 0
    max_slowdown: float = 0.0

    def listener(
        self,
        free_bytes: Callable[[], int],
        gate: SharedGate | None,
        board: CycleBoard | None,
        control: RankSwitch | None,
    ) -> RankListener:
        """The listener, with its recorder; the pages are sealed: who writes them writes them from now on.

        Args:
            free_bytes, gate, board, control: as ``RankListener`` has them.
        """
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
            control=control,
        )
        if board is not None:
            listener.watch = StillnessWatch(listener, self.info, board.beat)
            listener.watch.start()
        return listener
