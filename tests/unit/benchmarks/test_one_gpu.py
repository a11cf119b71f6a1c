"""Trainings of the benchmarks: how they end when a rank fails or they take too long; MPS for them."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmarks import bench_gpu, one_gpu
from scripts.benchmarks.harness import Results
from scripts.benchmarks.one_gpu import free_port
from tests.support.mps_control import install

RANK = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("rank", rank, "begins", flush=True)
if rank == int(sys.argv[1]):
    sys.exit("out of luck")
time.sleep(600)
"""


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, failing: int, limit_s: float | None = None) -> list[str]:
    monkeypatch.setattr(one_gpu, "SCRIPT", [sys.executable, "-c", RANK, str(failing)])
    with one_gpu.training(2, "timeslice", [], folder / "log.log", limit_s) as lines:
        return list(lines)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_ends_the_others_and_is_named(tmp_path, monkeypatch, failing):
    with pytest.raises(
        RuntimeError, match=rf"rank {failing} of the training ended with exit code 1:\n(.*\n)*out of luck"
    ):
        train(tmp_path, monkeypatch, failing)


def test_a_training_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    where = r"was in state [A-Z], in \w+"
    late = f"the training was ended after 1 s, which it had; rank 0 {where}, rank 1 {where}"
    with pytest.raises(RuntimeError, match=late):
        train(tmp_path, monkeypatch, 2, limit_s=1.0)


def test_the_port_of_rank_0_is_nobody_elses():
    with free_port() as port, socket.socket() as other, socket.socket() as rank0:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        rank0.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank0.bind(("127.0.0.1", port))
        rank0.listen()


@pytest.fixture
def daemon(tmp_path, monkeypatch) -> Path:
    """The control program of a daemon that is played; it comes first on the path."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return install(tmp_path)


def test_a_daemon_of_mps_is_there_for_as_long_as_it_is_used_and_its_logs_stay(daemon, tmp_path):
    with one_gpu.mps(tmp_path / "keep/mps"):
        pipe = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
        assert (pipe / "nvidia-cuda-mps-control.pid").exists()
        assert os.environ["CUDA_MPS_LOG_DIRECTORY"] == str(tmp_path / "keep/mps")
    assert not pipe.exists()
    assert (tmp_path / "keep/mps/commands.log").read_text(encoding="utf-8") == "start None\nquit\n"
    assert not {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"} & set(os.environ)


BROKEN = """#!/bin/sh
[ "$1" = -d ] && exit {start}
{quit}
"""


@pytest.mark.parametrize("does", ["exec sleep 600", "exit 3"])
def test_a_daemon_that_does_not_end_replaces_no_error_and_costs_no_figure(daemon, tmp_path, monkeypatch, capfd, does):
    daemon.write_text(BROKEN.format(start=0, quit=does), encoding="utf-8")
    monkeypatch.setattr(one_gpu, "_QUIT_S", 0.1)

    def fails(bench: object) -> None:
        raise RuntimeError("the training failed")

    monkeypatch.setattr(bench_gpu, "PARTS", {"measures": lambda bench: {"slowdown": 0.01}, "fails": fails})
    given = {"parts": ["fails", "measures"], "sharing": "mps", "waits": "stream", "schedule": "1f1b", "model": "350m"}
    options = argparse.Namespace(**given, guard_us=None, budget_seconds=0)
    results = Results(None)
    assert not bench_gpu.bench(tmp_path / "keep", options, "cuda", results)
    (failed,), (measured,) = (results.summary[part].values() for part in ("fails", "measures"))
    assert failed["failed"] == "RuntimeError: the training failed"
    assert measured["slowdown"] == 0.01
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_a_daemon_that_does_not_start_is_told_and_not_asked_to_end(daemon, tmp_path, monkeypatch):
    daemon.write_text(BROKEN.format(start=1, quit="exec sleep 600"), encoding="utf-8")
    with pytest.raises(subprocess.CalledProcessError, match="-d"), one_gpu.mps(tmp_path / "mps"):
        pytest.fail("there is no daemon")
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
