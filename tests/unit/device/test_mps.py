"""The MPS daemon of a run, against a pretended control program."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from megatron.fill.device.joining import guard
from megatron.fill.device.mps import MpsDaemon
from megatron.fill.device.port import DeviceError, Limits, Sharing
from megatron.fill.device.sharing import choose_sharing
from megatron.fill.linux.tree import read_process
from tests.support.mps_control import SERVER, install

GPUS = ("GPU-aaaa", "GPU-bbbb")
GIB = 2**30


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Short enough for a socket's address."""
    with tempfile.TemporaryDirectory(prefix="pf-") as folder:
        yield Path(folder)


@pytest.fixture
def program(tmp_path: Path) -> str:
    return str(install(tmp_path))


@pytest.fixture
def daemon(tmp_path: Path, program: str) -> Iterator[MpsDaemon]:
    daemon = start(tmp_path, program)
    yield daemon
    daemon.stop()


def start(tmp_path: Path, program: str, owner: int | None = None) -> MpsDaemon:
    return MpsDaemon.start(tmp_path / "run", GPUS, owner or os.getpid(), program, tmp_path)


def commands(daemon: MpsDaemon) -> list[str]:
    return (daemon.log / "commands.log").read_text().splitlines()


def daemon_pid(daemon: MpsDaemon) -> int:
    return int((daemon.pipe / "nvidia-cuda-mps-control.pid").read_text())


def is_alive(pid: int) -> bool:
    process = read_process(pid)
    return process is not None and process.alive


def test_a_daemon_is_the_run_s_own(daemon, tmp_path):
    assert daemon.ours
    assert daemon.answers()
    assert stat.S_IMODE(daemon.pipe.stat().st_mode) == stat.S_IMODE(daemon.log.stat().st_mode) == 0o700
    assert daemon.log == tmp_path / "run/mps"
    assert commands(daemon)[0] == "start GPU-aaaa,GPU-bbbb"
    assert not any("partition" in command or command.startswith("set_") for command in commands(daemon))


def test_stopping_removes_the_pipes(tmp_path, program):
    daemon = start(tmp_path, program)
    pid = daemon_pid(daemon)
    daemon.stop()
    assert not daemon.pipe.exists()
    assert commands(daemon)[-1].startswith("quit")
    assert not is_alive(pid)


def test_another_rank_of_the_run_joins(daemon, tmp_path, program):
    other = start(tmp_path, program)
    assert not other.ours
    assert other.pipe == daemon.pipe
    other.stop()
    assert daemon.answers()
    assert sum(command.startswith("start") for command in commands(daemon)) == 1


def test_a_killed_run_s_daemon_is_replaced(tmp_path, program):
    gone = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    left = start(tmp_path, program, gone.pid)
    pid = daemon_pid(left)
    gone.communicate()
    new = start(tmp_path, program)
    try:
        assert new.ours
        assert daemon_pid(new) != pid
        assert not is_alive(pid)
    finally:
        new.stop()


def test_a_living_run_s_daemon_is_not_taken_from_it(daemon, tmp_path, program):
    with pytest.raises(DeviceError, match="trains there with MPS already"):
        start(tmp_path, program, os.getppid())
    assert daemon.answers()


def test_the_pipes_of_a_dead_daemon_are_cleaned(tmp_path, program):
    left = start(tmp_path, program)
    os.kill(daemon_pid(left), signal.SIGKILL)
    (left.pipe / "control").write_text("stale")
    new = start(tmp_path, program)
    try:
        assert new.answers()
        assert not (new.pipe / "control").exists()
    finally:
        new.stop()


def test_a_number_that_became_another_process_s_is_not_killed(tmp_path, program):
    left = start(tmp_path, program)
    left.stop()
    left.pipe.mkdir(mode=0o700)
    (left.pipe / "nvidia-cuda-mps-control.pid").write_text(str(os.getppid()))
    new = start(tmp_path, program)  # would have ended the test's own parent
    new.stop()


def test_a_running_daemon_is_used_and_left(daemon, program):
    theirs = MpsDaemon.existing(daemon.pipe, program)
    assert not theirs.ours
    theirs.stop()
    assert daemon.answers()


def test_no_daemon_is_no_existing_one(tmp_path, program):
    with pytest.raises(DeviceError, match="no MPS daemon answers"):
        MpsDaemon.existing(tmp_path, program)


