"""What the doctor says of machines, most of them not this one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fill.device import probes
from megatron.fill.device.doctor import Diagnosis, Has, diagnose
from megatron.fill.device.probes import Facts
from megatron.fill.linux.cgroup import CgroupHome
from megatron.fill.linux.host import unordered
from megatron.fill.linux.proc import has_host_pids

BOTH = frozenset({"memory", "pids"})
CLUSTER = Facts(
    gpus=("NVIDIA H200", "NVIDIA H200"),
    driver="610.12",
    mps="/usr/bin/nvidia-cuda-mps-control",
    host_pids=True,
    cgroup=CgroupHome(Path("/sys/fs/cgroup/app.slice"), BOTH),
    cores=64,
    idle_class=True,
    autogroup=False,
    sealing=True,
    kernel_log=False,
)
CONTAINER = replace(
    CLUSTER,
    host_pids=False,
    mps="",
    cgroup=CgroupHome(None, why="the control groups are not writable for this user"),
)
LAPTOP = replace(CLUSTER, gpus=(), driver="NVML cannot be used: no library", mps="", cores=1)


def bindings(diagnosis: Diagnosis) -> dict[str, str]:
    return {binding.limit: binding.uses for binding in diagnosis.bindings}


def reasons(diagnosis: Diagnosis) -> dict[str, str]:
    return {binding.limit: binding.instead for binding in diagnosis.bindings}


def abilities(diagnosis: Diagnosis) -> dict[str, Has]:
    return {ability.name: ability.has for ability in diagnosis.abilities}


def test_a_machine_that_has_everything():
    found = diagnose(CLUSTER)
    assert set(abilities(found).values()) == {Has.YES, Has.NO}
    assert [name for name, has in abilities(found).items() if has is Has.NO] == ["dmem", "kernel log"]
    uses = bindings(found)
    assert uses["CPU memory"].startswith("memory.max over the whole worker")
    assert "NVML" in uses["GPU memory"]
    assert uses["processes"] == "pids.max"
    assert uses["sharing"] == "time-slicing"
    assert uses["kill"].startswith("cgroup.kill")
    assert found.abilities[0].detail == "2 x NVIDIA H200"
    assert any("MPS does not contain an illegal access" in note for note in found.notes)
    assert not any("without memory.max" in note for note in found.notes)


def test_limits_of_device_memory_by_control_groups_are_told():
    found = diagnose(CLUSTER)
    assert abilities(found)["dmem"] is Has.NO
    assert "dmem" not in bindings(found)["GPU memory"]
    assert "no driver has registered" in reasons(found)["GPU memory"]
    known = replace(CLUSTER, device_regions=("nvidia/0000:03:00.0/vram",))
    assert abilities(diagnose(known))["dmem"] is Has.YES
    assert reasons(diagnose(known))["GPU memory"] == "PipeFill sets no dmem.max for a worker yet"
    held = replace(known, device_limits=("nvidia/0000:03:00.0/vram 1048576",))
    assert (
        "dmem.max, set for this whole group: nvidia/0000:03:00.0/vram 1048576" in bindings(diagnose(held))["GPU memory"]
    )


def test_limits_of_device_memory_are_found(tmp_path):
    groups, own = tmp_path / "cgroup", tmp_path / "cgroup/slurm/job7"
    own.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    assert probes.find_device_limits(tmp_path, groups) == ((), ())
    (tmp_path / "self/cgroup").write_text("0::/slurm/job7\n")
    (groups / "dmem.capacity").write_text("drm/a 100\ndrm/b 200\n")
    (own / "dmem.max").write_text("drm/a max\ndrm/b 50\n")
    (own.parent / "dmem.max").write_text("drm/a 70\ndrm/b max\n")
    assert probes.find_device_limits(tmp_path, groups) == (("drm/a", "drm/b"), ("drm/b 50", "drm/a 70"))
    (groups / "dmem.capacity").unlink()  # a container sees its own group only
    (own / "dmem.current").write_text("drm/b 1\n")
    assert probes.find_device_limits(tmp_path, groups)[0] == ("drm/b",)


def test_a_bare_container_says_what_it_lacks():
    found = diagnose(CONTAINER)
    assert abilities(found)["cgroup v2"] is Has.NO
    assert abilities(found)["MPS"] is Has.NO
    uses, why = bindings(found), reasons(found)
    assert uses["CPU memory"].startswith("RLIMIT_DATA per process, and a watch")
    assert uses["processes"] == "a count, 5 times a second, and RLIMIT_NPROC"
    assert "NVML" in why["GPU memory"]
    assert uses["kill"] == "all descendants, stopped first"
    assert "not writable" in why["kill"]
    assert any("without memory.max" in note for note in found.notes)


def test_a_machine_without_a_gpu_has_no_gpu_s_limits():
    found = diagnose(LAPTOP)
    assert "GPU memory" not in bindings(found)
    assert "SM share" not in bindings(found)
    assert not any("MPS" in note for note in found.notes)
    assert abilities(found)["CPU pinning"] is Has.NO


def test_a_gpu_that_jobs_cannot_use_is_told_with_the_reason():
    assert {abilities(diagnose(CLUSTER))[name] for name in ("compute mode", "CUDA for jobs")} == {Has.YES}
    facts = replace(CLUSTER, exclusive=("GPU 1 is for one process",), cuda_lacks="cuInit gives 304")
    found = diagnose(facts)
    details = {ability.name: (ability.has, ability.detail) for ability in found.abilities}
    assert details["compute mode"] == (Has.NO, "GPU 1 is for one process; expected Default (nvidia-smi -c 0, by root)")
    assert details["CUDA for jobs"] == (Has.NO, "cuInit gives 304")
    assert bindings(found)["sharing"] == "no job can use a GPU"
    assert "compute mode" not in abilities(diagnose(LAPTOP))


def test_the_hybrid_layout_is_partly_there():
    found = diagnose(replace(CLUSTER, cgroup=CgroupHome(Path("/sys/fs/cgroup/unified"), frozenset(), "no memory")))
    assert abilities(found)["cgroup v2"] is Has.PARTLY
    assert bindings(found)["kill"].startswith("cgroup.kill")


def test_a_cpu_controller_s_price_is_named():
    home = CgroupHome(Path("/g"), BOTH | {"cpu"})
    assert any("cpu.idle" in note for note in diagnose(replace(CLUSTER, cgroup=home)).notes)


def test_this_machine_can_be_asked():
    facts = probes.gather()
    assert facts.cores >= 1
    assert facts.sealing
    assert bool(facts.gpus) or "NVML" in facts.driver
    assert len(diagnose(facts).abilities) == len({ability.name for ability in diagnose(facts).abilities})


def test_probes_of_what_is_not_there(tmp_path, monkeypatch):
    assert not has_host_pids(tmp_path)
    assert not probes.has_autogroup(tmp_path)
    monkeypatch.delattr("os.memfd_create")
    assert not probes.can_seal()


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_command_prints_80_columns_or_json(options):
    code = "import sys; from megatron.fill.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", *options], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    if options:
        found = json.loads(done.stdout)
        assert set(found) == {"sandbox", "abilities", "bindings", "notes"}
        assert {"processes", "files", "network", "system calls"} <= {layer["name"] for layer in found["sandbox"]}
        assert {ability["has"] for ability in found["abilities"]} <= {"yes", "partly", "no"}
    else:
        assert max(len(line) for line in done.stdout.splitlines()) <= 80
        assert "landlock" in done.stdout


def test_a_processor_that_reorders_stores_is_named():
    found = next(
        one for one in diagnose(replace(CLUSTER, unordered=unordered("aarch64"))).abilities if "order" in one.name
    )
    assert (found.name, found.has) == ("ordered memory", Has.NO)
    assert found.detail == "this processor is aarch64, which reorders stores to shared memory; expected x86_64"
    assert unordered("x86_64") == ""
