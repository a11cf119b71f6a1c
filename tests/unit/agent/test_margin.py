"""The margin that the training owns, with a stand-in for its caching allocator and hostile workers beside it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.agent.memory import DeviceMemory, MemoryShare
from megatron.fill.device.margin import DRIVER_BYTES, CudaAllocator, keep_margin
from megatron.fill.device.port import MIB
from megatron.fill.profiles import BubbleCycle, BubbleSlot
from megatron.fill.types import BubbleKind

GIB = 1024 * MIB
MARGIN = GIB


class Gpu:
    """The memory of a device, which whoever comes first gets."""

    overhead_bytes = 0

    def __init__(self, total: int) -> None:
        self.free = total

    def free_bytes(self) -> int:
        return self.free

    def malloc(self, size: int) -> None:
        if size > self.free:
            raise MemoryError
        self.free -= size


class Block:
    def __init__(self, cache: Cache, size: int) -> None:
        self.cache, self.size = cache, size
        cache.used += size

    def __del__(self) -> None:
        self.cache.used -= self.size


class Cache:
    """A caching allocator: it takes from its cache, or from the device, and never gives anything back to that."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.reserved = self.used = self.peak = 0

    def reserved_bytes(self) -> int:
        return self.reserved

    def peak_bytes(self) -> int:
        return self.peak

    def take(self, size: int) -> Block:
        lacking = self.used + size - self.reserved
        if lacking > 0:
            self.gpu.malloc(lacking)
            self.reserved += lacking
        return Block(self, size)

    def need(self, size: int) -> None:
        """The training uses so much at once, and gives it back."""
        block = self.take(size)
        self.peak = max(self.peak, self.used)
        del block


def test_the_margin_is_reserved_beyond_the_peak_and_nothing_stays_in_use():
    gpu = Gpu(80 * GIB)
    cache = Cache(gpu)
    cache.need(20 * GIB)
    assert keep_margin(cache, MARGIN) == 0
    assert cache.reserved == 21 * GIB
    assert (cache.used, cache.peak) == (0, 20 * GIB)
    assert keep_margin(cache, MARGIN) == 0
    assert cache.reserved == 21 * GIB  # once


def test_what_is_in_the_cache_but_was_needed_is_no_margin():
    gpu = Gpu(80 * GIB)
    cache = Cache(gpu)
    cache.need(20 * GIB)
    cache.reserved += GIB // 2  # fragments
    gpu.free -= GIB // 2
    assert keep_margin(cache, MARGIN) == 0
    assert cache.reserved == 21 * GIB


def test_what_cannot_be_had_is_said():
    gpu = Gpu(20 * GIB + 300 * MIB)
    cache = Cache(gpu)
    cache.need(20 * GIB)
    assert keep_margin(cache, MARGIN) == MARGIN - 256 * MIB  # in pieces of 64 MiB
    assert gpu.free == 44 * MIB


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cache:
    """A stand-in for PyTorch's caching allocator of cuda:0, behind the functions of ``torch``."""
    cache = Cache(Gpu(24 * GIB))

    def empty(size: int, *, dtype: torch.dtype, device: str) -> Block:
        assert (dtype, device) == (torch.uint8, "cuda:0")
        try:
            return cache.take(size)
        except MemoryError as error:
            raise torch.OutOfMemoryError from error

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: cache.reserved)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: cache.peak)
    return cache


def test_the_allocator_of_a_gpu_takes_the_margin_once_and_again_after_it_was_given_back(cuda: Cache) -> None:
    allocator = CudaAllocator("cuda:0")
    cuda.need(20 * GIB)
    for _ in range(2):
        assert keep_margin(allocator, MARGIN) == 0
        assert (cuda.reserved, cuda.used) == (21 * GIB, 0)
    cuda.gpu.free += cuda.reserved  # torch.cuda.empty_cache()
    cuda.reserved = 0
    assert keep_margin(allocator, MARGIN) == 0
    assert (cuda.reserved, cuda.used) == (21 * GIB, 0)
    cuda.need(22 * GIB)
    assert keep_margin(allocator, MARGIN) == 0
    assert (cuda.reserved, cuda.used) == (23 * GIB, 0)
    cuda.gpu.malloc(GIB)  # another process's
    cuda.need(23 * GIB)
    assert keep_margin(allocator, MARGIN) == MARGIN  # the device is full
    assert cuda.used == 0


def failures(seed: int, steps: int, owned: bool) -> int:
    """How often the training is out of memory while it grows at random beside workers that take all there is.

    They go around PyTorch's cap, and are looked at every now and then only, as by the agent; then they are ended.
    """
    rng = random.Random(seed)
    gpu = Gpu(80 * GIB)
    cache = Cache(gpu)
    need = 20 * GIB
    cache.need(need)
    driver_bytes = DRIVER_BYTES if owned else MARGIN
    limiter: Any = SimpleNamespace(held_bytes=0)
    memory = DeviceMemory(gpu, driver_bytes, 1.0)  # type: ignore[arg-type]
    runs, failed, asked = False, 0, list[int | None]()
    share = MemoryShare(memory, limiter, 0, asked.append, lambda: False)
    for step in range(steps):
        if owned and step % 20 == 0:
            keep_margin(cache, MARGIN)
        if not runs and step % 20 == 0:  # a new worker
            cycle = BubbleCycle(10**9, (BubbleSlot(BubbleKind.FILL, 10**6, gpu.free),))
            runs, share = memory.room_bytes(cycle) > 0, MemoryShare(memory, limiter, 0, asked.append, lambda: False)
        if runs:
            limiter.held_bytes += gpu.free
            gpu.malloc(gpu.free)
        # The training grows, by no more than the margin between two looks of its own.
        need = min(need + rng.choice((0, 0, 0, 0, rng.randrange(50 * MIB))), 60 * GIB)
        try:
            cache.need(need)
        except MemoryError:
            failed += 1
        if step % 3 == 0 and (share.look() or asked):  # whatever it is told, it does not do
            gpu.free += limiter.held_bytes
            limiter.held_bytes, runs = 0, False
            asked.clear()
    return failed


@pytest.mark.parametrize("seed", range(4))
def test_the_training_never_runs_out_beside_hostile_workers(seed):
    assert failures(seed, 2500, owned=True) == 0


def test_without_a_margin_of_its_own_it_does():
    assert sum(failures(seed, 2500, owned=False) for seed in range(4)) > 0


@settings(max_examples=50)
@given(st.integers(0, 40 * GIB), st.integers(0, 40 * GIB), st.integers(0, 4 * GIB))
def test_what_is_kept_and_what_is_missing_are_the_margin(total, need, margin):
    gpu = Gpu(total)
    cache = Cache(gpu)
    try:
        cache.need(need)
    except MemoryError:
        return
    missing = keep_margin(cache, margin)
    assert missing == max(0, cache.peak + margin - cache.reserved)
    assert not missing or gpu.free < 64 * MIB
