"""What the parts of bench_gpu.py measure, as far as no training is needed."""

from __future__ import annotations

import argparse
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.fill.report import compose
from scripts.benchmarks import bench_gpu, gpu_parts
from scripts.benchmarks.day_figures import figures
from scripts.benchmarks.emulated import Emulation, emulation
from scripts.benchmarks.gpu_figures import not_settled, of_run
from scripts.benchmarks.harness import Results
from scripts.benchmarks.trainings import Blocks
from tests.support.segments import write_segment
from tests.support.synthetic import synthetic_run

BLOCKS = Blocks(length=2, pairs=2, warmup=2)
GIVEN = {"parts": ["filled"], "sharing": "timeslice", "waits": "host", "schedule": "1f1b", "model": "tiny", "stage": 0}


def run_of(folder: Path, first_step_in: int) -> Path:
    """A run folder whose jobs step from an iteration on; its blocks are of iterations 3, 4 and so on."""
    ranks, workers, jobs = synthetic_run()
    late = {(record.info.rank, one.seq) for record in ranks for one in record.bubbles if one.iteration < first_step_in}
    attempts = [
        (job, replace(worker, uses=[use for use in worker.uses if (worker.rank, use.seq) not in late]))
        for worker in workers
        for job in jobs
        if job.name == worker.job
    ]
    write_segment(folder, ranks, attempts)
    compose(folder)
    return folder


def test_jobs_that_step_from_the_first_block_on_have_figures(tmp_path):
    found = of_run(run_of(tmp_path, 1), BLOCKS)
    assert "failed" not in found
    assert found["first_block_harvest"] == pytest.approx(26 / 30, abs=0.01)  # 16 of 20 ms, and 9.9 of 10
    assert found["later_blocks_harvest"] == pytest.approx(found["first_block_harvest"])


def test_jobs_that_set_themselves_up_in_measured_blocks_fail_the_step_and_the_figures_stay(tmp_path, monkeypatch):
    run = run_of(tmp_path / "run", 5)  # after the first block
    monkeypatch.setattr(bench_gpu, "PARTS", {"filled": lambda bench: of_run(run, BLOCKS)})
    results = Results(None)
    options = argparse.Namespace(**GIVEN, guard_us=None, budget_seconds=0)
    assert not bench_gpu.bench(tmp_path / "keep", options, "cpu", results)
    (found,) = results.summary["filled"].values()
    assert found["failed"] == "no step in the first block with filling on rank 0, 1: the jobs had not settled"
    assert (found["first_block_harvest"], found["steps"] > 0) == (0.0, True)
    assert found["slowdown"]["pairs"] == 2
    assert figures("filled", {"summary": results.summary}) == [f"filled: failed: {found['failed']}"]


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [
        ([0.5, 0.1], [0.6, 0.2], ""),
        ([0.5, None], [0.6, None], ""),  # none of that rank's bubbles was long enough
        ([0.5, 0.0], [0.6, 0.2], "no step in the first block with filling on rank 1"),
        ([0.5, 0.0], [0.6, 0.0], "no step in the first block with filling on rank 1"),
        ([None], [0.6], "no step in the first block with filling on rank 0"),
        ([None], [None], "no bubble opened to jobs in a block with filling"),
        ([0.5], [None], ""),  # one pair of blocks
    ],
)
def test_each_rank_that_fills_has_steps_in_the_first_block(first, later, expected):
    said = not_settled({"first_block_harvest": first, "later_blocks_harvest": later})
    assert said.startswith(expected)
    assert bool(said) == bool(expected)


@pytest.mark.parametrize("lacking", ["", "real-time priorities are refused"])
def test_a_rehearsal_without_emulation_says_so(tmp_path, monkeypatch, capsys, lacking):
    (tmp_path / "jobs-cpu.json").write_text("{}", encoding="utf-8")
    (tmp_path / "jobs-cpu.db").touch()
    (tmp_path / "pace-cpu-host-1f1b-tiny-0.json").write_text("60", encoding="utf-8")
    (tmp_path / "variant").mkdir()
    more = {"guard_us": None, "memory": "1GiB", "warmup": 2, "block": 2, "pairs": 2, "startup_seconds": 1.0}
    bench = gpu_parts.Bench(
        argparse.Namespace(**GIVEN | more, baseline_seconds=1), "cpu", tmp_path / "variant", lambda: None
    )
    monkeypatch.setattr(gpu_parts, "why_not", lambda: lacking)
    monkeypatch.setattr(gpu_parts, "of_run", lambda run, blocks: {"steps": 3})
    environments: list[dict[str, str]] = []

    def beside(*given: Any) -> AbstractContextManager[list[str]]:
        environments.append(given[-1])
        return nullcontext([])

    monkeypatch.setattr(gpu_parts.Bench, "flags", lambda bench, iterations: [])
    monkeypatch.setattr(gpu_parts, "beside_ghosts", beside)
    told = figures("filled", {"summary": {"filled": {"x": gpu_parts.filled(bench)}}})
    assert environments == [{} if lacking else emulation(Emulation.COMPLETION)]
    said = "the rehearsal is without emulation, so jobs set themselves up in the warm-up, unlike on a GPU"
    assert capsys.readouterr().out == (f"bench_gpu: {said}: {lacking}\n" if lacking else "")
    assert told == ["filled: steps 3"] + ([f"filled: {said}: {lacking}"] if lacking else [])
    assert json.loads((tmp_path / "variant/filled.yaml").read_text(encoding="utf-8"))["jobs"][0]["name"] == "bert"
