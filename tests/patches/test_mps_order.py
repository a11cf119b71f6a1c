"""Sharing by MPS: nothing may use the driver before the process knows whose client it is to become."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.fill.app import share
from megatron.fill.device.joining import ASK_NVML, join_early
from tests.e2e.launch import FRESH, WARM

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "asks"),
    [
        (["--fill-sharing", "mps"], {ASK_NVML: "1"}),
        (["x", "--fill-sharing=mps", "y"], {ASK_NVML: "1"}),
        (["--fill-sharing", "timeslice", "mps"], {}),
        (["--fill-sharing"], {}),
    ],
)
def test_pytorch_asks_nvml_where_the_run_shares_by_mps(arguments: list[str], asks: dict[str, str]) -> None:
    environment = {"PIPEFILL_CPU_BACKEND": "1"}  # joins no daemon
    join_early(arguments, environment)
    assert environment == {"PIPEFILL_CPU_BACKEND": "1"} | asks


IMPORTS = """
import os, runpy, sys

entry = sys.argv[1]
sys.argv = [entry, "--fill-sharing", "mps"]
import torch

used = []
torch._C._cuda_getDeviceCount = torch._C._cuda_init = lambda: used.append(1) or 1
torch.cuda._device_count_nvml = lambda: 1
if entry == "pretrain_gpt.py":
    runpy.run_path(entry, run_name="imported")
else:
    import megatron.fill.app.launch
    import megatron.training
import pipefill_patches

assert "wheel" in pipefill_patches.defaults([])
print("used" if used else "left alone")
"""


@pytest.mark.parametrize("entry", ["pretrain_gpt.py", "a script of NVIDIA's"])
def test_the_driver_is_left_alone_until_the_command_line_is_parsed(entry: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in (ASK_NVML, "PIPEFILL_CPU_BACKEND")}
    # The second one is forked from a process that has imported torch: what torch itself does is seen in the first one.
    forked = [] if entry == "pretrain_gpt.py" else [str(ROOT / "tests" / "e2e" / "launch.py"), "0"]
    environment[WARM] = environment[FRESH]
    done = subprocess.run(
        [sys.executable, *forked, "-c", IMPORTS, entry],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
        timeout=250,
    )
    said = done.stdout.splitlines()[-1:]
    if said != ["left alone"] and "ssm/ops/gdp" in done.stderr:
        pytest.skip("megatron-core 0.20 itself asks for the GPU's name when it is imported, after the daemon is joined")
    assert said == ["left alone"], done.stderr


class Daemon:
    pipe = Path("/pipe")

    def __init__(self, *clients: int, outside: bool) -> None:
        self.outside = outside
        self.found = dict.fromkeys(clients, 7)

    def clients(self) -> dict[int, int]:
        return self.found


@pytest.mark.parametrize(
    ("clients", "outside", "host_pids", "is_client"),
    [
        ((os.getpid(), 1), False, True, True),
        ((1,), False, True, False),
        ((), False, False, False),
        ((1,), True, True, False),
        ((1,), True, False, True),  # it may be one, by another number
    ],
)
def test_a_rank_that_became_no_client_is_found_out(monkeypatch, clients, outside, host_pids, is_client) -> None:
    import torch

    began: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: began.append(1))
    monkeypatch.setattr(share, "has_host_pids", lambda: host_pids)
    why = share.why_no_client(Daemon(*clients, outside=outside))  # type: ignore[arg-type]
    assert began == [1]
    assert (why == "") is is_client
    assert is_client or ASK_NVML in why
