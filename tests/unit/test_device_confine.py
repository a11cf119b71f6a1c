"""What a worker takes from itself, seen from inside one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from megatron.fill.device.confine import confine
from megatron.fill.device.landlock import SCOPES_SINCE, enter_scope, landlock_abi
from megatron.fill.device.oom import OomLog
from megatron.fill.device.port import DeviceError, Limits

MIB = 2**20


def inside(code: str, device: str = "cpu", limits: str = "memory_bytes=512 << 20, files=128") -> Any:
    """The JSON that ``code`` prints in a confined process."""
    program = (
        "import ctypes, json, os, resource, signal, socket, subprocess, sys\n"
        "from megatron.fill.device import host\n"
        "from megatron.fill.device.confine import confine\n"
        "from megatron.fill.device.port import Limits\n"
        "host.die_with_parent(os.getppid())\n"
        f"lacking = confine({device!r}, Limits({limits}))\n"
        "def attempt(act):\n"
        "    try:\n"
        "        act()\n"
        "    except OSError as error:\n"
        "        return type(error).__name__\n"
        "    return 'done'\n" + code
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def test_limits_bind():
    code = """
death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death), 0, 0, 0)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "data": resource.getrlimit(resource.RLIMIT_DATA), "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "core": resource.getrlimit(resource.RLIMIT_CORE), "processes": resource.getrlimit(resource.RLIMIT_NPROC)[0],
    "oom": int(open("/proc/self/oom_score_adj").read()), "no_new_privs": int(status["NoNewPrivs"]),
    "death": death.value,
}))"""
    found = inside(code)
    assert found["data"] == [512 * MIB] * 2
    assert found["files"] == [128, 128]
    assert found["core"] == [0, 0]
    assert 512 < found["processes"] < 100_000
    assert found["oom"] == 1000
    assert found["death"] == signal.SIGKILL  # it still ends with its parent
    assert found["no_new_privs"] == 1


def test_an_allocation_over_the_cap_fails():
    code = """
try:
    block = bytearray(600 << 20)
    print(json.dumps("done"))
except MemoryError:
    print(json.dumps("MemoryError"))"""
    assert inside(code) == "MemoryError"


def test_host_memory_has_no_cap_for_a_gpu_s_worker():
    assert inside("print(json.dumps(resource.getrlimit(resource.RLIMIT_DATA)[0]))", "cuda:0") == -1


@pytest.mark.skipif(landlock_abi() < SCOPES_SINCE, reason="the kernel has no landlock scopes")
def test_a_worker_reaches_its_own_children_and_nobody_else():
    code = """
parent = os.getppid()
child = subprocess.Popen(["sleep", "60"])
print(json.dumps({
    "lacking": lacking,
    "signal": attempt(lambda: os.kill(parent, signal.SIGCONT)),
    "memory": attempt(lambda: open(f"/proc/{parent}/mem", "rb")),
    "environment": attempt(lambda: open(f"/proc/{parent}/environ", "rb").read()),
    "raise": attempt(lambda: os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY), b"-1")),
    "own": attempt(lambda: open("/proc/self/environ", "rb").read()),
    "child": attempt(lambda: os.kill(child.pid, signal.SIGKILL)),
}))
child.wait()"""
    found = inside(code)
    assert found["lacking"] == []
    assert found["signal"] == "PermissionError"
    assert found["memory"] == found["environment"] == "PermissionError"
    assert found["raise"] == "PermissionError"
    assert found["child"] == found["own"] == "done"


def test_limits_cannot_be_raised_again_by_root_or_by_what_it_starts():
    code = """
again = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))"
def own():
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))
    except ValueError:
        raise PermissionError
print(json.dumps([attempt(own), subprocess.run([sys.executable, "-c", again], stderr=-3).returncode]))"""
    assert inside(code) == ["PermissionError", 1]


def test_what_the_runtime_does_in_a_worker_still_works():
    code = """
from megatron.fill.device.meter import HostMeter
from megatron.fill.device.tree import descendants
host.yield_to_main_job()
meter = HostMeter()
meter.start()
child = subprocess.Popen(["sleep", "60"], process_group=0)
os.killpg(child.pid, signal.SIGSTOP)
found = descendants(os.getpid())
os.killpg(child.pid, signal.SIGKILL)
print(json.dumps([found == [child.pid], meter.stop()[1] > 0, child.wait()]))"""
    assert inside(code) == [True, True, -9]


def test_a_thread_that_came_too_early_is_said_to_keep_its_powers():
    code = """
import threading, time
threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
print(json.dumps(confine("cpu", Limits())))
sys.stdout.flush()
os._exit(0)"""
    assert inside(code) == ["a thread that runs already keeps its powers"]


def test_an_old_kernel_is_said_to_be_one(monkeypatch):
    monkeypatch.setattr("megatron.fill.device.landlock.landlock_abi", lambda: 3)
    assert enter_scope() == "landlock has ABI 3: scopes need ABI 6, Linux 6.12"
    monkeypatch.setattr("megatron.fill.device.landlock.landlock_abi", lambda: 0)
    assert "landlock is not there" in enter_scope()


def test_the_agent_s_own_process_is_not_confined_by_importing():
    assert callable(confine)
    os.kill(os.getppid(), signal.SIGCONT)


@pytest.mark.parametrize("wrong", [{"memory_bytes": 0}, {"processes": 0}, {"files": 0}, {"sm_percentage": 101}])
def test_limits_that_nothing_could_keep_are_refused(wrong):
    with pytest.raises(DeviceError, match="expected"):
        Limits(**wrong)


def test_the_kernel_s_log_names_the_victim(tmp_path):
    log, counters = tmp_path / "kmsg", tmp_path / "vmstat"
    log.write_text("")
    counters.write_text("oom_kill 3\n")
    watch = OomLog(log, counters)
    assert watch.explain({41, 42}) == ""
    log.write_text("4,1,2,-;Memory cgroup out of memory: Killed process 42 (python) total-vm:8kB\n SUBSYSTEM=memory\n")
    assert "Killed process 42 (python)" in watch.explain({41, 42})
    watch.close()


def test_another_process_s_end_is_not_the_worker_s(tmp_path):
    log = tmp_path / "kmsg"
    log.write_text("")
    watch = OomLog(log, tmp_path / "none")
    log.write_text("4,1,2,-;Out of memory: Killed process 7 (python)\n")
    assert watch.explain({42}) == ""
    watch.close()


def test_without_the_log_the_count_is_evidence(tmp_path):
    counters = tmp_path / "vmstat"
    counters.write_text("nr_free_pages 5\noom_kill 3\n")
    watch = OomLog(tmp_path / "none", counters)
    assert watch.explain({42}) == ""
    counters.write_text("nr_free_pages 5\noom_kill 4\n")
    assert "most likely this worker" in watch.explain({42})
