"""``pipefill evaluate``: what a training's bubbles have left is evaluated, and added to the job's own results."""

from __future__ import annotations

import json
import os
from contextlib import closing

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from megatron.fill.agent.folder import job_folder, occupied  # noqa: E402
from megatron.fill.cli import main  # noqa: E402
from megatron.fill.errors import TaskError  # noqa: E402
from megatron.fill.folders import output_file  # noqa: E402
from megatron.fill.status import Cause, JobState, Status  # noqa: E402
from megatron.fill.store import Progress, open_store  # noqa: E402
from megatron.fill.wings.llm.evaluations import publish, read_evaluations, write_evaluations  # noqa: E402
from megatron.fill.work import NewJob, Work  # noqa: E402
from tests.wings.llm.test_llm_evaluate import checkpoint, data, run, task  # noqa: E402, F401

TASK = "megatron.fill.wings.llm:EvaluateCheckpoints"


@pytest.fixture
def pipefill(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIPEFILL_STORE", str(tmp_path / "run"))
    monkeypatch.setattr("megatron.fill.wings.llm.evaluate._LOOK_S", 0.0)

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["pipefill", "evaluate", *arguments, "--device", "cpu"])
        with pytest.raises(SystemExit) as ended:
            main()
        written = capsys.readouterr()
        return int(ended.value.code or 0), written.out, " ".join(written.err.split())

    return call


@pytest.fixture
def store(tmp_path):
    with closing(open_store(tmp_path / "run", create=True)) as opened:
        yield opened


def submit(store, saved, what=TASK, **args):
    return store.submit([NewJob("evaluate", Work(what, args={"checkpoints": str(saved), **args}))])[0]


def trained(tmp_path, store, monkeypatch, work):
    """What a training does with the job: an agent takes it, a worker evaluates some, and it is QUEUED in the end."""
    job = store.find("evaluate")
    claim = store.claim("agent", [job.id], 60)
    folder = job_folder(tmp_path / "run", claim.job, None)
    assert folder is not None
    store.place(claim, str(folder))
    with occupied(folder):
        made = task(folder, job.work.args["checkpoints"])
        made.init()
        run(made, work, monkeypatch)
    ended = Status(JobState.QUEUED, Cause.TRAINING_ENDED)
    store.release(claim, ended, Progress(float(work)), made.context.result)
    return folder, made.state_dict()


def test_what_is_left_is_added_to_the_jobs_results(data, tmp_path, pipefill, store, monkeypatch):  # noqa: F811
    saved = tmp_path / "saved"
    checkpoint(saved, 5, data[0], seed=5)
    submit(store, saved)
    folder, state = trained(tmp_path, store, monkeypatch, 1)
    events = len(list((folder / "tensorboard").iterdir()))
    (first,) = read_evaluations(folder).values()
    for iteration in (10, 12):
        checkpoint(saved, iteration, data[0], seed=iteration)
    checkpoint(saved, 14, data[0])
    (saved / "iter_0000014" / ".metadata").unlink()  # it is being written
    status, out, _ = pipefill("evaluate")
    assert status == 0
    found = read_evaluations(folder)
    assert list(found) == [5, 10, 12]
    assert found[5] == first
    assert f"iteration 12: loss {found[12]['loss']:.6f}\n" in out
    assert f"3 checkpoints in {folder / 'evaluations.jsonl'}" in out
    assert len(list((folder / "tensorboard").iterdir())) == events + 2
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert "iteration 12: loss" in output_file(folder).read_text()
    job = store.find("evaluate")
    assert (job.state, job.progress.work_done) == (JobState.QUEUED, 1.0)
    assert job.result == {"iteration": 12, "loss": found[12]["loss"], "evaluated": 3, "behind": 0}
    assert "pipefill evaluate did 2 checkpoints" in job.reason
    # The job in a training gives the same, and does not do them again when it goes on.
    other = task(tmp_path / "other", saved)
    other.init()
    run(other, 3, monkeypatch)
    assert read_evaluations(tmp_path / "other") == found
    again = task(folder, saved)
    again.load_state_dict(json.loads(json.dumps(state)))
    assert not again.left()
    status, out, _ = pipefill("evaluate", "--json")
    assert (status, json.loads(out)["evaluated"]) == (0, [])


def test_a_job_that_was_never_begun_gets_its_folder(data, tmp_path, pipefill, store):  # noqa: F811
    checkpoint(tmp_path / "saved", 5, data[0])
    job = submit(store, tmp_path / "saved", prompts=["ab"], new_tokens=3)
    status, out, _ = pipefill("evaluate", "--json")
    said = json.loads(out)
    assert (status, said["job"], said["evaluations"]) == (
        0,
        "evaluate",
        str(tmp_path / "run" / "jobs" / f"evaluate-{job.id}" / "evaluations.jsonl"),
    )
    assert [line["iteration"] for line in said["evaluated"]] == [5]
    assert said["evaluated"][0]["samples"][0]["prompt"] == "ab"
    assert store.get(job.id).directory == os.path.dirname(said["evaluations"])


