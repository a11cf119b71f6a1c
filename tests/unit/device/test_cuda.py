"""A GPU's limits without a GPU: what is asked of a pretended driver, and what a worker is told."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.fill.device import cuda
from megatron.fill.device.cuda import CudaDevice, allocator_environment, device_nodes, share_of
from megatron.fill.device.nvml import Gpu, Nvml, uuid_of
from megatron.fill.device.port import DeviceError, Limits, Sharing
from megatron.fill.linux.cgroup import CgroupHome
from megatron.fill.linux.tree import MARK
from megatron.fill.work import Work

GIB = 2**30
GPUS = [Gpu(0, "GPU-aaaa-1", "H200"), Gpu(1, "GPU-bbbb-2", "H200")]


class Library:
    """A pretended ``pynvml``."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.processes: dict[str, dict[int, int | None]] = {"compute": {}, "mps": {}}
        self.free_bytes = 100 * GIB

    def nvmlInit(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> str:
        return "610.12"

    def nvmlDeviceGetCount(self) -> int:
        return len(GPUS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return GPUS[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        for gpu in GPUS:
            if gpu.uuid == uuid:
                return gpu
        raise self.NVMLError("Not Found")

    def nvmlDeviceGetUUID(self, handle: Gpu) -> str:
        return handle.uuid

    def nvmlDeviceGetName(self, handle: Gpu) -> str:
        return handle.name

    def nvmlDeviceGetMemoryInfo(self, handle: Gpu) -> Any:
        return SimpleNamespace(total=141 * GIB, free=self.free_bytes)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Gpu) -> list[Any]:
        return self._listed("compute")

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: Gpu) -> list[Any]:
        return self._listed("mps")

    def _listed(self, kind: str) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes[kind].items()]


class Mps:
    """A pretended daemon."""

    def __init__(self) -> None:
        self.terminated: list[int] = []
        self.hangs = False

    def environment(self, limits: Limits, uuid: str, overhead_bytes: int) -> dict[str, str]:
        return {"CUDA_MPS_PIPE_DIRECTORY": "/pipe", "CUDA_VISIBLE_DEVICES": uuid}

    def terminate(self, pids: list[int], timeout_s: float) -> list[int]:
        self.terminated += pids
        return pids if self.hangs else []


@pytest.fixture
def library(monkeypatch) -> Library:
    monkeypatch.setattr(cuda, "has_host_pids", lambda: True)
    return Library()


def device(library: Library, mps: Any = None, uuid: str | None = "GPU-bbbb-2") -> CudaDevice:
    return CudaDevice("cuda:1", mps, uuid, Nvml(library), CgroupHome(None, why="switched off"))


@pytest.mark.parametrize(
    ("name", "visible", "uuid"),
    [
        ("cuda:0", None, "GPU-aaaa-1"),
        ("cuda:1", None, "GPU-bbbb-2"),
        ("cuda", "1", "GPU-bbbb-2"),
        ("cuda:0", "1,0", "GPU-bbbb-2"),
        ("cuda:1", "GPU-bbbb, GPU-aaaa", "GPU-aaaa-1"),
        ("cuda:0", "MIG-cccc", "MIG-cccc"),
    ],
)
def test_a_device_is_known_by_its_uuid(name, visible, uuid):
    assert uuid_of(name, visible, GPUS) == uuid


@pytest.mark.parametrize(("name", "visible"), [("cuda:2", None), ("cuda:0", "7"), ("tpu:0", None), ("cuda:x", None)])
def test_no_such_device_is_said_to_be(name, visible):
    with pytest.raises(DeviceError, match=name):
        uuid_of(name, visible, GPUS)


