"""What the composition root refuses before a training starts."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from megatron.fill.agent import sandbox
from megatron.fill.app import sandboxing
from megatron.fill.app.expected import warn_of_few_bubbles, warn_of_no_ramp
from megatron.fill.app.launch import Launch, _counted
from megatron.fill.app.runfolder import check_store, new_run_folder, say_if_away, served, store_of
from megatron.fill.app.session import Session
from megatron.fill.attached import attached
from megatron.fill.config import FillSettings
from megatron.fill.device import meter
from megatron.fill.device.mps import MpsDaemon
from megatron.fill.device.port import DeviceError
from megatron.fill.display import never_fail_to_print
from megatron.fill.errors import ConfigError, StoreError
from megatron.fill.pages.gate import SharedGate
from megatron.fill.records.rank import rank_file
from megatron.fill.sandbox.probe import Layer, SandboxSupport
from megatron.fill.types import RankInfo
from tests.support.flags import flags


def test_a_notice_during_pythons_end_does_not_end_a_training_that_is_over():
    """Megatron's handler is installed until then, and it is over before what is left of modules is deleted."""
    code = (
        "import os, signal, sys\nfrom megatron.fill.app.launch import launch\n"
        "class Last:\n"
        "    def __del__(self, kill=os.kill, write=os.write, of=(os.getpid(), signal.SIGUSR2)):\n"
        "        write(1, b'sent'); kill(*of)\n"
        "sys.last = Last()\n"
        "launch(lambda: signal.signal(signal.SIGUSR2, lambda *_: None), ())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "sent")


@pytest.mark.parametrize("variable", ["GROUP_WORLD_SIZE", "SLURM_NNODES"])
def test_several_nodes_cannot_share_a_file(monkeypatch, variable):
    file = FillSettings(store="runs/first")
    check_store(file, None)
    monkeypatch.setenv(variable, "2")
    with pytest.raises(
        ConfigError, match="2 nodes cannot share the job store runs/first; expected --fill-store postgres"
    ):
        check_store(file, None)
    check_store(FillSettings(store="postgresql+psycopg://ada@db/pipefill"), None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"store": "mysql://ada:secret@db/x"}, r"mysql://ada:\*\*\*@db/x"),
        ({"store": "bad\udcff/jobs.db"}, "is not UTF-8"),
        ({"policy": "fastest"}, "policy 'fastest'"),
        ({"policy": "0*fifo"}, "expected a number above 0"),
        ({"offload_optimizer": True}, "expected --bf16 or --fp16"),
        ({"store": "jobs.db", "profile_only": True}, "expected no --fill-store with it"),
        ({"lease_seconds": 0.0}, "lease_seconds is 0.0"),
        ({"max_slowdown": -1.0}, "--fill-max-slowdown is -1.0"),
        ({"sm_percentage": 101}, "--fill-sm-percentage is 101"),
        ({"max_processes": 1}, "max_processes is 1"),
        (
            {"store": "jobs.db", "user": "no-such-user"},
            "the setting user is 'no-such-user': there is no such user",
        ),
        ({"store": "jobs.db", "bind": ("data",)}, "--fill-bind data: expected an absolute path"),
        ({"checkpoint_seconds": 0.0}, "--fill-checkpoint-seconds is 0.0"),
    ],
)
def test_wrong_flags_are_refused(changed, message):
    with pytest.raises((ConfigError, StoreError), match=message):
        Launch().on_parse(flags(**changed))


