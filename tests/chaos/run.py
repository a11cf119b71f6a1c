"""A chaos run, from its options to its result."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.errors import ConfigError
from megatron.fill.linux import safefile
from tests.chaos.campaign import Campaign
from tests.chaos.checkout import SCRIPT
from tests.chaos.controls.engine import Controlled, run_controls
from tests.chaos.controls.table import ATTACKS, CONTROLS
from tests.chaos.disk import SmallDisk
from tests.chaos.kind import DISK, NETWORK, FaultKind, Source
from tests.chaos.kinds import chosen
from tests.chaos.network import OwnNetwork
from tests.chaos.results import ChaosResult, compile_result
from tests.chaos.training import find_script

_ON_GPU = "it needs a main job that trains and fills on a GPU; this one trains on the CPU"
_FEW = 100  # faults: from there on, trainings are long
_SHORT, _LONG = 500, 1200  # iterations
_MOST_SAID = 300  # characters


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """The options of a chaos run.

    Attributes:
        faults: number of faults in all.
        kinds: names of the kinds to inject; empty for all.
        keep: folder in which logs, run folders and the job store stay; None to remove them.
        iterations: iterations of each training; None for a default that depends on the number of faults.
        script: training script.
    """

    faults: int
    kinds: tuple[str, ...] = ()
    seed: int = 0
    keep: Path | None = None
    iterations: int | None = None
    script: Path = SCRIPT


def control(names: Sequence[str], say: Callable[[str], None]) -> list[Controlled]:
    """Run the controls of these kinds or families of attacks; of all if there are no names.

    Raises:
        ConfigError: a name is unknown, or none of them is an attack's.
    """
    attacks = [kind.name for kind in chosen(names) if kind.name in ATTACKS]
    if not attacks:
        raise ConfigError(f"--kinds names no attack of a job; expected some of {', '.join(ATTACKS)}")
    say(f"controls of {len(attacks)} kinds of attacks, each in a world of its own without what is to stop it")
    found = run_controls({name: ATTACKS[name] for name in attacks}, CONTROLS)
    for one in found:
        if one.wrong:
            say(f"untested: {one.kind}: {one.wrong}")
    return found


def run(options: ChaosOptions, say: Callable[[str], None]) -> ChaosResult:
    """Inject the faults into a training of its own, and end everything that was started.

    Args:
        say: prints a line of progress.

    Raises:
        ConfigError: an option is wrong, or there is no training script.
        FillError: the training does not run at all.
        KeyboardInterrupt: Ctrl-C or SIGTERM before there was any job; later, the findings until then are returned.
    """
    kinds = chosen(options.kinds)
    script = find_script(options.script)
    with _terminated_as_interrupted(), _folder(options.keep) as folder, closing(OwnNetwork()) as network:
        disk = SmallDisk(folder / "disk")
        lacking = {DISK: disk.why_not, NETWORK: network.why_not}
        not_run = {kind.name: why for kind in kinds if (why := _why_not(kind, lacking, options.kinds))}
        for name, why in not_run.items():
            say(f"not run: {name}: {why}")
        able = [kind for kind in kinds if kind.name not in not_run]
        attacks = [kind.name for kind in able if kind.name in ATTACKS]
        controls = control(attacks, say) if attacks else []
        not_run |= {one.kind: f"it can have no control here: {one.wrong}" for one in controls if one.impossible}
        controls = [one for one in controls if not one.impossible]
        untested = {one.kind for one in controls if one.wrong}
        able = [kind for kind in able if kind.name not in untested and kind.name not in not_run]
        if not able and untested:
            raise ConfigError(f"the controls of all of these kinds failed: {controls[0].kind}: {controls[0].wrong}")
        if not able:
            raise ConfigError("--kinds names only faults that cannot be injected here; expected others")
        iterations = options.iterations or (_SHORT if options.faults < _FEW else _LONG)
        campaign = Campaign(script, able, folder, disk, iterations, say, network.machine)
        findings = campaign.run(options.faults, options.seed)
        result = compile_result(findings, able, options.faults, not_run, controls)
        if options.keep is not None and not disk.why_not:  # the disk goes with this process
            _keep(disk.folder, folder / "runs", say)
        return result


def _keep(source: Path, target: Path, say: Callable[[str], None]) -> None:
    """Copy the files that attacks have left; a file that cannot be copied does not cost the result."""
    # Python's own copy fails on pipes, and gives files of 4 GiB of nothing all their blocks.
    done = subprocess.run(
        ["cp", "--archive", "--sparse=always", f"{source}/.", str(target)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        say(f"not all of the run folders could be kept: {done.stderr[:_MOST_SAID]}")


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        folder = Path(tempfile.mkdtemp(prefix="pipefill-chaos-")).resolve()
        folder.chmod(0o755)  # jobs may run as another user
        try:
            yield folder
        finally:
            with suppress(OSError):  # files that attacks have left must not cost the result
                safefile.remove_tree(folder)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise ConfigError(f"--keep {keep} is not empty; expected a new folder")
        with tempfile.TemporaryFile(dir=keep):
            pass  # so it can be written
    except OSError as error:
        raise ConfigError(f"--keep {keep}: {error.strerror}; expected a new folder that can be written") from error
    yield keep.resolve()


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _why_not(kind: FaultKind, lacking: Mapping[str, str], named: Collection[str]) -> str:
    if kind.open and kind.name not in named:
        return kind.open
    return _ON_GPU if kind.source is Source.GPU else lacking.get(kind.needs, "")
