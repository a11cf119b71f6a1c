"""Measuring a job's nodes: what is kept, and what happens to jobs that end early or fit in no memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron.fill.device.meter import HostMeter, resident_bytes
from megatron.fill.errors import TaskError
from megatron.fill.profiles import Configuration, JobProfile, NodeProfile
from megatron.fill.sidetask.base import TaskContext
from megatron.fill.sidetask.nodes import NodeTask
from megatron.fill.work import Work
from megatron.fill.worker import profiler
from megatron.fill.worker.profiler import MeasuringMachine, measure_nodes, run_alone


class Scripted(NodeTask):
    """Two nodes; the test's meter tells their cost from ``now``."""

    split = "by script"
    now: tuple[int, int] = (0, 0)

    def create(self, samples: int = 1000, most: int = 99) -> None:
        assert self.context.measuring
        (self.context.directory / "created").touch(exist_ok=False)  # a fresh folder for every machine
        self.samples, self.most, self.passes = samples, most, 0

    def configurations(self) -> list[Configuration]:
        return [Configuration(1), Configuration(2), Configuration(4)]

    def configure(self, configuration: Configuration) -> None:
        if configuration.batch_size > self.most:
            raise RuntimeError("can't allocate memory")
        self.batch, self.next_node = configuration.batch_size, 0

    def node_names(self) -> tuple[str, ...]:
        return ("forward", "backward")

    def iteration_work(self) -> float:
        return float(self.batch)

    def run_next_step(self) -> float:
        if self.samples <= 0:
            raise StopIteration
        node, self.next_node = self.next_node, 1 - self.next_node
        slow = 100 if self.passes == 0 else 0  # the first pass is slow
        Scripted.now = (self.batch * (node + 1) + slow, 50 * self.batch + node)
        if node == 1:
            self.samples -= self.batch
            self.passes += 1
        return float(self.batch)


class FakeMeter:
    def forget(self) -> None:
        pass

    def start(self) -> None:
        pass

    def stop(self) -> tuple[int, int]:
        return Scripted.now


@pytest.fixture(autouse=True)
def scripted_meter(monkeypatch):
    monkeypatch.setattr(profiler, "meter", lambda device: FakeMeter())


def measured(
    folder: Path, run: Callable[[MeasuringMachine], bool] = run_alone, **args: int
) -> tuple[JobProfile, ...] | None:
    work = Work("tests.unit.sidetask.test_profiler:Scripted", args=args)
    found = measure_nodes(work, TaskContext("job", folder), run)
    return None if found is None else found.profiles


def test_every_configuration_is_measured_warm(tmp_path):
    found = measured(tmp_path)
    assert found is not None
    assert [str(profile.configuration) for profile in found] == ["b1", "b2", "b4"]
    assert [profile.work for profile in found] == [1.0, 2.0, 4.0]
    assert found[1].nodes == (NodeProfile("forward", 2, 100), NodeProfile("backward", 4, 101))
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_that_does_not_run_is_left_out(tmp_path):
    found = measured(tmp_path, most=2)
    assert found is not None
    assert [str(profile.configuration) for profile in found] == ["b1", "b2"]
    with pytest.raises(TaskError, match="it runs in no configuration: b1: can't allocate memory"):
        measured(tmp_path, most=0)


def test_work_does_not_count_while_it_is_measured(tmp_path):
    def run(machine: MeasuringMachine) -> bool:
        machine.start()
        assert machine.run_next_step() == 0.0
        return False

    measured(tmp_path, run)


def test_data_that_ends_early_is_begun_again(tmp_path):
    found = measured(tmp_path, samples=6)
    assert found is not None
    assert [profile.nodes[0].duration_ns for profile in found][1:] == [2, 4]


def test_data_that_ends_at_once_is_an_error(tmp_path):
    with pytest.raises(TaskError, match="ended after 0 of the 2 nodes of the first iteration"):
        measured(tmp_path, samples=0)


def test_the_end_of_the_main_job_ends_it(tmp_path):
    assert measured(tmp_path, run=lambda machine: False) is None
    assert list(tmp_path.iterdir()) == []


@contextmanager
def fresh_memory(size):
    """Pages straight from the kernel: a ``bytearray`` may come from what the process freed before."""
    with mmap.mmap(-1, size) as block:
        block[::4096] = bytes(size // 4096)
        yield


def test_the_host_meter_sees_time_and_memory():
    meter = HostMeter()
    meter.start()
    idle_ns, idle_bytes = meter.stop()
    meter.start()
    with fresh_memory(64 << 20):
        busy_ns, busy_bytes = meter.stop()
    assert busy_ns > idle_ns
    assert busy_bytes - idle_bytes > 50 << 20
    meter.start()
    assert meter.stop()[1] < busy_bytes


def test_resident_memory_grows_with_what_is_held():
    before = resident_bytes()
    with fresh_memory(64 << 20):
        assert resident_bytes() - before > 32 << 20
