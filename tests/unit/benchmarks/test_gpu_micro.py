"""What two processes on one GPU measure: the protocol, the figures and the file, over a stand-in for the GPU."""

from __future__ import annotations

import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.fill.device.port import DeviceError
from scripts.benchmarks import gpu_day, gpu_micro
from scripts.benchmarks.micro import parts
from scripts.benchmarks.micro.actions import WARMUP
from scripts.benchmarks.micro.actor import Actor, ActorError
from scripts.benchmarks.micro.figures import delays_us, followed_us, spread
from scripts.benchmarks.micro.stage import Stage, opened
from tests.support.micro_standin import GEMM_S
from tests.support.mps_control import install

ROOT = Path(__file__).resolve().parents[3]
MS = 1_000_000
ECHO = """
from scripts.benchmarks.micro.actions import WARMUP
from scripts.benchmarks.micro.actor import serve
class Echo:
    def say(self, word): print("noise"); return {"word": word}
    def fail(self): raise ValueError("too odd\\nin the second line")
    def leave(self): import os; print("I leave", flush=True); os._exit(3)
    def sleep(self): import time; time.sleep(60)
serve(Echo())
"""


def test_a_spread_is_by_nearest_rank():
    assert spread([]) == {"count": 0}
    assert spread([3.0]) == {"count": 1, "min": 3.0, "p50": 3.0, "p99": 3.0, "max": 3.0}
    found = spread([float(value) for value in range(200, 0, -1)])
    assert found == {"count": 200, "min": 1.0, "p50": 100.0, "p99": 198.0, "max": 200.0}


def test_delays_are_from_each_begin_to_its_end():
    assert delays_us([10 * MS, 20 * MS], [11 * MS, 20 * MS - 2_000]) == [1000.0, -2.0]  # as clocks can be compared
    with pytest.raises(ValueError, match="shorter"):
        delays_us([10 * MS, 20 * MS], [11 * MS])  # none is left out


def test_not_every_begin_is_followed():
    begins = [10 * MS, 20 * MS, 30 * MS, 40 * MS]
    assert followed_us(begins, [11 * MS, 30 * MS + 5_000, 31 * MS]) == [1000.0, 5.0]
    assert followed_us(begins, [9 * MS, 49 * MS]) == [9000.0]  # however late
    assert followed_us([], [MS]) == []


@pytest.fixture
def actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Actor]:
    monkeypatch.chdir(ROOT)
    actor = Actor("echo", [sys.executable, "-c", ECHO], {}, tmp_path / "log")
    yield actor
    actor.end()


def test_an_actor_answers_in_order_and_what_it_prints_is_no_answer(actor):
    actor.begin("say", word="one")
    actor.begin("say", word="two")
    assert [actor.answer(), actor.answer()] == [{"word": "one"}, {"word": "two"}]


def test_what_an_actor_fails_at_is_one_line_and_it_goes_on(actor):
    with pytest.raises(ActorError, match=r"^echo: ValueError: too odd$"):
        actor.do("fail")
    assert actor.do("say", word="still here") == {"word": "still here"}


def test_an_actor_that_ends_or_hangs_is_told_of(actor):
    with pytest.raises(ActorError, match=r"echo did not answer within 0\.05 s"):
        actor.do("sleep", timeout_s=0.05)
    actor.kill()


def test_an_actor_that_leaves_is_told_of_with_its_last_words(actor):
    with pytest.raises(ActorError, match="echo has ended: I leave"):
        actor.do("leave")


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """With an MPS daemon, that is played as well."""
    monkeypatch.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="pf-") as folder:  # short enough for a socket's address
        install(Path(folder))
        monkeypatch.setenv("PATH", folder, prepend=os.pathsep)
        busy = Path(folder) / "gpu"
        busy.touch()
        with opened(None, "GPU-0", [sys.executable, "-m", "tests.support.micro_standin", str(busy)]) as stage:
            yield stage


