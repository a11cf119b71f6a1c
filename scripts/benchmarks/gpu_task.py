"""A side task that is nothing but matrix products on its device."""

from __future__ import annotations

from typing import Any

from megatron.fill import SideTask


class Products(SideTask):
    """A product of two square matrices in each step."""

    unit = "products"

    def create(self, size: int = 256) -> None:
        self.size = size

    def init(self) -> None:
        import torch

        device = self.context.device
        kind = torch.bfloat16 if device.startswith("cuda") else torch.float32
        self.matrices: list[Any] = [torch.randn(self.size, self.size, device=device, dtype=kind) for _ in range(3)]

    def run_next_step(self) -> float:
        import torch

        left, right, product = self.matrices
        torch.mm(left, right, out=product)
        return 1.0