def test_interrupted_or_refused_what_was_evaluated_is_kept(data, tmp_path, pipefill, store, monkeypatch):  # noqa: F811
    saved = tmp_path / "saved"
    checkpoint(saved, 5, data[0])
    submit(store, saved)
    checkpoint(saved, 10, data[0], num_experts=8)
    status, out, err = pipefill("evaluate")
    assert status == 1
    assert "iteration 10: " in err
    assert "--num-experts 8" in err
    assert "iteration 5: loss" in out
    job = store.find("evaluate")
    assert (job.state, job.result["evaluated"], job.result["behind"]) == (JobState.QUEUED, 1, 1)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron.fill.wings.llm.evaluate.EvaluateCheckpoints.run_next_step", interrupted)
    status, out, _ = pipefill("evaluate")
    assert status == 130
    after = store.find("evaluate")
    assert (after.state, after.result, after.reason) == (JobState.QUEUED, job.result, job.reason)


@pytest.mark.parametrize(("asked", "said"), [("cancel", "was cancelled"), ("take", "was taken by a training")])
def test_it_gives_way(data, tmp_path, pipefill, store, monkeypatch, asked, said):  # noqa: F811
    checkpoint(tmp_path / "saved", 5, data[0])
    job = submit(store, tmp_path / "saved")
    monkeypatch.setattr("megatron.fill.wings.llm.commands.evaluate._BEAT_S", 0.0)

    def disturbed(self):
        if asked == "cancel":
            store.cancel(job.id)
        else:
            store.disown(store.get(job.id).owner)
        return 0.0

    monkeypatch.setattr("megatron.fill.wings.llm.evaluate.EvaluateCheckpoints.run_next_step", disturbed)
    status, _, err = pipefill("evaluate")
    assert (status, said in err) == (1, True)
    assert store.get(job.id).state is (JobState.CANCELLED if asked == "cancel" else JobState.QUEUED)


def test_what_makes_no_sense_is_refused(tmp_path, pipefill, store):
    job = submit(store, tmp_path / "saved")
    assert f"is {tmp_path / 'saved'}: expected a folder" in pipefill("evaluate")[2]
    (tmp_path / "saved").mkdir()
    claim = store.claim("agent", [job.id], 60, "rank 1 of run")
    status, _, err = pipefill("evaluate")
    assert (status, "is RUNNING (rank 1 of run)" in err) == (2, True)
    store.finish(claim, Status(JobState.FAILED, detail="why"), Progress(), {})
    assert "is FAILED: expected pipefill retry evaluate before" in pipefill("evaluate")[2]
    store.submit([NewJob("other", Work("a:B"))])
    assert f"is a:B: expected a job of {TASK}" in pipefill("other")[2]


def test_nobody_else_may_be_in_the_folder(data, tmp_path, pipefill, store, monkeypatch):  # noqa: F811
    checkpoint(tmp_path / "saved", 5, data[0])
    submit(store, tmp_path / "saved")
    folder, _ = trained(tmp_path, store, monkeypatch, 1)
    with occupied(folder):
        assert "another worker is still in" in pipefill("evaluate")[2]
    assert store.find("evaluate").state is JobState.QUEUED


@pytest.mark.parametrize("link", ["evaluations.jsonl", "tensorboard", ".evaluations.jsonl.part"])
def test_a_link_that_the_job_has_left_is_not_followed(tmp_path, link):
    private, folder, outside = tmp_path / "private", tmp_path / "job", tmp_path / "outside"
    for path in (private / "tensorboard", folder, outside):
        path.mkdir(parents=True)
    (private / "tensorboard" / "events.1").write_text("new")
    write_evaluations(private, [{"iteration": 5, "loss": 1.0}])
    victim = outside / "file"
    victim.write_text('{"iteration": 1}\n')
    (folder / link).symlink_to(outside if link == "tensorboard" else victim)
    if link == "tensorboard":
        with pytest.raises(OSError, match=r"tensorboard|Not a directory|Too many levels"):
            publish(private, folder)
    else:
        if link == "evaluations.jsonl":
            with pytest.raises(TaskError, match=r"evaluations\.jsonl cannot be read"):
                read_evaluations(folder)
        publish(private, folder)
        assert list(read_evaluations(folder)) == [5]
    assert victim.read_text() == '{"iteration": 1}\n'
    assert [path.name for path in outside.iterdir()] == ["file"]


@pytest.mark.parametrize("text", ["no", "[1]", '{"loss": 1.0}', '{"iteration": NaN}', '{"iteration": true}'])
def test_a_file_that_is_something_else_is_refused(tmp_path, text):
    (tmp_path / "evaluations.jsonl").write_text(f'{{"iteration": 1}}\n{text}\n')
    with pytest.raises(TaskError, match=r"evaluations\.jsonl"):
        read_evaluations(tmp_path)
    assert read_evaluations(tmp_path / "none") == {}
