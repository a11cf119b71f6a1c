"""bench_gpu.py rehearsed on the CPU: whatever kills it, the parts that were finished are in the file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.training import ROOT, benchmark
from tests.support.waiting import until

VARIANT = "cpu-rehearsal-host-1f1b-tiny"
SMALL = "--device cpu --stages 2 --microbatches 2 --warmup 2 --block 1 --pairs 1 --baseline-seconds 0.5"


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [*benchmark("bench_gpu"), *SMALL.split(), "--json", str(folder / "gpu.json")]
    return subprocess.Popen(
        [*command, "--keep", str(folder / "keep"), *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PIPEFILL_STORE"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def summary(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    path = folder / "gpu.json"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return json.loads(text)["summary"] if text else {}


def test_killed_in_the_middle_it_keeps_what_it_has_and_goes_on(tmp_path):
    killed = start(tmp_path, "--parts", "profile", "bubbles", "marks", "identity")

    def measured() -> bool:
        assert killed.poll() is None, killed.communicate()[0][-3000:]
        return "bubbles" in summary(tmp_path)

    until(measured, 240, every_s=0.1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    kept = summary(tmp_path)
    assert set(kept) == {"profile", "bubbles"}
    assert kept["profile"][VARIANT]["nodes"]
    assert kept["bubbles"][VARIANT]["measured_ms"]

    done = start(tmp_path, "--parts", "marks", "--budget-seconds", "200")
    output, _ = done.communicate(timeout=240)
    assert done.returncode == 0, output[-3000:]
    found = summary(tmp_path)
    assert {name: found[name] for name in kept} == kept
    assert found["marks"][VARIANT]["watched_ms"] > 0


def test_what_fails_is_written_down_and_the_rest_has_no_time(tmp_path):
    # Megatron takes no such flag: the first part fails; the budget leaves nothing for the second.
    failed = start(tmp_path, "--parts", "bubbles", "marks", "--extra=--no-such-flag", "--budget-seconds", "9")
    output, _ = failed.communicate(timeout=240)
    assert failed.returncode == 1, output[-3000:]
    found = summary(tmp_path)
    assert "failed" in found["bubbles"][VARIANT]
    assert {"failed", "not_run"} & set(found["marks"][VARIANT])