def test_all_parts_find_what_the_stand_in_does(stage, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(parts, "CONNECTIONS", (8,))
    path = tmp_path / "micro.json"
    failed = gpu_micro.measure(stage, list(parts.PARTS), 0.4, 5, path, {"device": "a stand-in"})
    content = json.loads(path.read_text(encoding="utf-8"))
    assert (failed, content["failed"], content["device"], content["no_mps"]) == (0, {}, "a stand-in", "")
    found = content["parts"]
    for way in ("posted, 8 connections", "written, 8 connections", "posted, MPS", "written, MPS"):
        marked = found["marks"][way]
        assert marked["mark_to_relay_us"]["count"] == 5 + WARMUP  # those, too, that the predictor only watches
        assert marked["mark_to_relay_us"]["min"] > 0
        assert 0 < marked["opened_to_kernel_us"]["count"] <= 5 + WARMUP
    assert found["marks"]["written, 8 connections"]["mark_host_us"]["min"] > 0
    assert found["marks"]["beside matrix products"]["mark_to_relay_us"]["count"] == 24 + WARMUP
    for way in ("timeslice", "mps"):
        for wait in parts.WAITS:
            beside = found["spinning"][way][wait]
            assert beside["share"] > 0
            assert beside["waited_s"] > 0.4  # for longer than was counted; it had begun before the clock that says so
        slices = found["slices"][way]
        assert slices["product_ms"]["min"] >= 1e3 * GEMM_S
        assert slices["beside_us"]["max"] > slices["alone_us"]["p50"]
        assert found["memory"][way]["landlock"]["context"] == "yes"
        assert found["killing"][way]["around_the_kill_us"]["count"] > 0
    assert found["memory"]["timeslice"]["fraction_binds"] is True
    assert found["memory"]["mps"]["limit_binds"] is True  # the worker was given the daemon's limit
    assert {"spinning:", "killing:"} <= set(capsys.readouterr().out.split())


def test_the_logs_of_both_processes_and_of_the_daemon_can_be_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    install(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    keep = tmp_path / "work/keep/micro"
    with (
        opened(None, "GPU-0", [sys.executable, "-c", ECHO], keep) as stage,
        stage.actors("mps", "main", "side") as actors,
    ):
        for actor in actors:
            actor.do("say", word="one")
    gpu_day.logs(tmp_path / "work", tmp_path / "look.tgz")
    with tarfile.open(tmp_path / "look.tgz") as packed:
        names = {str(Path(name).relative_to("keep/micro")) for name in packed.getnames()}
    assert names == {"mps/commands.log", "mps-main.log", "mps-side.log"}


def test_a_part_that_fails_leaves_the_others(tmp_path, monkeypatch, capsys):
    broken = Stage(tmp_path, "GPU-0", None, [sys.executable, "-c", "import sys; sys.exit('no device')"])
    path = tmp_path / "micro.json"
    assert gpu_micro.measure(broken, ["spinning", "memory"], 0.1, 1, path, {}) == 2
    failed = json.loads(path.read_text(encoding="utf-8"))["failed"]
    assert set(failed) == {"spinning", "memory"}
    assert failed["spinning"].removeprefix("main").removeprefix("side") == " (timeslice) has ended: no device"
    assert failed["memory"] == "side (timeslice) has ended: no device"


def test_without_a_gpu_it_says_why_and_that_is_no_failure(tmp_path, monkeypatch, capsys):
    def none() -> None:
        raise DeviceError("NVML cannot be used: no driver")

    monkeypatch.setattr(gpu_micro, "first_gpu", none)
    monkeypatch.setattr(sys, "argv", ["gpu_micro.py", "--json", str(tmp_path / "m.json")])
    gpu_micro.main()
    assert capsys.readouterr().out == "gpu_micro: not run: no GPU: NVML cannot be used: no driver\n"
    assert json.loads((tmp_path / "m.json").read_text())["not_run"] == "no GPU: NVML cannot be used: no driver"


def test_without_mps_the_stage_says_why(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with opened(None, "GPU-0", []) as stage:
        assert (stage.ways, stage.daemon) == (["timeslice"], None)
        assert "nvidia-cuda-mps-control is not installed" in stage.no_mps