def test_a_worker_sees_one_device_and_its_limit_names_that_one(daemon):
    environment = daemon.environment(Limits(memory_bytes=4 * GIB, sm_percentage=30), "GPU-bbbb", GIB)
    assert environment == {
        "CUDA_MPS_PIPE_DIRECTORY": str(daemon.pipe),
        "CUDA_VISIBLE_DEVICES": "GPU-bbbb",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30",
        "CUDA_MPS_CLIENT_PRIORITY": "1",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=5120M",
    }
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in daemon.environment(Limits(), "GPU-bbbb", GIB)


def test_the_main_job_has_all_of_its_devices(daemon):
    environment = daemon.main_environment(GPUS)
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-aaaa,GPU-bbbb"
    assert environment["CUDA_MPS_CLIENT_PRIORITY"] == "0"
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "100"


def test_only_clients_are_terminated(daemon):
    (daemon.pipe / "clients").write_text("11\n22\n33\n")
    assert daemon.clients() == {11: SERVER, 22: SERVER, 33: SERVER}
    assert daemon.terminate([22, 44]) == []
    assert daemon.clients() == {11: SERVER, 33: SERVER}
    assert [line for line in commands(daemon) if line.startswith("terminate")] == [f"terminate_client {SERVER} 22"]


def test_a_daemon_that_hangs_costs_no_more_than_the_time_given(daemon, tmp_path):
    Path(daemon.program).write_text("#!/bin/sh\nexec sleep 5\n")
    assert daemon.terminate([11], timeout_s=0.1) == [11]
    with pytest.raises(DeviceError, match=r"did not answer get_server_list within 0\.1 s"):
        daemon.clients(0.1)
    install(tmp_path)


def test_a_missing_program_is_said_to_be(tmp_path):
    with pytest.raises(DeviceError, match="is not installed"):
        start(tmp_path, str(tmp_path / "none"))


def test_a_failing_program_is_said_to_be(tmp_path):
    failing = tmp_path / "nvidia-cuda-mps-control"
    failing.write_text("#!/bin/sh\nexit 3\n")
    failing.chmod(0o755)
    with pytest.raises(DeviceError, match="does not start"):
        start(tmp_path, str(failing))


def test_a_path_too_long_for_a_socket_is_refused(tmp_path, program):
    with pytest.raises(DeviceError, match="too long for the MPS pipes"):
        MpsDaemon.start(tmp_path, GPUS, os.getpid(), program, tmp_path / ("x" * 80))


def test_a_folder_that_others_may_enter_is_refused(tmp_path, program):
    daemon = start(tmp_path, program)
    daemon.stop()
    daemon.pipe.mkdir()
    daemon.pipe.chmod(0o777)
    with pytest.raises(DeviceError, match="nobody else may enter"):
        start(tmp_path, program)


@pytest.mark.parametrize(
    ("setting", "facts", "mode", "why"),
    [
        ("auto", {"gpus": 8, "mps_program": True}, Sharing.TIMESLICE, "keeps a worker's fault"),
        ("auto", {"gpus": 0, "mps_program": False}, Sharing.TIMESLICE, "no GPU"),
        ("timeslice", {"gpus": 8, "mps_program": True}, Sharing.TIMESLICE, "asked for"),
        ("mps", {"gpus": 8, "mps_program": True}, Sharing.MPS, "can end the main job"),
    ],
)
def test_mps_is_used_only_where_it_was_asked_for(setting, facts, mode, why):
    chosen, reason = choose_sharing(setting, **facts)
    assert chosen is mode
    assert why in reason


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"gpus": 0, "mps_program": True}, "no GPU"),
        ({"gpus": 8, "mps_program": False}, "not installed"),
        ({"gpus": 8, "mps_program": True, "same_user": False}, "one user only"),
    ],
)
def test_mps_that_cannot_be_had_is_refused(facts, why):
    with pytest.raises(DeviceError, match=why):
        choose_sharing("mps", **facts)


@pytest.mark.parametrize("setting", ["auto", "timeslice"])
def test_no_job_could_use_a_gpu_in_an_exclusive_mode_but_by_mps(setting):
    choose = partial(choose_sharing, gpus=1, mps_program=True, exclusive=True)
    with pytest.raises(DeviceError, match=r"exclusive compute mode.*expected the mode Default"):
        choose(setting)
    assert choose("mps")[0] is Sharing.MPS


def test_the_guard_stops_the_daemon_when_its_owner_is_gone(tmp_path, program):
    owner = subprocess.Popen(["sleep", "0.3"])
    daemon = start(tmp_path, program, owner.pid)
    pid = daemon_pid(daemon)
    guard(daemon, owner.pid)
    owner.wait()
    assert not is_alive(pid)
