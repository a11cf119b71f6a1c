"""Faults that need a GPU; they are not run where the training is on the CPU."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from megatron.fill.sidetask.base import SideTask
from tests.chaos.marks import Note, mark


class _Beyond:
    """An array that claims to be much longer than the memory at its address."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (1 << 38,),
            "typestr": "<f4",
            "data": (address, False),
            "version": 3,
        }


class CudaFault(SideTask):
    """After one good step, commits ``kind`` on the task's device."""

    def create(self, marks: str, kind: str) -> None:
        self.marks, self.kind, self.steps = Path(marks), kind, 0

    def init(self) -> None:
        import torch

        self.data = torch.ones(1 << 20, device=self.context.device)

    def run_next_step(self) -> None:
        import torch

        self.steps += 1
        self.data.mul_(1.0)
        torch.cuda.synchronize()
        if self.steps > 1:
            mark(self.marks, Note.FAULT)
            {"illegal-access": self._illegal, "out-of-memory": self._hog, "kill-in-kernel": self._kill}[self.kind]()

    def _illegal(self) -> None:
        """Read far beyond the allocated memory; no framework checks the sizes that this interface gives."""
        import torch

        far = torch.as_tensor(_Beyond(self.data.data_ptr()), device=self.context.device)
        far[1 << 37 : (1 << 37) + 1024].sum().item()

    def _hog(self) -> None:
        import torch

        hoard = []
        while True:
            hoard.append(torch.empty(1 << 28, dtype=torch.uint8, device=self.context.device))

    def _kill(self) -> None:
        import torch

        torch.cuda._sleep(1 << 40)
        os.kill(os.getpid(), signal.SIGKILL)
