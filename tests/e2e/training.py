"""Real trainings for the end-to-end tests: small, on the CPU, through the scripts that users call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version

from megatron.fill.errors import JobError
from megatron.fill.folders import output_file
from megatron.fill.store import Job, JobStore, open_store
from tests.e2e.launch import FRESH, WARM, Warm
from tests.e2e.warm import MOUNTS, REST
from tests.e2e.warm import RANK as MODULES
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
# One core per stage makes an iteration of about 20 ms, half of it bubbles.
MODEL = (
    "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --lr-decay-style constant "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --eval-iters 0 --eval-interval 100000 "
    "--log-interval 1 --tensorboard-log-interval 1"
)
ENDLESS = 12_000  # iterations: more than there is time for; each rank shuffles the samples of all
# Agents and workers have low priorities: in these rests they start at once, in bubbles alone it takes them long.
REST_MS = 200
SCRIPT = "pretrain_gpt.py" if Version(version("megatron-core")) >= Version("0.19") else "tests/e2e/older_gpt.py"
UPSTREAM = ("-m", "pipefill_patches", "--only", "cpu_backend", SCRIPT)
PATCHED = ("-m", "pipefill_patches", SCRIPT)
RESTED = ("-m", "pipefill_patches", "tests/e2e/rested.py", SCRIPT)  # for ranks with Pythons of their own
OURS = (SCRIPT,)


@dataclass(frozen=True)
class Trained:
    """A training that has ended."""

    output: str
    folder: Path

    @property
    def losses(self) -> dict[int, float]:
        """The loss of every iteration: float32 from TensorBoard, to the bit."""
        found = losses(self.folder)
        assert found
        return found

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.folder / "run" / "report.json").read_text(encoding="utf-8"))

    def path(self, job: str, file: str) -> Path:
        """A file in a job's folder."""
        return Path(self.jobs[job]["directory"]) / file

    def printed(self, job: str) -> Path:
        """What a job printed."""
        return output_file(Path(self.jobs[job]["directory"]))

    @property
    def jobs(self) -> dict[str, dict[str, Any]]:
        return {job["name"]: job for job in self.report["jobs"]}


def losses(folder: Path) -> dict[int, float]:
    """The loss of every iteration of the training that logs to this folder; empty if it wrote none."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    if "lm loss" not in events.Tags()["scalars"]:
        return {}
    return {event.step: event.value for event in events.Scalars("lm loss")}


@contextmanager
def warm() -> Iterator[None]:
    """Pythons are forked from one warm process meanwhile, without Megatron; those that torchrun starts are not."""
    if FRESH in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="pipefill-") as folder:
        where = f"{folder}/fresh"
        server = subprocess.Popen(
            [sys.executable, str(HERE / "warm.py"), where],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.environ[FRESH] = where
        try:
            yield
        finally:
            del os.environ[FRESH]
            server.kill()
            server.wait()


@contextmanager
def warm_ranks() -> Iterator[None]:
    """Ranks are forked from a process that has imported Megatron too, as `pretrain_gpt.py` has when it is patched."""
    if WARM in os.environ:
        yield
        return
    with warm(), Path(os.devnull).open("w") as nowhere:
        where = f"{os.environ[FRESH]}-megatron"
        arguments = [str(HERE / "warm.py"), where, *MODULES]
        server = Warm(arguments, dict(os.environ), os.environ[FRESH], (nowhere.fileno(), nowhere.fileno()))
        os.environ[WARM] = where
        try:
            yield
        finally:
            del os.environ[WARM]
            os.kill(server.pid, signal.SIGKILL)
            server.wait()


def warm_python() -> list[str]:
    """The arguments of Python that make it stand for one that has imported Megatron, if there is one here."""
    return [str(HERE / "launch.py"), "0"] if WARM in os.environ else []


def benchmark(name: str) -> list[str]:
    """The command ``python scripts/benchmarks/NAME.py`` for the root of the checkout; its trainings' ranks are warm."""
    rank = [sys.executable, *warm_python()]
    code = f"from scripts.benchmarks import one_gpu, {name}; one_gpu.SCRIPT[:2] = {rank}; {name}.main()"
    return [sys.executable, "-c", code]


