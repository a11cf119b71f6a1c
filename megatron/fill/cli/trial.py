"""``pipefill try``: tries jobs without any training."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from megatron.fill.cli.options import Device, Json, checked_device
from megatron.fill.cli.views import print_json
from megatron.fill.console import console_of
from megatron.fill.display import counted
from megatron.fill.errors import ConfigError
from megatron.fill.linux import safefile
from megatron.fill.sandbox.config import parse_bind
from megatron.fill.trial.result import Ended, Options, Trial

if TYPE_CHECKING:
    from megatron.fill.given.jobs import JobSpec

_PERIODS = 4  # default period, in bubble lengths: bubbles take a quarter of the time


def try_(
    target: Annotated[str, Argument(metavar="FILE", help="A jobs file, or one task: module:Class or path.py:Class.")],
    arguments: Annotated[
        list[str] | None, Argument(metavar="[NAME=VALUE]...", help="Of one task: its args, as in a jobs file.")
    ] = None,
    job: Annotated[
        list[str] | None, Option(metavar="NAME", help="Only this job of the file; may be repeated.  [default: all]")
    ] = None,
    bubble_ms: Annotated[float, Option(metavar="MS", min=1, max=60_000, help="How long each bubble lasts.")] = 50.0,
    every_ms: Annotated[
        float | None, Option(metavar="MS", min=2, max=600_000, help="One comes so often.  [default: 4 bubbles]")
    ] = None,
    seconds: Annotated[float, Option(metavar="S", min=0.1, max=86_400, help="For how long there are bubbles.")] = 5.0,
    startup_seconds: Annotated[float, Option(metavar="S", min=1, max=86_400, help="For create() and init().")] = 120.0,
    memory: Annotated[str | None, Option(metavar="SIZE", help="Of one task: its cap.")] = None,
    grace_ms: Annotated[
        float, Option(metavar="MS", min=1, max=600_000, help="As grace_ms of --fill-settings.")
    ] = 500.0,
    bind: Annotated[list[str] | None, Option(metavar="PATH[:rw]", help="As --fill-bind; may be repeated.")] = None,
    sharing: Annotated[Literal["auto", "mps", "timeslice"], Option(help="Of a GPU: as --fill-sharing.")] = "auto",
    network: Annotated[bool, Option("--network", help="As network of --fill-settings.")] = False,
    device: Device = None,
    keep: Annotated[Path | None, Option(metavar="FOLDER", help="Keep the jobs' folders in this new folder.")] = None,
    as_json: Json = False,
) -> None:
    """Try jobs without any training: would they run in the bubbles of one?

    Each job runs as in a training, by the same agent and worker and in the same sandbox, next to a training that only
    waits. All its callbacks are called. A task that can be saved is saved after its first bubble, and resumes in a new
    process from there.

    Exits with 0 if all would run, 1 if one failed, 2 if something does not exist or makes no sense.

    --json prints a list with an object per job: docs/side-tasks.md explains its fields. Cut off (Ctrl-C, SIGTERM), it
    shows the jobs that had been tried.
    """
    from megatron.fill.trial.printed import print_trial

    where = checked_device(device)
    jobs, search = _named(target, arguments or (), job or (), memory)
    period_ms = _PERIODS * bubble_ms if every_ms is None else every_ms
    if not bubble_ms < period_ms:
        raise ConfigError(f"--every-ms is {period_ms:g}: expected more than --bubble-ms, which is {bubble_ms:g}")
    for text in bind or ():
        try:
            parse_bind(text)
        except ConfigError as error:
            raise ConfigError(str(error).replace("--fill-bind", "--bind")) from None
    settings = {"grace_ms": grace_ms, "bind": list(bind or ()), "network": network, "sharing": sharing}
    options = Options(bubble_ms, period_ms, seconds, startup_seconds, where, settings=settings)
    trials: list[Trial] = []
    with trial_folder(keep) as folder, _cut_off() as signals:
        trials.extend(trials_of(jobs, search, options, folder, keep is not None, _say))  # keeps those before a cut
    if as_json:
        print_json([asdict(trial) for trial in trials])
    else:
        console = console_of(80)
        for at, trial in enumerate(trials):
            if at:
                console.print()
            print_trial(trial, console)
    if signals:
        _say(f"cut off: {len(trials)} of {counted(len(jobs), 'job')} had been tried")
        raise typer.Exit(128 + signals[0])
    endings = {trial.ended for trial in trials}
    if endings != {Ended.OK}:
        raise typer.Exit(2 if Ended.REFUSED in endings else 1)


def trials_of(
    jobs: Sequence[JobSpec],
    search: Sequence[str],
    options: Options,
    folder: Path,
    kept: bool,
    say: Callable[[str], None],
) -> Iterator[Trial]:
    """Try one job after the other, each in a folder below ``folder``, which the trial names if it is kept."""
    from megatron.fill.trial.check import examine
    from megatron.fill.trial.run import refused, try_job

    for job, found in zip(jobs, examine(jobs, search, options.settings), strict=True):
        if found.error:
            yield refused(job, found, options.device)
            continue
        trial = try_job(job, found, search, options, folder / job.name, say)
        yield trial if kept else replace(trial, folder="")


@contextmanager
def trial_folder(keep: Path | None) -> Iterator[Path]:
    """Create a folder for trials: ``keep``, or a temporary one that jobs of any user may enter, deleted at the end."""
    if keep is not None:
        try:
            keep.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"--keep {keep}: cannot be made: {error.strerror}") from error
        yield keep.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="pipefill-try-"))
    try:
        folder.chmod(0o755)
        yield folder
    finally:
        with suppress(OSError):
            safefile.remove_tree(folder)


@contextmanager
def _cut_off() -> Iterator[list[int]]:
    """End the block at SIGINT or SIGTERM, and yield a list of the signals that came."""
    came: list[int] = []

    def end(number: int, frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with suppress(KeyboardInterrupt):
            yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _named(
    target: str, arguments: Sequence[str], names: Sequence[str], memory: str | None
) -> tuple[list[JobSpec], list[str]]:
    """Return the jobs to try, and the folders in which their modules are searched."""
    from megatron.fill.trial.target import job_of, jobs_of

    path = Path(target)
    if ":" in target and not path.exists():
        if names:
            raise ConfigError(f"--job {names[0]}: {target} is one task; expected --job with a jobs file only")
        one, folder = job_of(target, arguments, memory)
        return [one], list(dict.fromkeys([str(folder), str(Path.cwd())]))
    if arguments:
        raise ConfigError(f"argument {arguments[0]!r}: expected none with a jobs file, which has its own args")
    if memory is not None:
        raise ConfigError(f"--memory {memory}: expected none with a jobs file, where each job has its own memory")
    return jobs_of(path, names), list(dict.fromkeys([str(path.absolute().parent), str(Path.cwd())]))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
