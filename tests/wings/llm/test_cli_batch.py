"""``pipefill batch``, as a shell runs it."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from megatron.fill.cli import main
from megatron.fill.status import Status
from megatron.fill.store import Progress, open_store
from megatron.fill.types import JobState

LINES = [
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}},
    {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "n": 0}},
]
USAGE = {"prompt_tokens": 5, "completion_tokens": 30}
ANSWERS = (
    "".join(
        json.dumps({"response": {"status_code": code, "body": body}}) + "\n"
        for code, body in ((200, {"usage": USAGE}), (400, {"error": {}}))
    )
    + "what is no answer\n[1]\n"
)


@pytest.fixture
def pipefill(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PIPEFILL_STORE", "run")
    monkeypatch.setattr("megatron.fill.wings.llm.commands.batch._LOOK_S", 0.01)
    (tmp_path / "model").mkdir()
    (tmp_path / "small").mkdir()
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["pipefill", "batch", "in.jsonl", "--model", "model", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        written = capsys.readouterr()
        return int(ended.value.code or 0), written.out, written.err

    return run


def finish(folder, state=JobState.SUCCEEDED, reason=""):
    """What an agent does with the job."""
    with closing(open_store("run")) as store:
        (job,) = store.list()
        claim = store.claim("agent", [job.id], 60)
        assert claim is not None
        directory = folder / "run" / "jobs" / job.name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "answers.jsonl").write_text(ANSWERS)
        store.place(claim, str(directory))
        store.finish(claim, Status(state, detail=reason), Progress(2.0, 2.0, harvested_s=2.0), {})


def test_on_a_terminal_the_next_commands_follow(pipefill, tmp_path, monkeypatch):
    assert "Next:" not in pipefill()[1]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    *_, head, show, logs = pipefill()[1].splitlines()
    with closing(open_store(tmp_path / "run")) as store:
        (job,) = store.list()
    assert head == "Next:"
    assert show.startswith(f"  pipefill show {job.name}")
    assert logs.startswith(f"  pipefill logs {job.name}")


def test_it_submits_a_job_and_writes_the_output_once_it_is_there(pipefill, tmp_path):
    status, out, _ = pipefill("--draft", "small", "--tree", "1,2", "--memory", "1GiB")
    assert status == 0
    assert "2 requests, 1 of them wrong:\n  line 2: n is 0;" in out
    assert "with --watch waits for it" in " ".join(out.split())
    with closing(open_store("run")) as store:
        (job,) = store.list()
    assert job.work.task == "megatron.fill.wings.llm:BatchJob"
    assert job.work.args == {
        "model": str(tmp_path / "model"),
        "requests": str(tmp_path / "in.jsonl"),
        "draft": [str(tmp_path / "small")],
        "tree": [1, 2],
    }
    assert job.work.memory_bytes == 1 << 30
    finish(tmp_path)
    status, out, _ = pipefill("--draft", "small", "--tree", "1,2", "--memory", "1GiB", "--watch")
    assert status == 0
    assert (tmp_path / "in.answers.jsonl").read_text() == ANSWERS
    assert "The answers are in in.answers.jsonl: 2, 1 of them errors." in " ".join(out.split())
    assert "5 tokens of prompts, 30 of answers: 15.0 a second of bubble time." in " ".join(out.split())
    with closing(open_store("run")) as store:
        assert len(store.list()) == 1


@pytest.mark.parametrize("output", ["model", "in.jsonl/answers", "/proc/answers"])
@pytest.mark.parametrize("alone", [[], ["--alone"]])
def test_an_output_that_cannot_be_written_is_said_before_anything_begins(pipefill, tmp_path, output, alone):
    status, _, err = pipefill("--output", output, *alone)
    assert status == 2
    assert f"--output {output}: cannot be written" in err
    assert not (tmp_path / "run").exists()


def test_another_file_or_another_model_is_another_job(pipefill, tmp_path):
    pipefill()
    pipefill("--tree", "1")
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write(json.dumps(LINES[0] | {"custom_id": "c"}) + "\n")
    pipefill()
    with closing(open_store("run")) as store:
        assert len({job.name for job in store.list()}) == 3


def test_a_job_that_failed_is_said_and_queued_again(pipefill, tmp_path):
    pipefill("--name", "mine")
    finish(tmp_path, JobState.FAILED, "it broke")
    with closing(open_store("run")) as store:
        assert store.find("mine").state is JobState.FAILED
    status, out, _ = pipefill("--name", "mine")
    assert status == 0
    assert "mine is QUEUED" in out
    finish(tmp_path, JobState.FAILED, "it broke again")


def test_watching_tells_of_a_failure(pipefill, tmp_path, monkeypatch):
    pipefill("--name", "mine")
    looked = []

    def sleep(seconds):
        looked.append(seconds)
        if len(looked) == 2:
            finish(tmp_path, JobState.FAILED, "it broke")

    monkeypatch.setattr("time.sleep", sleep)
    status, _, err = pipefill("--name", "mine", "--watch", "--json")
    assert status == 1
    assert "mine is FAILED: it broke" in err


def test_an_interrupted_watch_leaves_the_job(pipefill, monkeypatch):
    def sleep(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron.fill.wings.llm.commands.batch.time.sleep", sleep)
    status, _, err = pipefill("--name", "mine", "--watch")
    assert status == 130
    assert "mine goes on" in err
    with closing(open_store("run")) as store:
        assert store.find("mine").state is JobState.QUEUED


def partly_answered(folder):
    """An agent has begun with the job; one answer is there, and one that is torn."""
    with closing(open_store("run")) as store:
        (job,) = store.list()
        claim = store.claim("agent", [job.id], 60)
        assert claim is not None
        directory = folder / "run" / "jobs" / job.name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "answers.jsonl").write_text(ANSWERS.splitlines(keepends=True)[0] + '{"resp')
        store.place(claim, str(directory))
        return claim


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED])
def test_the_answers_of_a_job_that_ends_in_the_middle_are_kept(pipefill, tmp_path, monkeypatch, state):
    pipefill("--name", "mine")
    claim = partly_answered(tmp_path)

    def sleep(seconds):
        with closing(open_store("run")) as store:
            store.finish(claim, Status(state, detail="it broke"), Progress(1.0, 2.0, harvested_s=2.0), {})

    monkeypatch.setattr("megatron.fill.wings.llm.commands.batch.time.sleep", sleep)
    status, out, err = pipefill("--name", "mine", "--watch")
    assert status == 1
    assert f"mine is {state}: it broke" in err
    assert "1 of 2 answers are in in.answers.jsonl.partial." in out
    assert (tmp_path / "in.answers.jsonl.partial").read_text() == ANSWERS.splitlines(keepends=True)[0]
    assert not (tmp_path / "in.answers.jsonl").exists()
    pipefill("--name", "mine")
    finish(tmp_path)
    status, out, _ = pipefill("--name", "mine")
    assert status == 0
    assert (tmp_path / "in.answers.jsonl").read_text() == ANSWERS
    assert not (tmp_path / "in.answers.jsonl.partial").exists()


def test_interrupted_while_it_runs_the_answers_that_are_there_are_kept(pipefill, tmp_path, monkeypatch):
    pipefill("--name", "mine")
    partly_answered(tmp_path)

    def sleep(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron.fill.wings.llm.commands.batch.time.sleep", sleep)
    status, out, err = pipefill("--name", "mine", "--watch")
    assert status == 130
    assert "mine goes on" in err
    assert "1 of 2 answers are in in.answers.jsonl.partial." in out
    status, out, _ = pipefill("--name", "mine", "--json", "--watch")
    found = json.loads(out)
    assert (status, found["output"], found["partial"]) == (130, None, "in.answers.jsonl.partial")
    assert (found["answered"], found["failed"]) == (1, 0)


def test_json_has_the_job_and_the_counts(pipefill):
    _, out, _ = pipefill("--json")
    found = json.loads(out)
    assert (found["state"], found["requests"], found["refused"], found["output"]) == ("QUEUED", 2, 1, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tree", "wide"], "--tree is 'wide': expected auto"),
        (["--tree", "1,0"], "--tree is '1,0'"),
        (["--draft", "none"], "none is not a folder"),
        (["--adapter", "none"], "none is not a folder: expected the folder of an adapter"),
        (["--memory", "lots"], "memory"),
        (["--output", "in.jsonl"], "in.jsonl is there already"),
    ],
)
def test_what_makes_no_sense_is_refused(pipefill, arguments, message):
    status, _, err = pipefill(*arguments)
    assert status == 2
    assert message in " ".join(err.split())
