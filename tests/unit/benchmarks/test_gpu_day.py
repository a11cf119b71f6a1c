"""The program of the GPU day: its steps, what it keeps of each, the wheels that it needs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from megatron.fill.device.port import DeviceError
from megatron.fill.report import compose
from scripts.benchmarks import carried, gpu_day, gpu_free_waits, gpu_identity
from scripts.benchmarks.day_figures import figures
from tests.support.segments import write_segment
from tests.support.synthetic import synthetic_run

ROOT = Path(__file__).resolve().parents[3]
STUB = """#!/bin/sh
case "$1 $2" in
    *gpu_look.py*) exit 3 ;;
    "-c import megatron.training"*) exec sleep 600 ;;
esac
exec {python} "$@"
"""


def day(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", ROOT / "scripts/gpu_day.sh", *arguments],
        env=os.environ | {"PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_free_waits_are_compared_in_turns_that_change():
    assert gpu_free_waits.order(2) == [True, False, False, True]
    times_ms = [101.0, 100.0, 100.0, 103.0]
    found = [
        {"free_waits": on, "iteration_ms": ms, "harvest_ratio": 0.8 if on else 0.4}
        for on, ms in zip(gpu_free_waits.order(2), times_ms, strict=True)
    ]
    told = gpu_free_waits.compared(found)
    assert told["slowdown_by_pair"] == pytest.approx([0.01, 0.03])
    assert figures("free-waits", told) == [
        "iterations with free waits longer by +1.0%, +3.0%",
        "harvest ratio 0.800 with, 0.400 without",
    ]
    assert figures("free-waits", {"not_run": "one GPU"}) == []


def test_what_free_waits_are_compared_by_begins_once_jobs_have_stepped(tmp_path):
    ranks = [replace(record, settled_after=4) for record in synthetic_run()[0]]
    its = [replace(ranks[0].iterations[0], iteration=number, end_ns=number, start_ns=0) for number in range(1, 31)]
    ranks = [replace(record, iterations=its) for record in ranks]
    write_segment(tmp_path, ranks)
    compose(tmp_path)
    found = gpu_free_waits.figures(tmp_path)
    assert found["iteration_ms"] == pytest.approx(18e-6)  # of iterations 6 to 30
    late = tmp_path / "late"
    write_segment(late, [replace(record, settled_after=25) for record in ranks])
    compose(late)
    with pytest.raises(RuntimeError, match="5 iterations after all jobs had stepped; expected 10 or more"):
        gpu_free_waits.figures(late)


def test_free_waits_without_two_gpus_are_not_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["gpu_free_waits.py", "--json", str(tmp_path / "found.json")])
    gpu_free_waits.main()
    assert capsys.readouterr().out == "not run: two real stages over NCCL need two GPUs; there are 1\n"
    assert "not_run" in json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ([], "the part is ''; expected look, smoke, figures1, figures2 or stages"),
        (["watch"], "the part is 'watch'; expected look"),
        (["look", "--device", "tpu"], "--device is 'tpu'; expected cpu or cuda"),
        (["look", "--seconds", "0"], "--seconds is '0'; expected a whole number above 0"),
        (["look", "--only", "A step"], "--only is 'A step'; expected names of steps"),
        (["look", "--fast"], "unknown argument --fast (see --help)"),
        (["look", "a", "b"], "unexpected argument b (see --help)"),
    ],
)
def test_a_wrong_call_is_answered_by_one_line(call, expected):
    done = day(*call)
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ([], "no folder given; expected scripts/gpu_wheels.sh DIR"),
        (["a", "b"], "one folder at a time, not a and b"),
        (["{folder}", "--most", "few"], "--most is 'few'; expected a whole number of MiB"),
        (["{folder}", "--fast"], "unknown argument --fast"),
        (["{folder}"], "holds more than wheels (mine.txt )"),
    ],
)
def test_a_wrong_call_for_wheels_leaves_the_folder_alone(tmp_path, call, expected):
    if not (ROOT / ".venv/bin/python").exists():
        pytest.skip("needs the environment that scripts/setup.sh makes")
    (tmp_path / "mine.txt").touch()
    done = subprocess.run(
        ["bash", ROOT / "scripts/gpu_wheels.sh", *(one.format(folder=tmp_path) for one in call)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["mine.txt"]


def test_a_step_that_fails_or_hangs_stops_no_other_and_all_are_kept(tmp_path):
    stub = tmp_path / "python"
    stub.write_text(STUB.format(python=sys.executable), encoding="utf-8")
    stub.chmod(0o755)
    done = day("look", str(tmp_path / "out"), "--device", "cpu", "--seconds", "12", PYTHON=str(stub))
    content = json.loads((tmp_path / "out/look.json").read_text(encoding="utf-8"))
    assert done.returncode == 1
    assert (content["rehearsal"], content["part"]) == (True, "look")
    results = {step["step"]: step["result"] for step in content["steps"]}
    assert list(results) == ["machine", "imports", "try", "doctor", "tests", "micro"]
    assert (results["machine"], results["imports"]) == ("failed: 3", "timed out")
    assert set(list(results.values())[2:]) == {"left out"}
    with tarfile.open(tmp_path / "out/look.tgz") as packed:
        assert {"machine.log", "imports.log"} <= set(packed.getnames())
    assert "REHEARSAL on the CPU" in done.stdout
    assert max(map(len, done.stdout.split("REHEARSAL")[1].splitlines())) <= 80


def test_only_a_machine_without_a_driver_rehearses_by_itself(monkeypatch, tmp_path):
    def broken() -> None:
        raise DeviceError("the driver does not answer")

    monkeypatch.setattr("megatron.fill.device.nvml.Nvml", broken)
    monkeypatch.setattr(gpu_day, "_DRIVER", (tmp_path / "nvidiactl",))
    assert gpu_day.device() == "cpu"
    (tmp_path / "nvidiactl").touch()
    with pytest.raises(SystemExit, match=r"the driver does not answer.*expected a GPU, or --device cpu"):
        gpu_day.device()


def test_what_is_packed_of_the_steps_is_what_tells_why_one_failed(tmp_path):
    run = tmp_path / "work/keep/variant/filled-run"
    for name in ("report.json", "agents/agent0.log", "records/1/rank0.bin", "jobs/bert-1/checkpoint.pt", "jobs.db"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name, encoding="utf-8")
    gpu_day.logs(tmp_path / "work", tmp_path / "part.tgz")
    with tarfile.open(tmp_path / "part.tgz") as packed:
        assert {Path(name).name for name in packed.getnames()} == {"report.json", "agent0.log", "rank0.bin"}


def test_one_step_alone(tmp_path):
    done = day("look", str(tmp_path), "--only", "machine")
    (step,) = json.loads((tmp_path / "look.json").read_text(encoding="utf-8"))["steps"]
    assert (done.returncode, step["result"]) == (0, "ran")
    assert step["found"]["packages"]["numpy"] == version("numpy")
    assert "cores, Landlock ABI" in done.stdout
    assert "gpu_look.py" in (tmp_path / "look.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("code", "found", "expected"),
    [
        (0, {}, "ran"),
        (0, {"not_run": "no GPU"}, "not run"),
        (124, {}, "timed out"),
        (137, {}, "timed out"),
        (1, {"parts": {}}, "failed: 1"),
        (None, {}, "left out"),
    ],
)
def test_how_a_step_went(code, found, expected):
    assert gpu_day.result(code, found) == expected


def test_figures_of_the_micro_measurements_are_lines():
    spread = {"count": 3, "min": 1.0, "p50": 12.4, "p99": 99.6, "max": 120.0}
    found = {
        "parts": {
            "marks": {"idle, 8 connections": {"mark_to_relay_us": spread, "opened_to_kernel_us": spread}, "took_s": 3},
            "spinning": {
                "timeslice": {"alone_per_s": 9.0, "spin": {"share": 0.47}, "value": {"share": 0.99}},
                "took_s": 3,
            },
            "killing": {"mps": {"around_the_kill_us": spread}, "took_s": 3},
        },
        "failed": {"slices": "side has ended"},
    }
    assert figures("micro", found) == [
        "mark to relay, idle, 8 connections: p50 12, p99 100 us",
        "bubble to first kernel, idle, 8 connections: p50 12, p99 100 us",
        "products beside a wait, timeslice: spin 47%, value 99% of alone",
        "longest tiny kernel around a kill, mps: 120 us",
        "slices failed: side has ended",
    ]
    assert figures("something else", found) == []


def test_figures_of_trainings_are_lines():
    measured = {
        "slowdown": {"mean": 0.004, "ci95": [-0.001, 0.009], "pairs": 10},
        "harvest_ratio": 0.87,
        "open_to_step_us": {"count": 9, "p50": 120.0, "p99": 400.0},
        "jobs": [],
    }
    summary = {
        "filled": {"timeslice-stream": measured, "mps-stream": {"not_run": "no MPS"}},
        "marks": {"x": {"failed": "y"}},
    }
    assert figures("filled", {"summary": summary}) == [
        "filled: slowdown +0.40% (-0.10% to +0.90%, 10 pairs)",
        "filled: harvest ratio 0.87",
        "filled: open to step p50 120, p99 400 us",
        "filled: not run: no MPS",
        "marks: failed: y",
    ]
    assert figures("filled", {"summary": {"not_run": "no CUDA device"}}) == ["no CUDA device"]


def test_figures_of_real_stages_say_whether_losses_are_the_same():
    plain = {1: 2.5, 2: 2.25}
    same = gpu_identity.verdict(plain, dict(plain))
    other = gpu_identity.verdict(plain | {2: 2.2500002}, plain)
    assert (same["identical"], same["finite"], same["iterations"]) == (True, True, 2)
    assert (other["identical"], other["first_that_differs"]) == (False, 2)
    assert gpu_identity.verdict({}, {})["identical"] is False
    assert gpu_identity.verdict({1: math.inf}, {1: math.inf})["finite"] is False
    assert figures("losses", other | {"harvest_ratio": 0.5}) == [
        "losses of 2 iterations: NOT the same from 2 on",
        "harvest ratio 0.5",
    ]


def test_what_is_carried_is_what_a_machine_with_torch_lacks():
    packages = carried.carried([], {})
    assert packages["megatron-core"] == version("megatron-core")
    assert {"pydantic-core", "sqlalchemy", "nvidia-ml-py"} <= set(packages)
    assert not {"torch", "numpy", "transformers", "triton", "pipefill"} & set(packages)
    assert "scikit-learn" in carried.carried(["tasks"], {})


def test_what_the_machine_has_is_left_out_if_it_fits():
    lacking = set(carried.carried([], {}))
    assert lacking - set(carried.carried([], {"pydantic": "2.14.3"})) >= {"pydantic"}
    assert "pydantic" in carried.carried([], {"pydantic": "1.10.2"})


def test_the_list_of_a_machine_is_read_or_refused(tmp_path):
    freeze = tmp_path / "freeze.txt"
    freeze.write_text("PyYAML==6.0.3\ntyping_extensions==4.15.0\n", encoding="utf-8")
    assert carried.read_freeze(freeze) == {"pyyaml": "6.0.3", "typing-extensions": "4.15.0"}
    freeze.write_text("PyYAML 6.0.3\n", encoding="utf-8")
    with pytest.raises(ValueError, match="'PyYAML': expected NAME==VERSION"):
        carried.read_freeze(freeze)


def test_a_package_that_is_not_here_is_told(monkeypatch, capsys):
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(carried, "version", missing)
    monkeypatch.setattr(sys, "argv", ["carried.py"])
    with pytest.raises(SystemExit) as ended:
        carried.main()
    assert ended.value.code == 2
    assert "is not installed here; expected what scripts/setup.sh installs" in capsys.readouterr().err