def start(
    folder: Path,
    flags: str = "",
    iterations: int = 12,
    script: tuple[str, ...] = OURS,
    ranks: int = 2,
    torchrun: bool = False,
    fresh: bool = False,
    rest_ms: float = 0,
    model: str | Sequence[str] = MODEL,
    mounts: Mapping[str, Path] | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start a training; ``{folder}`` in the flags stands for the folder.  Its warm ranks rest after each iteration.

    Args:
        script: ``RESTED`` for ranks that rest though they are not warm; none without jobs does.
        torchrun: torchrun starts its ranks; with ``fresh`` each is a Python of its own, as users have it.
        fresh: its ranks import Megatron themselves, so the patches of a ``script`` that applies them first come first.
        mounts: what warm ranks and their agents see in the place of some files and folders; only for root.
        model: its flags; as a sequence where one of their values has spaces.
        environment: variables besides those of this process.
    """
    model = model.split() if isinstance(model, str) else model
    launcher = [str(HERE / "launch.py"), str(ranks)]
    if torchrun:
        run = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        launcher = [*warm_python(), *run, "--nproc-per-node", str(ranks)]
        if not fresh:
            launcher += ["--no-python", sys.executable, *warm_python()]
    logs = ["--tensorboard-dir", str(folder / "tensorboard")]
    if "--train-samples" not in model:
        logs += ["--train-iters", str(iterations)]
    variables = {name: value for name, value in os.environ.items() if name != "PIPEFILL_STORE"}
    if fresh and not torchrun:
        variables.pop(WARM, None)
    if rest_ms:
        variables[REST] = str(rest_ms)
    if mounts:
        variables[MOUNTS] = json.dumps({place: str(shown) for place, shown in mounts.items()})
    return subprocess.Popen(
        [sys.executable, *launcher, *script, *model, *logs, *flags.replace("{folder}", str(folder)).split()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=variables | {"OMP_NUM_THREADS": "1", "PIPEFILL_CPU_BACKEND": "1"} | dict(environment or {}),
    )


def train(folder: Path, *args: Any, **kwargs: Any) -> Trained:
    """Train and wait.  Fails the test if the training fails."""
    process = start(folder, *args, **kwargs)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output[-4000:]
    return Trained(output, folder)


class Running:
    """A training that goes on until it is told to end, so that what is waited for may take its time.

    Its jobs' store is that of the run, or ``store``.
    """

    def __init__(
        self, folder: Path, flags: str, store: Path | None = None, rest_ms: float = REST_MS, **kwargs: Any
    ) -> None:
        self.folder = folder
        self.process = start(folder, f"{flags} --exit-signal-handler", ENDLESS, rest_ms=rest_ms, **kwargs)
        self.output: list[str] = []
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self.output.extend, args=(self.process.stdout,), daemon=True)
        self._reader.start()
        self._store_path = store or folder / "run" / "jobs.db"
        self._store: JobStore | None = None

    def wait(self, condition: Callable[[], object], seconds: float = 240) -> None:
        """Wait until it holds.  Fails the test if the training ends first, or at the end of the time."""

        def met() -> object:
            if held := condition():
                return held
            assert self.process.poll() is None, "".join(self.output[-40:])
            return False

        until(met, seconds, every_s=0.1, late=lambda: str([(job.name, job.state, job.reason) for job in self._jobs()]))

    @property
    def iterations(self) -> int:
        """The number of iterations that it has told of."""
        return iterations_in(self.output)

    def _jobs(self) -> list[Job]:
        return [] if self._store is None else self._store.list()

    def wait_for_jobs(self, expected: Mapping[str, Callable[[Job], object]], seconds: float = 240) -> None:
        """Wait until there are jobs with these names of which this holds."""

        def met() -> bool:
            jobs = {job.name: job for job in self.store.list()}
            return all(name in jobs and holds(jobs[name]) for name, holds in expected.items())

        self.wait(met, seconds)

    @property
    def store(self) -> JobStore:
        if self._store is None:
            self.wait(self._store_path.exists)
            self._store = open_store(self._store_path)
        return self._store

    def job(self, name: str) -> Job:
        """The job with this name; the store may be there before the launcher has put it in."""
        with suppress(JobError):
            return self.store.find(name)
        self.wait_for_jobs({name: lambda _: True})
        return self.store.find(name)

    def ranks(self) -> list[int]:
        """The ranks' processes, in their order."""
        specs = sorted((self.folder / "run" / "agents").glob("spec*.json"))
        return [json.loads(spec.read_text())["parent"] for spec in specs]

    def end(self, seconds: float = 240) -> Trained:
        """Ask the training to end, as SLURM does, and wait so long for it."""
        for pid in self.ranks():
            os.kill(pid, signal.SIGTERM)
        assert self.process.wait(seconds) == 0, "".join(self.output[-40:])
        self._reader.join()
        return Trained("".join(self.output), self.folder)


def train_until(
    folder: Path, flags: str, expected: Mapping[str, Callable[[Job], object]], iterations: int = 0, **kwargs: Any
) -> Trained:
    """Train until there are jobs with these names of which this holds, and for this many iterations or more."""
    running = Running(folder, flags, **kwargs)
    try:
        running.wait_for_jobs(expected)
        running.wait(lambda: running.iterations >= iterations)
        return running.end()
    finally:
        running.process.kill()


def iterations_in(lines: Iterable[str]) -> int:
    """The number of iterations that a training's output tells of."""
    return sum("consumed samples" in line for line in lines)  # a checkpoint names its iteration too


def finished(job: Job) -> bool:
    return job.state.finished


def stepped(job: Job) -> bool:
    return job.progress.steps > 0


def settings(**values: Any) -> str:
    """Return the flags for settings that are no flags, without a space in a value."""
    return f"--fill-settings {json.dumps(values, separators=(',', ':'))}"


def write_jobs(folder: Path, *jobs: dict[str, Any]) -> str:
    """A jobs file beside the test tasks; the flags that use it and put the run into ``folder``/run."""
    path = folder / "jobs.yaml"
    folder.chmod(0o755)  # the jobs run as a user without rights
    for job in jobs:
        if "task" in job and ":" in job["task"] and not job["task"].startswith("megatron."):
            link = folder / (job["task"].split(":")[0] + ".py")
            source = HERE / link.name
            if source.exists() and not link.exists():
                link.symlink_to(source)
    path.write_text(json.dumps({"jobs": list(jobs)}), encoding="utf-8")  # JSON is YAML
    return f"--fill-jobs {path} --fill-report {folder / 'run'}"


WORKER = "fill.worker.worker"  # in the command line of every worker


def processes(*markers: str) -> dict[int, str]:
    """The running processes, by pid, whose command lines and working folders have all the ``markers`` in them."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                line += f" in {os.readlink(entry / 'cwd')}"
            except OSError:
                continue
            if all(marker in line for marker in markers):
                found[int(entry.name)] = line
    return found
