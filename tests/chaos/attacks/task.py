"""The side task that commits an attack."""

from __future__ import annotations

import time
from pathlib import Path

from megatron.fill.types import JobState
from tests.chaos.attacks.base import Ground, NoTargetError, Refused
from tests.chaos.attacks.table import ATTACKS
from tests.chaos.marks import Note, mark
from tests.chaos.targets import Targets
from tests.chaos.tasks import GOOD_STEPS, Honest, work


class Attacker(Honest):
    """Commits its attack after three good steps, notes the outcome, and continues its work."""

    def create(self, marks: str, steps: int, attack: str = "", folder: str = "", machine_network: int = 0) -> None:
        super().create(marks, steps)
        self.attack = ATTACKS[attack]
        self.ground = Ground(self.context.directory.resolve(), Path(folder), machine_network)
        self.told = Path(marks).parent
        self.until_s = 0.0

    def run_next_step(self) -> float | None:
        if self.done < GOOD_STEPS:
            return super().run_next_step()
        if not self.until_s:
            self._commit()
            self.until_s = time.monotonic() + self.attack.lasts_s
        if time.monotonic() < self.until_s:
            work()
            return 0.0
        if self.attack.lasts_s and self.attack.kind.state is JobState.FAILED:
            raise RuntimeError("nothing ended it")
        return super().run_next_step()

    def _commit(self) -> None:
        self.ground.targets = Targets.read(self.told)
        mark(self.marks, Note.FAULT)
        try:
            through = self.attack.commit(self.ground)
        except NoTargetError as error:
            mark(self.marks, Note.MISSED, str(error))
        except (OSError, Refused) as error:
            mark(self.marks, Note.HELD, str(error))
        else:
            mark(self.marks, Note.THROUGH, through or "done")