def test_a_worker_sees_its_gpu_only(library):
    gpu = device(library)
    assert (gpu.name, gpu.worker_name, gpu.free_bytes()) == ("cuda:1", "cuda:0", 100 * GIB)
    limiter = gpu.limiter(Limits(), "job-1")
    # Nor is it a client of a daemon that happens to run on this machine.
    own = {"CUDA_VISIBLE_DEVICES": "GPU-bbbb-2", "CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}
    own["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a task whose modules ask for CUDA can still fork
    assert limiter.environment == {MARK: "job-1"} | own
    limiter.close()


def test_a_limiter_that_cannot_be_made_leaves_no_control_group(library, tmp_path):
    gone = CudaDevice("cuda:1", None, "GPU-gone", Nvml(library), CgroupHome(tmp_path))
    with pytest.raises(DeviceError):
        gone.limiter(Limits(GIB), "job-1")
    assert list(tmp_path.iterdir()) == []


def test_the_uuid_is_found_where_it_is_not_given(library, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert device(library, uuid=None).uuid == "GPU-aaaa-1"


def test_the_allocator_s_cap_is_a_share_of_the_gpu_and_keeps_what_was_set():
    inherited = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    found = allocator_environment(10 * GIB, 40 * GIB, inherited, "2.15.0+cu130")
    assert found == {"PYTORCH_ALLOC_CONF": "expandable_segments:True,per_process_memory_fraction:0.250000"}
    assert allocator_environment(80 * GIB, 40 * GIB, {}, "3.0.1")["PYTORCH_ALLOC_CONF"].endswith(":1.000000")
    assert allocator_environment(GIB, 40 * GIB, {}, "2.8.0") == {}


def test_pytorch_knows_the_allocator_s_cap():
    setting = allocator_environment(GIB, 40 * GIB, {}, version("torch")).get("PYTORCH_ALLOC_CONF")
    if setting is None:
        pytest.skip(f"PyTorch {version('torch')} is too old")
    code = f"import torch; torch._C._accelerator_setAllocatorSettings({setting!r})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def worker() -> Any:
    process = subprocess.Popen(["sleep", "60"], process_group=0)
    yield process
    process.kill()
    process.wait()


def test_what_escapes_the_allocator_is_seen(library, worker):
    limiter = device(library).limiter(Limits(memory_bytes=4 * GIB), "job-1")
    limiter.adopt(worker.pid)
    library.processes["compute"] = {worker.pid: 5 * GIB, os.getpid(): 90 * GIB}
    assert limiter.look() == ""  # the context's overhead included
    assert limiter.held_bytes == 5 * GIB
    library.processes["compute"][worker.pid] = 5 * GIB + 1
    assert limiter.look().startswith("over its cap of 4096 MiB of device memory: 5120 MiB held by 1 processes")
    library.processes["compute"][worker.pid] = GIB
    assert limiter.look() == ""
    assert limiter.peak_bytes == 5 * GIB + 1
    limiter.kill()
    assert worker.wait(60) < 0
    limiter.close()


@pytest.mark.parametrize("rank", [77, None])
def test_pids_of_another_namespace_are_not_taken_for_the_worker_s(library, worker, monkeypatch, rank):
    monkeypatch.setattr(cuda, "has_host_pids", lambda: False)
    gpu = CudaDevice("cuda:1", None, "GPU-bbbb-2", Nvml(library), CgroupHome(None, why="switched off"), rank)
    limiter = gpu.limiter(Limits(memory_bytes=GIB), "job-1")
    limiter.adopt(worker.pid)
    library.processes["compute"] = {worker.pid: 9 * GIB, 4711: GIB}
    assert limiter.look() == ""
    assert limiter.held_bytes == 0
    library.processes["compute"][rank or os.getpid()] = GIB  # the driver means what we mean
    assert "over its cap" in limiter.look()
    limiter.close()


def test_clients_of_mps_are_seen_and_taken_off_the_gpu_first(library, worker):
    mps = Mps()
    limiter = device(library, mps).limiter(Limits(memory_bytes=GIB), "job-1")
    assert limiter.environment["CUDA_MPS_PIPE_DIRECTORY"] == "/pipe"
    limiter.adopt(worker.pid)
    library.processes["mps"] = {worker.pid: 3 * GIB}
    assert "over its cap" in limiter.look()
    limiter.kill()
    assert mps.terminated == [worker.pid]
    assert worker.wait(60) < 0
    limiter.close()


def test_a_client_that_the_daemon_does_not_take_off_the_gpu_is_said_and_killed(library, worker, caplog):
    mps = Mps()
    mps.hangs = True
    limiter = device(library, mps).limiter(Limits(memory_bytes=GIB), "job-1")
    limiter.adopt(worker.pid)
    limiter.kill()
    assert worker.wait(60) < 0
    assert f"processes [{worker.pid}] are killed though the MPS server has not said" in caplog.text
    limiter.close()


@pytest.mark.parametrize(("mode", "expected"), [(0, "all"), (1, "one"), (2, "nobody"), (3, "one"), (None, "all")])
def test_who_may_use_a_gpu_follows_from_its_compute_mode(library, mode, expected):
    if mode is not None:
        library.nvmlDeviceGetComputeMode = lambda handle: mode
    assert Nvml(library).shared_by("GPU-bbbb-2") == expected


def test_energy_is_that_of_the_gpu_where_it_has_the_counter(library):
    assert device(library).energy_j() is None  # a driver before it
    library.nvmlDeviceGetTotalEnergyConsumption = lambda handle: {"GPU-bbbb-2": 123_456}[handle.uuid]  # mJ
    assert device(library).energy_j() == 123.456


def test_memory_that_the_driver_does_not_tell_counts_as_none(library):
    library.processes["compute"] = {7: None}
    assert Nvml(library).used_bytes("GPU-aaaa-1") == {7: 0}


def test_a_driver_that_is_not_there_is_said_to_be():
    broken = Library()
    broken.nvmlInit = lambda: (_ for _ in ()).throw(Library.NVMLError("no library"))  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="no library"):
        Nvml(broken)


def test_without_torch_there_is_nothing_to_wait_for(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    cuda.synchronize("cuda:0")


class GreenContext:
    """One of PyTorch 2.12 or later."""

    @classmethod
    def create(cls, num_sms: int, device_id: int) -> Any:
        return cls()

    def set_context(self) -> None:
        raise AssertionError("backward passes would run beside it")

    def Stream(self) -> str:
        return "the share's stream"


@pytest.fixture
def torch_module(monkeypatch) -> Any:
    module = types.ModuleType("torch")
    green = types.ModuleType("torch.cuda.green_contexts")
    taken: list[Any] = []
    module.__dict__.update(
        __version__="2.11.0",
        taken=taken,
        green=green,
        device=lambda name: SimpleNamespace(index=0),
        cuda=SimpleNamespace(
            get_device_properties=lambda device: SimpleNamespace(multi_processor_count=132, total_memory=40 * GIB),
            set_per_process_memory_fraction=lambda share, device: taken.append(share),
            set_stream=taken.append,
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.setitem(sys.modules, "torch.cuda.green_contexts", green)
    return module


def test_a_share_of_the_multiprocessors_is_a_stream_of_a_green_context(torch_module):
    torch_module.green.GreenContext = GreenContext
    assert cuda.enter("cuda:0", Limits(memory_bytes=10 * GIB, sm_percentage=50), Sharing.TIMESLICE) == ""
    assert torch_module.taken == [0.25, "the share's stream"]


def test_a_green_context_without_streams_is_not_made_current(torch_module):
    torch_module.green.GreenContext = type("Old", (), {"create": GreenContext.create, "set_context": 0})
    lacking = cuda.enter("cuda:0", Limits(sm_percentage=50), Sharing.TIMESLICE)
    assert "PyTorch 2.11.0 has no streams of green contexts" in lacking
    assert torch_module.taken == []


@pytest.mark.parametrize(("device", "capped"), [("cpu", "host"), ("cuda:0", "device")])
def test_what_is_measured_is_held_to_its_cap_where_its_memory_is(monkeypatch, tmp_path, device, capped):
    from megatron.fill.trial import measure

    found: list[tuple[str, int]] = []
    monkeypatch.setattr(measure.host, "cap_memory", lambda cap: found.append(("host", cap)))
    monkeypatch.setattr(measure.cuda, "cap_memory", lambda name, cap: found.append(("device", cap)))
    monkeypatch.setattr(measure, "measure", lambda spec: True)
    path = tmp_path / "spec.json"
    path.write_text(measure.MeasureSpec("job", Work("m:C", memory_bytes=5 * GIB), device, str(tmp_path)).to_json())
    monkeypatch.setattr(sys, "argv", ["measure", str(path)])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^0$"):
        measure.main()
    assert found == [(capped, 5 * GIB)]


def test_settling_waits_for_the_device_if_it_is_in_use(monkeypatch):
    waited: list[str] = []
    torch = types.ModuleType("torch")
    torch.cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=waited.append)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    cuda.synchronize("cpu")
    cuda.synchronize("cuda:0")
    assert waited == ["cuda:0"]
    torch.cuda.is_initialized = lambda: False
    cuda.synchronize("cuda:0")
    assert waited == ["cuda:0"]


@pytest.mark.parametrize(("count", "percentage", "share"), [(132, 100, 128), (132, 50, 64), (132, 1, 8), (108, 30, 32)])
def test_a_share_is_a_number_of_whole_grains(count, percentage, share):
    assert share_of(count, percentage) == share


def test_a_worker_gets_the_files_of_its_own_gpu_and_no_other_s(tmp_path):
    for minor, uuid in ((0, "GPU-a"), (3, "GPU-b")):
        folder = tmp_path / "driver/nvidia/gpus" / f"0000:0{minor}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t NVIDIA H100\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n")
    nodes = device_nodes("GPU-b", tmp_path, Path("/dev"))
    assert nodes[:3] == ("/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm")
    assert "/dev/nvidia0" not in nodes


def test_where_the_driver_does_not_say_whose_is_whose_all_files_are_given(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    nodes = device_nodes("GPU-b", tmp_path, tmp_path)
    assert nodes[:3] == tuple(str(tmp_path / name) for name in ("nvidia0", "nvidia1", "nvidiactl"))
