"""Jobs looked at before they run: in a real process in a real sandbox, and from whatever such a process may answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.fill.errors import ConfigError
from megatron.fill.given.jobs import JobSpec, distinct
from megatron.fill.trial import check
from megatron.fill.trial.examine import Examined

MODULES = {
    "good": """
from megatron.fill import SideTask
class Plain(SideTask):
    def create(self, n=1): pass
class Resumes(Plain):
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
""",
    "raises": "import os\n\nos.environ['HF_TOKEN']\n",
    "needs": "import nothing_like_this\n",
    "leaves": "import os\nos._exit(0)\n",
    "dies": "import os\nos.kill(os.getpid(), 11)\n",
}


def job(name: str, task: str | None = None, **fields: Any) -> JobSpec:
    return JobSpec(name=name, task=task, **fields)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Examined]:
    """What is said of each job, all looked at together."""
    folder: Path = tmp_path_factory.mktemp("modules")
    folder.chmod(0o755)
    for name, source in MODULES.items():
        (folder / f"{name}.py").write_text(source)
    patched = pytest.MonkeyPatch()
    patched.setenv("HF_TOKEN", "secret")
    jobs = [
        job("plain", "good:Plain", args={"n": 2}),
        job("resumes", "good:Resumes"),
        job("args", "good:Plain", args={"m": 2}),
        job("raises", "raises:Task"),
        job("needs", "needs:Task"),
        job("same", "good:Plain", args={"n": 2}, priority=3),
        job("command", command="sh -c true"),
        job("leaves", "leaves:Task", env={"A": "1"}),
        job("dies", "dies:Task", env={"A": "2"}),
        job("after", "good:Plain", env={"A": "2"}),
    ]
    try:
        return dict(zip([one.name for one in jobs], check.examine(jobs, [str(folder)], {}), strict=True))
    finally:
        patched.undo()


def test_jobs_that_could_run(found):
    assert found["plain"] == found["same"] == found["command"] == Examined()
    assert found["resumes"] == Examined(resumable=True)


def test_arguments_that_do_not_fit_are_no_failure_of_its_code(found):
    assert "create() got an unexpected keyword argument 'm'; it takes n" in found["args"].error.replace(":", "")
    assert not found["args"].raised


def test_a_module_that_raises_does_so_without_our_secrets_and_shows_its_own_line(found):
    assert found["raises"].error == "importing raises failed: KeyError: 'HF_TOKEN'"
    assert found["raises"].raised
    assert found["raises"].trace.splitlines()[1].endswith('raises.py", line 3, in <module>')
    assert found["needs"].error == "importing needs failed: ModuleNotFoundError: No module named 'nothing_like_this'"
    assert found["needs"].raised


def test_a_module_that_ends_its_process_costs_those_of_its_environment_only(found):
    assert found["leaves"].error == "importing leaves ended the process with status 0"
    assert found["dies"].error == "importing dies was ended by SIGSEGV"
    assert found["after"].error == "not looked at, since looking at another job failed"


def read(*answers: object, jobs: int = 2) -> list[Examined]:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in answers]
    return check._read(lines, [job(f"job{at}", f"module{at}:Task") for at in range(jobs)])


def test_an_answer_that_never_came_took_too_long():
    answer = {"of": 0, "error": "", "raised": False, "trace": "", "nodes": True, "resumable": False}
    first, second = read({"begun": 0}, answer, {"begun": 1})
    assert first == Examined(nodes=True)
    assert second == Examined("importing module1 took more than 120 s", raised=True)
    assert read() == []


@pytest.mark.parametrize(
    "answer",
    [
        "{",
        "[1]",
        {"of": 0},
        {"of": [], "error": ""},
        {"of": 0, "error": 3, "raised": False, "trace": "", "nodes": False, "resumable": False},
        {"of": 0, "error": "", "raised": "", "trace": "", "nodes": False, "resumable": False},
        {"ended": "x"},
        {"begun": {}},
    ],
)
def test_what_a_module_writes_in_between_is_no_answer(answer):
    found = read({"begun": 0}, answer, {"ended": 3}, jobs=1)
    assert found in (
        [Examined("importing module0 ended the process with status 3", raised=True)],
        [Examined("importing module0 took more than 120 s", raised=True)],
    )


def test_a_checker_that_does_not_start_is_said(monkeypatch):
    monkeypatch.setattr(check, "program", lambda name: ["sh", "-c", "echo 'no sandbox' >&2; exit 1"])
    with pytest.raises(ConfigError, match="the jobs cannot be looked at: no sandbox"):
        check.examine([job("a", "m:C")], [], {})


def test_what_may_not_be_entered_is_told_to_who_finds_no_module(monkeypatch):
    note = "PipeFill: jobs run as nobody, who may not enter /root/x: a module there is not found"
    answer = json.dumps({"of": 0, "error": "gone", "raised": False, "trace": "", "nodes": False, "resumable": False})
    lines = "\n".join([note, "PipeFill: other", '{"begun": 0}', answer])
    monkeypatch.setattr(check, "program", lambda name: ["sh", "-c", f"cat >/dev/null; cat <<'END'\n{lines}\nEND"])
    [found] = check.examine([job("a", "m:C")], ["/root/x"], {})
    assert found.error == f"gone ({note.removeprefix('PipeFill: ')})"


def test_jobs_that_differ_in_queueing_only_are_of_one_kind():
    jobs = [job("a", "m:C"), job("b", "m:C", priority=2, user="ada"), job("c", "m:C", args={"x": 1})]
    assert [one.name for one in distinct(jobs)] == ["a", "c"]
