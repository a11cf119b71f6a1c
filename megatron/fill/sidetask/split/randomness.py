"""A job's own random numbers, which depend neither on the split of the job nor on other code in the process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class Randomness:
    """A job's own state of torch's generators (the CPU's and its device's); inside ``with``, torch draws from it."""

    def __init__(self, device: str, *seeds: int) -> None:
        self._device = torch.device(device)
        self.seed(*seeds)

    def seed(self, *seeds: int) -> None:
        """Reset the state to the seed that these numbers make together."""
        seed = int(np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]) >> 1
        devices = ["cpu"] if self._device.type == "cpu" else ["cpu", self._device]
        self.state: tuple[Any, ...] = tuple(torch.Generator(d).manual_seed(seed).get_state() for d in devices)

    def __enter__(self) -> None:
        self._outer = self._get()
        self._set(self.state)

    def __exit__(self, *exception: object) -> None:
        self.state = self._get()
        self._set(self._outer)

    def _get(self) -> tuple[Any, ...]:
        if self._device.type == "cpu":
            return (torch.get_rng_state(),)
        return (torch.get_rng_state(), torch.cuda.get_rng_state(self._device))

    def _set(self, state: tuple[Any, ...]) -> None:
        torch.set_rng_state(state[0])
        if len(state) > 1:
            torch.cuda.set_rng_state(state[1], self._device)
