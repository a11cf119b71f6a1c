"""Real trainings under a real SLURM: interrupted, queued again, cancelled; with jobs in their bubbles."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.fill.store import Job, open_store
from megatron.fill.types import JobState
from tests.e2e.training import MODEL, ROOT, UPSTREAM, Trained, iterations_in, train, write_jobs
from tests.slurm.cluster import PrivateSlurm
from tests.slurm.conftest import output, running_slurm
from tests.support.postgres import NoPostgres, PrivatePostgres
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)
SCRIPT = str(ROOT / "scripts" / "train_slurm.sh")
NOTICED = "--exit-signal-handler --exit-signal SIGUSR2"
ITERATIONS = 120
LONGER = f"{MODEL} --seq-length 64 --max-position-embeddings 64 --global-batch-size 8"  # iterations than of others


@pytest.fixture(scope="module")
def slurm() -> Iterator[PrivateSlurm]:
    yield from running_slurm(nodes=2, cpus=2)


def submit(slurm: PrivateSlurm, folder: Path, flags: str, *options: str, iterations: int = ITERATIONS) -> str:
    logs = ["--tensorboard-dir", str(folder / "tensorboard"), "--train-iters", str(iterations)]
    arguments = [*LONGER.split(), *logs, *flags.split()]
    return slurm.submit(
        *(options or ("-c", "2")),
        SCRIPT,
        *arguments,
        cwd=folder,
        PYTHON=sys.executable,
        PIPEFILL=str(ROOT),
        PIPEFILL_CPU_BACKEND="1",
    )


def iterations(folder: Path, job: str) -> int:
    path = folder / f"pipefill-{job}.out"
    return iterations_in(path.read_text().splitlines()) if path.exists() else 0


def jobs(folder: Path, run: str) -> dict[str, Job]:
    if not (folder / "runs" / run / "jobs.db").exists():
        return {}
    store = open_store(folder / "runs" / run)
    try:
        return {job.name: job for job in store.list()}
    finally:
        store.close()


def spin(name: str, steps: int) -> dict[str, object]:
    return {"name": name, "task": "tasks:Spin", "args": {"steps": steps}}


def write(folder: Path, *entries: dict[str, object]) -> str:
    flags = write_jobs(folder, *entries)
    return flags.partition(" --fill-report")[0]  # the run folder is the one of the SLURM job


def test_a_training_that_is_interrupted_three_times_is_as_one_that_was_not(slurm, tmp_path):
    reference = train(tmp_path / "reference", iterations=ITERATIONS, script=UPSTREAM, model=LONGER)
    folder = tmp_path / "work"
    folder.mkdir()
    flags = write(folder, spin("short", 3), spin("long", 10**9), {"name": "command", "command": ["sleep", "100000"]})
    save = f"--save {folder}/ckpt --load {folder}/ckpt --save-interval 1000"
    job = submit(slurm, folder, f"{flags} {save} {NOTICED} --fill-max-slowdown 0")
    run = f"pipefill-{job}"
    done: list[float] = []
    for time_around in range(3):
        already = iterations(folder, job)
        until(lambda: iterations(folder, job) > already + 15, 200)  # noqa: B023
        if time_around == 0:
            until(lambda: jobs(folder, run).get("short") and jobs(folder, run)["short"].state.finished, 100)
            until(lambda: jobs(folder, run)["long"].progress.steps, 100)
            shown = slurm.call(
                *("srun", "--overlap", "--jobid", job, "-N", "1", "-n", "1"),
                *(str(Path(sys.executable).with_name("pipefill")), "status", f"runs/{run}"),
                cwd=folder,
            )
            assert [line.split()[3] for line in shown.splitlines()[1:]] == ["RUNNING", "RUNNING"]
        slurm.call("scancel", "--signal=USR2", job)
        until(lambda: output(folder, job).count("it is queued again") > time_around, 100)  # noqa: B023
        kept = jobs(folder, run)
        assert {name: its.state for name, its in kept.items()} == {
            "short": JobState.SUCCEEDED,
            "long": JobState.QUEUED,
            "command": JobState.QUEUED,
        }
        done.append(kept["long"].progress.work_done)
    assert slurm.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED", output(folder, job)[-3000:]
    said = output(folder, job)
    assert said.count("2 submitted here before") + said.count("3 submitted here before") == 3
    assert Trained(said, folder).losses == reference.losses
    kept = jobs(folder, run)
    assert len(kept) == 3
    assert kept["short"].progress.work_done == 3
    assert done == sorted(done)
    assert kept["long"].progress.work_done >= done[-1] > 0
    assert json.loads((folder / "runs" / run / "report.json").read_text())["jobs"]


def test_the_time_limit_itself_gives_the_notice(slurm, tmp_path):
    """As SLURM does it, minutes before the limit and by its own clock; with something that counts for a training."""
    shutil.copy(Path(__file__).with_name("standin.py"), tmp_path / "pretrain_gpt.py")
    options = ("-c", "2", "--time=1", "--signal=USR2@30")
    job = slurm.submit(*options, SCRIPT, "900", cwd=tmp_path, PYTHON=sys.executable, PYTHONPATH=str(ROOT))
    assert slurm.wait_for(job, "COMPLETED", "FAILED", "TIMEOUT", seconds=600) == "COMPLETED", output(tmp_path, job)
    assert [(tmp_path / f"saved{rank}").read_text() for rank in range(2)] == ["900", "900"]
    assert output(tmp_path, job).count("SIGUSR2 ended the training before its last iteration; it is queued again") >= 1


def test_jobs_of_a_cancelled_training_are_saved_and_wait(slurm, tmp_path):
    flags = write(tmp_path, spin("long", 10**9), {"name": "command", "command": ["sleep", "100000"]})
    job = submit(slurm, tmp_path, flags, iterations=100_000)
    run = f"pipefill-{job}"
    until(lambda: len(jobs(tmp_path, run)) == 2, 200)
    until(lambda: all(its.progress.steps for its in jobs(tmp_path, run).values()), 100)
    slurm.call("scancel", job)
    slurm.wait_for(job, "CANCELLED")
    until(lambda: {its.state for its in jobs(tmp_path, run).values()} == {JobState.QUEUED}, 40)
    long = jobs(tmp_path, run)["long"]
    assert long.progress.checkpoint_s is not None
    assert "goes on from its checkpoint" in long.reason


def test_two_nodes_refuse_a_file_and_share_a_server(slurm, tmp_path):
    options = ("-N", "2", "-c", "1", "--export=ALL,RANKS=1")
    flags = write(tmp_path, spin("one", 50), spin("two", 50))
    job = submit(slurm, tmp_path, flags, *options)
    assert slurm.wait_for(job, "COMPLETED", "FAILED") == "FAILED"
    assert "2 nodes cannot share the job store" in output(tmp_path, job)
    assert "Traceback" not in output(tmp_path, job)
    try:
        postgres = PrivatePostgres().__enter__()
    except NoPostgres as error:
        pytest.skip(str(error))
    try:
        url = postgres.new_database()
        job = submit(slurm, tmp_path, f"{flags} --fill-store {url}", *options, iterations=300)
        assert slurm.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED", output(tmp_path, job)[-3000:]
        report = json.loads((tmp_path / "runs" / f"pipefill-{job}" / "report.json").read_text())
        assert {its["state"] for its in report["jobs"]} == {"SUCCEEDED"}
    finally:
        postgres.__exit__(None, None, None)
