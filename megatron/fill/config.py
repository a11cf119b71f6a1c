"""The ``--fill-*`` settings, checked before training starts; errors name the flag."""

from __future__ import annotations

from argparse import Namespace
from typing import Annotated, Literal

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from megatron.fill.errors import ConfigError
from megatron.fill.given.jobs import JobSpec, load_jobs, matching
from megatron.fill.given.problems import expectation, shown
from megatron.fill.given.settings import MOST_AMOUNT, Above0, Amount, SiteSettings, load_settings, setting

_Folder = Annotated[str, matching(r".*\S.*", "a folder")]


class FillSettings(SiteSettings):
    """All settings of a run, in the units of the flags: the ``--fill-*`` flags, and those of ``--fill-settings``.

    ``--help`` is generated from the flags, in this order.  The value of the flag of ``jobs`` is the jobs file.
    """

    jobs: tuple[JobSpec, ...] = setting((), "jobs file (YAML): what to run in the bubbles", "FILE")
    store: Annotated[str, matching(r".*\S.*", "a database URL, a database file or a run folder")] | None = setting(
        None,
        "job store to take jobs from, and to put those of --fill-jobs into: an SQLite file, a run folder, or "
        "postgresql+psycopg://USER@HOST/DATABASE, which several nodes can share (default: $PIPEFILL_STORE, else "
        "jobs.db in the run folder)",
        "URL",
    )
    policy: str = setting(
        "priority",
        "which job is next: fifo, sjf, makespan, deadline, priority, fair, a weighted sum such as "
        "0.7*sjf+0.3*deadline, or module:function (default: %(default)s)",
        "POLICY",
    )
    report: _Folder | None = setting(
        None,
        "run folder: report.json, trace.json, timeline.png and the jobs' output (default: runs/pipefill-TIME, "
        "under SLURM runs/pipefill-JOB); unfinished jobs of an earlier run in the same folder go on",
        "DIR",
    )
    resubmit: bool = setting(
        False,
        "submit the jobs of --fill-jobs anew; without it, those that an earlier run in the same folder has "
        "submitted are not, whatever became of them",
    )
    between: Amount = setting(
        0.0,
        "after the training's end, of whatever kind, the jobs go on alone on its devices for at most this time, until "
        "a training starts in the same run folder; needs --fill-report (default: %(default)g: they end with it)",
        "S",
    )
    checkpoint_seconds: Above0 = setting(
        300.0, "how often resumable jobs are saved, so what a crash costs them at most (default: %(default)g)", "S"
    )
    profile_only: bool = setting(
        False, "run no jobs; write every rank's bubble cycle to bubbles.json in the run folder and print it"
    )
    pipeline_schedule: Literal["megatron", "gpipe"] = setting(
        "megatron", "gpipe: all forwards, then all backwards (default: Megatron's own choice, 1F1B or interleaved)"
    )
    rank_order: Annotated[str, matching(r".*\S.*", "a file")] | None = setting(
        None,
        'JSON, the same for every rank: {"order": [2, 0, 3, 1]} makes the process that the launcher calls rank 2 '
        "Megatron's rank 0, and so on (default: the launcher's ranks)",
        "FILE",
    )
    offload_optimizer: bool = setting(
        False, "keep the main job's optimizer state in host memory between optimizer steps, where that pays"
    )
    free_waits: bool = setting(
        False,
        "hold the pipeline's receives up in the GPU's front end until their data is there, so that a rank that waits "
        "leaves a time-sliced GPU to the jobs; between ranks of one node (what it costs is not measured yet)",
    )
    paired_blocks: int = setting(
        0,
        "N iterations with filling and N without, each first in turn, to measure the slowdown (0: off)",
        "N",
        ge=0,
        le=MOST_AMOUNT,
    )
    overrun: float = setting(
        0.5,
        "by how much steps that run on after their bubble may make the training slower, in expectation: larger "
        "values fill further into bubbles whose end is uncertain (default: %(default)g; 0: never)",
        "PERCENT",
        ge=0,
        le=100,
    )
    max_slowdown: Amount = setting(
        1.0,
        "stop filling for a while when it slows the training by more than this (default: %(default)g; 0: never stop)",
        "PERCENT",
    )
    memory_margin_mib: Amount = setting(
        1024.0, "device memory that the jobs leave free beyond the main job's peak (default: %(default)g)", "MIB"
    )
    sharing: Literal["auto", "mps", "timeslice"] = setting(
        "auto",
        "how main job and jobs share a GPU: mps is faster, but a job's illegal access can end the training "
        "(default: auto, the mode that contains faults: timeslice)",
    )
    sm_percentage: int = setting(
        100,
        "the share of a GPU's multiprocessors that a job may use at most (default: %(default)g)",
        "PERCENT",
        ge=1,
        le=100,
    )
    bind: tuple[str, ...] = setting(
        (),
        "places that jobs may use besides their own folders: they see most files anyway but can write none, and "
        "see nothing of /tmp and /run or of folders that are closed to their user; with :rw they may write there",
        "PATH[:rw]",
    )

    @classmethod
    def flags(cls) -> dict[str, FieldInfo]:
        """The fields that are flags of their own, by name."""
        return {name: field for name, field in cls.model_fields.items() if name not in SiteSettings.model_fields}

    @property
    def active(self) -> bool:
        """True if a flag asks for more than a schedule."""
        return self.serves or self.profile_only or self.report is not None

    @property
    def serves(self) -> bool:
        """True if there may be jobs, from a jobs file or through a store."""
        return bool(self.jobs) or self.store is not None

    @classmethod
    def from_args(cls, args: Namespace) -> FillSettings:
        """Return the settings from the flags that Megatron's parser has parsed; ConfigError for a wrong value."""
        values = {name: getattr(args, f"fill_{name}") for name in cls.flags()}
        path = values.pop("jobs")
        for other, given in (("jobs", path), ("store", values["store"])):
            if values["profile_only"] and given is not None:
                but = f"expected no --fill-{other} with it"
                raise ConfigError(f"--fill-profile-only measures the bubbles without jobs; {but}")
        if path == "":
            raise ConfigError("--fill-jobs is '': expected a jobs file")
        values |= load_settings(args.fill_settings or (), tuple(cls.flags()))
        if values["between"] and values["report"] is None:
            raise ConfigError(
                "--fill-between: a training that starts again ends these jobs, and finds them by its run folder; "
                "expected --fill-report DIR with it"
            )
        try:
            its = cls(jobs=tuple(load_jobs(path)) if path is not None else (), **values)
        except ValidationError as error:
            problem = error.errors()[0]
            flag = "--fill-" + str(problem["loc"][0]).replace("_", "-")
            raise ConfigError(f"{flag} is {shown(problem['input'])}: {expectation(problem)}") from error
        if its.between and not its.serves:
            raise ConfigError("--fill-between: no job can go on; expected --fill-jobs or --fill-store with it")
        return its
