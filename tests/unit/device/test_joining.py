"""The run's MPS daemon is joined before anything uses CUDA, by every rank of a node the same one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.fill.device import joining
from megatron.fill.device.joining import ASK_NVML, flag_of, join, join_early
from megatron.fill.device.mps import PIPE
from megatron.fill.device.nvml import Gpu
from megatron.fill.device.port import DeviceError

ASKED = ["pretrain_gpt.py", "--fill-sharing", "mps", "--fill-report=runs/a"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The daemons that were asked for: run folder and GPUs."""
    made: list[Any] = []

    def start(home: Path, uuids: list[str], launcher: int) -> Any:
        made.append((str(home), uuids))
        return SimpleNamespace(ours=False, main_environment=lambda uuids: {"CUDA_MPS_PIPE_DIRECTORY": "/pipe"})

    monkeypatch.setattr(joining, "_joined", [])
    gpus = [Gpu(0, "GPU-a", "NVIDIA H200"), Gpu(1, "GPU-b", "NVIDIA H200")]
    monkeypatch.setattr(joining, "Nvml", lambda: SimpleNamespace(gpus=lambda: gpus))
    monkeypatch.setattr(
        joining, "MpsDaemon", SimpleNamespace(start=start, existing=lambda pipe: f"the daemon of {pipe}")
    )
    return made


def test_a_run_that_asks_for_mps_has_it_before_megatron_is_imported(started: list[Any]) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "1"}
    join_early(ASKED, environment)
    assert started == [("runs/a", ["GPU-b"])]
    assert environment["CUDA_MPS_PIPE_DIRECTORY"] == "/pipe"
    assert join("runs/a", environment) is joining._joined[0]  # once the command line is parsed
    assert len(started) == 1


@pytest.mark.parametrize(
    ("argv", "environment", "after"),
    [
        (["--fill-sharing", "timeslice"], {}, {}),
        (["--fill-sharing", "mps", "--fill-cpu-backend"], {}, {ASK_NVML: "1"}),
        (["--fill-sharing", "mps"], {"PIPEFILL_CPU_BACKEND": "1"}, {"PIPEFILL_CPU_BACKEND": "1", ASK_NVML: "1"}),
        (["--fill-sharing=mps"], {PIPE: "/theirs"}, {PIPE: "/theirs", ASK_NVML: "1"}),
    ],
)
def test_others_start_no_daemon(
    started: list[Any], argv: list[str], environment: dict[str, str], after: dict[str, str]
) -> None:
    join_early(argv, environment)
    assert (environment, started) == (after, [])


def test_what_is_wrong_is_left_to_be_said_with_the_command_line(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*asked: Any) -> None:
        raise DeviceError("there is no nvidia-cuda-mps-control")

    monkeypatch.setattr(joining.MpsDaemon, "start", refuse)
    environment: dict[str, str] = {}
    join_early(ASKED, environment)
    assert environment == {ASK_NVML: "1"}
    with pytest.raises(DeviceError, match="there is no nvidia-cuda-mps-control"):
        join("runs/a", environment)


def test_a_flag_s_last_value_counts() -> None:
    argv = ["--a", "1", "--b=2", "--a=3", "--c"]
    assert [flag_of(argv, name) for name in ("--a", "--b", "--c", "--d")] == ["3", "2", None, None]