def test_a_checkout_that_is_not_installed_is_refused_where_jobs_would_run(monkeypatch):
    def not_installed(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(meter, "version", not_installed)
    with pytest.raises(DeviceError, match=r"PipeFill is not installed for .*; expected an install of this checkout"):
        Launch().on_parse(flags(store="jobs.db"))
    Launch().on_parse(flags(profile_only=True))  # no agent, so nothing needs it


DAEMON = MpsDaemon(Path("/nowhere"), Path("/nowhere"), ours=False, program="")


def test_bubbles_are_not_filled_where_shared_memory_needs_barriers(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    for asked in ({"store": "jobs.db"}, {"profile_only": True}):
        with pytest.raises(ConfigError, match=r"this processor is aarch64, .* expected x86_64"):
            Launch().on_parse(flags(**asked))
    Launch().on_parse(flags())


def lacking(*names: str) -> SandboxSupport:
    return SandboxSupport(
        ("pid",), tuple(Layer(name, "keeps", "not here" if name in names else "") for name in ("files", "ipc"))
    )


def test_a_wall_that_is_missing_is_said_or_with_strict_refused(monkeypatch, capsys):
    monkeypatch.setattr(sandbox, "look", lambda *asked: lacking("ipc"))
    found = sandboxing.find_sandbox(FillSettings(store="x"), mps=DAEMON)
    assert "jobs are kept in less well here (pipefill doctor says more): ipc: not here" in capsys.readouterr().out
    assert (found.namespaces, found.user) == (("pid",), None)
    with pytest.raises(ConfigError, match=r"strict is set: this machine cannot keep jobs in .*: ipc: not here"):
        sandboxing.find_sandbox(FillSettings(store="x", strict=True), mps=DAEMON)
    monkeypatch.setattr(sandbox, "look", lambda *asked: lacking())
    sandboxing.find_sandbox(FillSettings(store="x", strict=True), mps=DAEMON)
    assert capsys.readouterr().out == ""


def test_a_script_that_parses_its_flags_twice_says_once_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(sandbox, "look", lambda *asked: lacking("ipc"))
    monkeypatch.setattr("megatron.fill.app.launch.share", lambda *asked: DAEMON)
    monkeypatch.setattr(sandboxing, "why_no_cuda_for_jobs", lambda *asked: "")
    launch = Launch()
    for _ in range(2):
        launch.on_parse(flags(store="jobs.db"))
    assert capsys.readouterr().out.count("kept in less well") == 1


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_rank_of_a_node_with_gpus_tries_whether_jobs_can_use_them(monkeypatch, capsys, rank):
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(sandbox, "look", lambda *asked: lacking())
    monkeypatch.setattr(sandboxing, "why_no_cuda_for_jobs", lambda user, namespaces, network, pipe: f"304 {pipe}")
    sandboxing.find_sandbox(FillSettings(store="x"), None)
    assert "no job can use a GPU" not in capsys.readouterr().out
    sandboxing.find_sandbox(FillSettings(store="x"), DAEMON, on_gpu=True)
    assert ("no job can use a GPU: 304 /nowhere" in capsys.readouterr().out) == (rank == "0")
    if rank == "0":
        with pytest.raises(ConfigError, match=r"strict is set: on .* no job can use a GPU: 304 None"):
            sandboxing.find_sandbox(FillSettings(store="x", strict=True), None, on_gpu=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's jobs run as another user")
def test_a_folder_of_modules_that_jobs_may_not_enter_is_said(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sandbox, "look", lambda *asked: SandboxSupport(("pid", "mount"), ()))
    tmp_path.chmod(0o700)
    sandboxing.find_sandbox(FillSettings(store="x"), mps=None, modules=[str(tmp_path), "/"])
    assert capsys.readouterr().out == (
        f"PipeFill: jobs run as nobody, who may not enter {tmp_path}: a module there is not found (chmod o+rx helps)\n"
    )


def test_the_store_is_the_flag_the_environment_or_the_run_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("PIPEFILL_STORE", raising=False)
    settings = FillSettings()
    assert store_of(settings, tmp_path) == str(tmp_path)
    monkeypatch.setenv("PIPEFILL_STORE", "shared.db")
    assert store_of(settings, tmp_path) == "shared.db"
    settings = FillSettings(store="flag.db")
    assert store_of(settings, tmp_path) == "flag.db"


def run_folder(path: Path) -> Path:
    for part in ("records", "agents", "jobs"):
        (path / part).mkdir(parents=True)
    return path


@pytest.fixture
def first_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run ``runs/first`` and a jobs file in the working folder, on a machine that is not looked at."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys.modules["megatron.fill.app.launch"], "share", lambda settings, on_cpu: None
    )  # which looks for GPUs
    monkeypatch.setattr(sandbox, "look", lambda *asked: SandboxSupport(("pid", "mount"), ()))
    run_folder(tmp_path / "runs" / "first")
    (tmp_path / "jobs.yaml").write_text("jobs: [{name: pi, command: pi}]")


@pytest.mark.usefixtures("first_run")
@pytest.mark.parametrize(
    "where", ["runs/first", "runs/first/jobs.db", "sqlite:///runs/first/jobs.db", "./runs/../runs/first"]
)
def test_a_forgotten_variable_does_not_make_a_training_serve_another_run(monkeypatch, where):
    monkeypatch.setenv("PIPEFILL_STORE", where)
    message = r"PIPEFILL_STORE is '.*', the store of another run than this one, .* expected --fill-store .* on purpose"
    for report in (None, "runs/second"):
        with pytest.raises(ConfigError, match=message):
            Launch().on_parse(flags(jobs="jobs.yaml", report=report))
    Launch().on_parse(flags(jobs="jobs.yaml", report="runs/first"))  # the same run goes on
    Launch().on_parse(flags(jobs="jobs.yaml", report="runs/second", store=where))  # on purpose


@pytest.mark.usefixtures("first_run")
def test_a_variable_that_is_no_oversight_is_served(monkeypatch, tmp_path):
    monkeypatch.setenv("PIPEFILL_STORE", str(tmp_path / "runs" / "first"))  # nobody writes this by accident
    Launch().on_parse(flags(jobs="jobs.yaml"))
    (tmp_path / "shared").mkdir()  # of no run
    for shared in ("shared", "shared.db", "postgresql+psycopg://ada@db/pipefill"):
        monkeypatch.setenv("PIPEFILL_STORE", shared)
        Launch().on_parse(flags(jobs="jobs.yaml"))


def test_the_store_that_is_served_is_said_with_its_origin(monkeypatch, tmp_path):
    monkeypatch.delenv("PIPEFILL_STORE", raising=False)
    settings = FillSettings()
    assert served(settings, tmp_path) == f"PipeFill: serves the job store {tmp_path} (the run folder's own)"
    monkeypatch.setenv("PIPEFILL_STORE", "postgresql+psycopg://ada:secret@db/x")
    assert served(settings, tmp_path) == (
        "PipeFill: serves the job store postgresql+psycopg://ada:***@db/x ($PIPEFILL_STORE)"
    )
    settings = FillSettings(store="flag.db")
    assert served(settings, tmp_path) == "PipeFill: serves the job store flag.db (--fill-store)"


@pytest.mark.parametrize("closed", ["jobs.db", ".", "other.db"])
def test_a_store_that_this_user_may_not_write_is_said(monkeypatch, tmp_path, closed):
    store = tmp_path / "jobs.db"
    if closed == "jobs.db":
        store.touch()
    may = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: may(path, mode) and (path, mode) != (tmp_path / closed, os.W_OK)
    )
    said = served(FillSettings(store=str(store)), tmp_path)
    assert said.endswith(f"NO JOB CAN BE HAD FROM IT: this user may not write {store} and its folder") is (
        closed != "other.db"
    )


def test_a_store_that_cannot_be_reached_is_said_without_its_password(capsys):
    pytest.importorskip("psycopg", reason="needs the extra postgres")
    say_if_away("postgresql+psycopg://ada:secret@127.0.0.1:1/x")
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("PipeFill: that job store cannot be used now, and no job runs until it can: ")
    assert "refused" in line
    assert "secret" not in line


@pytest.mark.parametrize(
    ("stages", "microbatches", "virtual", "said"),
    [
        (1, 8, None, "one pipeline stage and so no bubble: .* expected --pipeline-model-parallel-size 2 or more"),
        (2, 64, None, "with 2 stages and 64 passes through each, about 1.5% of the time are bubbles"),
        (4, 64, 4, "about 1.2% .* fewer micro-batches or virtual stages, make more"),
        (4, 8, None, ""),
    ],
)
def test_a_training_with_few_bubbles_is_told_so_at_its_start(caplog, stages, microbatches, virtual, said):
    args = Namespace(
        global_batch_size=4 * microbatches,
        micro_batch_size=2,
        data_parallel_size=2,
        virtual_pipeline_model_parallel_size=virtual,
    )
    warn_of_few_bubbles(RankInfo(0, 2 * stages, 0, 2 * stages, 0, 1, 0, stages), args)
    assert bool(caplog.text) == bool(said)
    assert re.search(said, caplog.text)


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"SLURM_JOB_ID": "71"}, "runs/pipefill-71"),
        ({"SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0"}, "runs/pipefill-71"),
        ({"SLURM_JOB_ID": "71", "SLURM_STEP_ID": "2"}, "runs/pipefill-71.2"),
    ],
)
def test_a_slurm_job_comes_back_to_its_run_folder(monkeypatch, variables, name):
    for variable in ("SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(variable, raising=False)
    assert new_run_folder().endswith(f"-{os.getpid()}")
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert new_run_folder() == name


def test_jobs_that_are_not_submitted_again_are_counted():
    assert _counted(3, 3) == "3 jobs"
    assert _counted(1, 1) == "1 job"
    assert _counted(3, 1) == "3 jobs (2 submitted here before: --fill-resubmit runs them anew)"


def test_a_session_whose_folder_cannot_be_written_any_more_waits_for_its_agent(monkeypatch, tmp_path):
    ended = []

    class Serving(Session):
        def _start_warden(self, *args: object) -> Any:
            return SimpleNamespace(send_signal=lambda number: None, wait=lambda seconds: ended.append("the warden"))

        def _listen(self) -> Any:
            return None

    (tmp_path / "agents").mkdir()
    info = RankInfo(0, 2, 0, 2, 0, 1, 0, 2)
    session = Serving(FillSettings(store="x"), info, tmp_path, tmp_path, "x", [], None, sandboxing.RunSandbox())

    def read_only(path: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", read_only)
    session.close()
    assert ended == ["the warden"]


def test_a_session_whose_listening_fails_leaves_no_agent_behind(tmp_path, monkeypatch):
    ended: list[bool] = []

    class Failing(Session):
        def _start_warden(self, gate: SharedGate, *_: object) -> Any:
            return SimpleNamespace(send_signal=lambda number: None, wait=lambda seconds: ended.append(gate.ended))

        def _listen(self) -> NoReturn:
            raise DeviceError("the driver refuses")

    (tmp_path / "agents").mkdir()
    info = RankInfo(0, 2, 0, 2, 0, 1, 0, 2, device="cuda:0")
    with pytest.raises(DeviceError, match="the driver refuses"):
        Failing(FillSettings(store="x"), info, tmp_path, tmp_path, "x", [], None, sandboxing.RunSandbox())
    assert ended == [True]


def test_a_session_whose_agent_cannot_be_started_measures_and_is_not_announced(tmp_path, caplog):
    info = RankInfo(0, 2, 0, 2, 0, 1, 0, 2)  # and there is no folder for its agent's files
    session = Session(FillSettings(store="x"), info, tmp_path, tmp_path, "x", [], None, sandboxing.RunSandbox())
    assert attached.figures is None
    assert not list(tmp_path.rglob("rank0.json"))
    session.finish()
    session.close()
    assert "rank 0 fills nothing: its agent cannot be started" in caplog.text
    assert session.unwritten.lost is False
    assert rank_file(tmp_path, 0).exists()


@pytest.mark.parametrize(
    ("ramp", "begins", "said"),
    [
        (["2", "2", "64"], 8, ["--rampup-batch-size 2 2 64 is ignored by this Megatron: the batch size begins with 8"]),
        (["2", "2", "64"], 2, []),
    ],
)
def test_a_ramp_that_megatron_ignores_is_said(caplog, ramp, begins, said):
    warn_of_no_ramp(ramp, begins)
    assert [message.partition(", not")[0] for message in caplog.messages] == said


def test_a_store_that_is_no_database_is_said_at_the_start(tmp_path):
    for name, text in (("notes.db", b"jobs: []"), ("empty.db", b""), ("jobs.db", b"SQLite format 3\0 and more")):
        (tmp_path / name).write_bytes(text)
        said = served(FillSettings(store=str(tmp_path / name)), tmp_path)
        assert said.endswith(f"NO JOB CAN BE HAD FROM IT: {tmp_path / name} is no SQLite database") is (name[0] == "n")


def test_what_no_run_folder_can_do_keeps_no_other_rank_waiting(tmp_path, monkeypatch, caplog):
    def fault(*_: object) -> NoReturn:
        raise UnicodeEncodeError("ascii", "é", 0, 1, "ordinal not in range(128)")

    monkeypatch.setattr("megatron.fill.app.launch.make_run_folder", fault)
    info = RankInfo(0, 1, 0, 1, 0, 1, 0, 1)
    assert Launch()._prepare_run(FillSettings(profile_only=True), info, tmp_path) is None
    assert "cannot be used, so nothing is filled: 'ascii' codec" in caplog.text


def test_letters_that_the_output_does_not_have_are_escaped(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, "latin-1"))
    never_fail_to_print()
    print("é 日", flush=True)
    assert raw.getvalue() == b"\xe9 \\u65e5\n"
