"""Trainings of the benchmarks: how they end when a rank fails or they take too long."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from megatron.fill.linux.ports import free_port
from scripts.benchmarks import one_gpu

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
    with pytest.raises(RuntimeError, match="the training was ended after 1 s, which it had"):
        train(tmp_path, monkeypatch, 2, limit_s=1.0)


def test_the_port_of_rank_0_is_nobody_elses():
    with free_port() as port, socket.socket() as other, socket.socket() as rank0:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        rank0.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank0.bind(("127.0.0.1", port))
        rank0.listen()
