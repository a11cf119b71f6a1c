"""The ``--fill-*`` settings, checked before training starts; errors name the flag."""

from __future__ import annotations

from argparse import Namespace
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from megatron.fill.errors import ConfigError
from megatron.fill.given.jobs import JobSpec, load_jobs, matching
from megatron.fill.given.problems import expectation, shown
from megatron.fill.given.quantities import parse_prices
from megatron.fill.types import Prices

_MOST_AMOUNT = 10**9  # largest value of a flag, in its unit: more is a slip

_Amount = Annotated[float, Field(ge=0, le=_MOST_AMOUNT, allow_inf_nan=False)]
_Above0 = Annotated[float, Field(gt=0, le=_MOST_AMOUNT, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, le=_MOST_AMOUNT)]
_Folder = Annotated[str, matching(r".*\S.*", "a folder")]


def _flag(default: Any, text: str, metavar: str | None = None, **limits: Any) -> Any:
    """Return a flag's field.

    Args:
        text: help text for argparse; ``%(default)g`` is the default.
        metavar: name of its value in the help; None for a switch or a choice.
    """
    return Field(default, description=text, json_schema_extra={"metavar": metavar}, **limits)


class FillSettings(BaseModel):
    """The ``--fill-*`` flags of a run, in the units of the flags; ``--help`` is generated from them, in this order.

    The value of the flag of ``jobs`` is the jobs file.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    jobs: tuple[JobSpec, ...] = _flag((), "jobs file (YAML): what to run in the bubbles", "FILE")
    store: Annotated[str, matching(r".*\S.*", "a database URL, a database file or a run folder")] | None = _flag(
        None,
        "job store to take jobs from, and to put those of --fill-jobs into: an SQLite file, a run folder, or "
        "postgresql+psycopg://USER@HOST/DATABASE, which several nodes can share (default: $PIPEFILL_STORE, else "
        "jobs.db in the run folder)",
        "URL",
    )
    policy: str = _flag(
        "priority",
        "which job is next: fifo, sjf, makespan, deadline, priority, fair, a weighted sum such as "
        "0.7*sjf+0.3*deadline, or module:function (default: %(default)s)",
        "POLICY",
    )
    checkpoint_seconds: _Above0 = _flag(
        300.0, "how often resumable jobs are saved, so what a crash costs them at most (default: %(default)g)", "S"
    )
    lease_seconds: float = _flag(
        30.0,
        "how long the store keeps a job for an agent that is silent (default: %(default)g)",
        "S",
        ge=1,
        le=_MOST_AMOUNT,
        allow_inf_nan=False,
    )
    offload_optimizer: bool = _flag(
        False, "keep the main job's optimizer state in host memory between optimizer steps, where that pays"
    )
    free_waits: bool = _flag(
        False,
        "hold the pipeline's receives up in the GPU's front end until their data is there, so that a rank that waits "
        "leaves a time-sliced GPU to the jobs; between ranks of one node (no GPU has shown yet what it costs)",
    )
    report: _Folder | None = _flag(
        None,
        "run folder: report.json, trace.json, timeline.png and the jobs' output (default: runs/pipefill-TIME, "
        "under SLURM runs/pipefill-JOB); unfinished jobs of an earlier run in the same folder go on",
        "DIR",
    )
    resubmit: bool = _flag(
        False,
        "submit the jobs of --fill-jobs anew; without it, those that an earlier run in the same folder has "
        "submitted are not, whatever became of them",
    )
    profile_only: bool = _flag(
        False, "run no jobs; write every rank's bubble cycle to bubbles.json in the run folder and print it"
    )
    pipeline_schedule: Literal["megatron", "gpipe"] = _flag(
        "megatron", "gpipe: all forwards, then all backwards (default: Megatron's own choice, 1F1B or interleaved)"
    )
    rank_order: Annotated[str, matching(r".*\S.*", "a file")] | None = _flag(
        None,
        'JSON, the same for every rank: {"order": [2, 0, 3, 1]} makes the process that the launcher calls rank 2 '
        "Megatron's rank 0, and so on (default: the launcher's ranks)",
        "FILE",
    )
    paired_blocks: int = _flag(
        0,
        "N iterations with filling and N without, each first in turn, to measure the slowdown (0: off)",
        "N",
        ge=0,
        le=_MOST_AMOUNT,
    )
    warmup_iterations: _Count = _flag(
        5, "how often a bubble is observed before it is predicted and filled (default: %(default)g)", "N"
    )
    guard_us: _Amount | None = _flag(
        None,
        "keep the last microseconds of every predicted bubble free (default: 2000 on a time-sliced GPU, else 0)",
        "US",
    )
    overrun: float = _flag(
        0.5,
        "by how much steps that run on after their bubble may make the training slower, in expectation: larger "
        "values fill further into bubbles whose end is uncertain (default: %(default)g; 0: never)",
        "PERCENT",
        ge=0,
        le=100,
    )
    emulate: Literal["completion", "slices", "free-slices"] | None = _flag(
        None,
        "on the CPU, for benchmarks: a side task's step cannot be interrupted, as what runs on a GPU cannot; it "
        "runs to completion, or takes turns of 2 ms with the training, in bubbles too or (free-slices) after them only "
        "(it takes the right to real-time priorities)",
    )
    min_bubble_us: _Amount | None = _flag(
        None,
        "leave bubbles alone that are predicted to be shorter (default: 5000 on a time-sliced GPU, else 1000)",
        "US",
    )
    grace_ms: _Above0 = _flag(
        500.0, "how long a step may run on after its bubble before its process is paused (default: %(default)g)", "MS"
    )
    max_overruns: _Count = _flag(
        3,
        "how many steps may run on for longer than --fill-grace-ms before the job is stopped as FAILED "
        "(default: %(default)g)",
        "N",
    )
    max_output_mib: _Above0 = _flag(
        64.0,
        "a job that prints more than this is stopped as FAILED; the first and last 512 KiB are kept "
        "(default: %(default)g)",
        "MIB",
    )
    max_slowdown: _Amount = _flag(
        1.0,
        "stop filling for a while when it slows the training by more than this (default: %(default)g; 0: never stop)",
        "PERCENT",
    )
    memory_margin_mib: _Amount = _flag(
        1024.0, "device memory that the jobs leave free beyond the main job's peak (default: %(default)g)", "MIB"
    )
    sharing: Literal["auto", "mps", "timeslice"] = _flag(
        "auto",
        "how main job and jobs share a GPU: mps is faster, but a job's illegal access can end the training "
        "(default: auto, the mode that contains faults: timeslice)",
    )
    mps_pipe: _Folder | None = _flag(
        None, "with --fill-sharing mps: use the MPS daemon of this pipe directory instead of starting one", "DIR"
    )
    sm_percentage: int = _flag(
        100,
        "the share of a GPU's multiprocessors that a job may use at most (default: %(default)g)",
        "PERCENT",
        ge=1,
        le=100,
    )
    user: Annotated[str, matching(r".*\S.*", "the name of a user")] | None = _flag(
        None, "run the jobs as this user (needs root; default: nobody where the training is root's)", "USER"
    )
    bind: tuple[str, ...] = _flag(
        (),
        "places that jobs may use besides their own folders: they see most files anyway but can write none, and "
        "see nothing of /tmp and /run or of folders that are closed to their user; with :rw they may write there",
        "PATH[:rw]",
    )
    network: bool = _flag(
        False, "let jobs use the machine's network (default: they have none but a localhost of their own)"
    )
    strict: bool = _flag(
        False, "do not train at all where one of the walls around jobs cannot be built (default: say which, and go on)"
    )
    allow: tuple[Annotated[str, matching(r".*\S.*", "a pattern such as 'package.*'")], ...] = _flag(
        (),
        "run only tasks whose module:Class matches one of these, such as 'megatron.fill.sidetask.*'; the word "
        "command stands for commands, env:NAME for a variable that tasks may set (default: everything)",
        "PATTERN",
    )
    max_processes: int = _flag(
        256,
        "a job with more processes and threads than this is stopped as FAILED (default: %(default)g)",
        "N",
        ge=8,
        le=_MOST_AMOUNT,
    )
    max_files: int = _flag(1024, "open files per process of a job (default: %(default)g)", "N", ge=64, le=_MOST_AMOUNT)
    baseline_seconds: _Amount = _flag(
        0.0,
        "after the last iteration, run each rank's jobs alone for S seconds to measure the fill efficiency; on the "
        "CPU the ranks of a node take turns (default: %(default)g)",
        "S",
    )
    price: Annotated[Prices, BeforeValidator(parse_prices)] | None = _flag(
        None,
        "what an hour costs, in any currency, for the saving in the report: of all that the training runs on, and "
        "of one of the cheaper devices that the jobs would otherwise run on",
        "main=M,side=S",
    )
    trace_iterations: _Count = _flag(3, "how many of the last iterations trace.json holds (default: %(default)g)", "N")

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
        """Return the settings from the flags that Megatron's parser has parsed.

        Raises:
            ConfigError: a flag or the jobs file has a wrong value.
        """
        values = {name: getattr(args, f"fill_{name}") for name in cls.model_fields}
        path = values.pop("jobs")
        if values["profile_only"] and path is not None:
            raise ConfigError("--fill-profile-only measures the bubbles without jobs; expected no --fill-jobs with it")
        if values["profile_only"] and values["store"] is not None:
            raise ConfigError("--fill-profile-only measures the bubbles without jobs; expected no --fill-store with it")
        if path == "":
            raise ConfigError("--fill-jobs is '': expected a jobs file")
        try:
            return cls(jobs=tuple(load_jobs(path)) if path is not None else (), **values)
        except ValidationError as error:
            problem = error.errors()[0]
            flag = "--fill-" + str(problem["loc"][0]).replace("_", "-")
            raise ConfigError(f"{flag} is {shown(problem['input'])}: {expectation(problem)}") from error
