"""One shrunk recipe, trained with jobs in its bubbles and without PipeFill: what became of both trainings."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.store import Job
from tests.e2e.training import OURS, PATCHED, UPSTREAM, Running, Trained, losses, start
from tests.parallelism.check import spins
from tests.parallelism.recipes import bert
from tests.parallelism.recipes.sizes import ENDLESS, VOCABULARY, Shrunk

FIRST, SECOND = 6, 12  # iterations to a checkpoint that is resumed, and to the end, at least
REST_MS = 50.0  # that ranks with jobs sleep after each iteration, so that these start sooner
RERUN_CODES = (16, 17)  # Megatron's: it found an error that it was told to inject, and ended
ENDING_S = 120
SCRIPTS = {"bert": "examples/bert/pretrain_bert.py", "hybrid": "pretrain_hybrid.py"}  # of the checkout; else ours
BERT = "tests/parallelism/recipes/bert.py"  # comes before the script


class Stopped(Exception):
    """A training failed or hangs; the message says why.

    Args:
        code: its exit code; None where it was ended.
        error: the first error that it printed; empty for none.
    """

    def __init__(self, reason: str, code: int | None, error: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.error = error or ("" if code is None else reason)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a recipe.

    Attributes:
        iterations: that were compared; 0 where it does not train.
        bubble_share: of the iterations' time, over all ranks, in the last start.
        steps: that the jobs of each rank did.
        identical: the losses of all iterations, to the bit.
        exit_code: of both trainings; not 0 where the recipe is about that.
        refusal: the reason why it cannot be trained here, PipeFill or not.
        failure: what went wrong with PipeFill and not without; or it hangs, here or there.
    """

    iterations: int = 0
    bubble_share: float = 0.0
    steps: tuple[int, ...] = ()
    identical: bool = False
    exit_code: int = 0
    refusal: str = ""
    failure: str = ""

    @property
    def stepped(self) -> bool:
        """True if the losses are identical and the jobs of every rank did steps."""
        return self.identical and not self.failure and bool(self.steps) and min(self.steps) > 0

    @property
    def well(self) -> bool:
        """True if it stepped, or ended by the error that the recipe injects, with and without jobs alike."""
        return self.stepped or (self.identical and self.exit_code in RERUN_CODES)


@dataclass(frozen=True, slots=True)
class Trial:
    """A recipe's two trainings.

    Args:
        family: the recipe's.
        checkout: Megatron-LM's.
        folder: a new one, that others may enter; ``with`` and ``without`` are made in it.
        limit_s: for each start.
    """

    shrunk: Shrunk
    family: str
    checkout: Path
    folder: Path
    limit_s: float

    def run(self) -> Outcome:
        try:
            last = self._fill()
        except Stopped as stopped:
            return self._judge(stopped)
        try:
            self._train(last)
        except Stopped as stopped:
            return Outcome(failure=f"without PipeFill: {stopped}")
        return self._compare(0)

    def _judge(self, filled: Stopped) -> Outcome:
        """Whether it fails as well without PipeFill, and in the same way."""
        end = max([SECOND, *(iteration + 1 for iteration in self._losses("with"))])
        try:
            self._train([FIRST, end] if self.shrunk.resumed else [end])
        except Stopped as stopped:
            injected = "--error-injection-type" in self.shrunk.flags
            if injected and filled.code == stopped.code and stopped.code in RERUN_CODES:
                return self._compare(stopped.code)
            if filled.error and filled.error == stopped.error:  # one of them may hang after it
                return Outcome(refusal=filled.error)
            if filled.code is None and stopped.code is None:
                return Outcome(failure=f"with jobs and without: {stopped}")
            return Outcome(refusal=str(stopped)) if stopped.code == filled.code else Outcome(failure=str(filled))
        return Outcome(failure=str(filled))

    def _compare(self, exit_code: int) -> Outcome:
        with_jobs, without = self._losses("with"), self._losses("without")
        report = Trained("", self._place("with")).report if not exit_code else {}
        return Outcome(
            iterations=len(with_jobs),
            bubble_share=round(report["summary"]["bubble_share"], 3) if report else 0.0,
            steps=tuple(_steps(report, rank) for rank in range(self.shrunk.ranks)) if report else (),
            identical=bool(with_jobs) and with_jobs == without,
            exit_code=exit_code,
        )

    def _losses(self, place: str) -> dict[int, float]:
        """By iteration; none where it never got so far."""
        folder = self._place(place)
        try:
            return losses(folder) if (folder / "tensorboard").exists() else {}
        except KeyError:
            return {}

    def _place(self, name: str) -> Path:
        """The folder of the training with jobs or without, made and furnished when it is first asked for."""
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir()
            (folder / "checkpoints").mkdir()
            if self.family == "bert":
                bert.write(folder, VOCABULARY)
        return folder

    def _script(self, usual: tuple[str, ...]) -> tuple[str, ...]:
        name = SCRIPTS.get(self.family)
        if name is None:
            return usual
        launcher = (PATCHED if usual == OURS else usual)[:-1]
        return (*launcher, *([BERT] if self.family == "bert" else []), str(self.checkout / name))

    def _model(self, folder: Path) -> list[str]:
        return [flag.replace("{folder}", str(folder)) for flag in self.shrunk.flags]

    def _fill(self) -> list[int]:
        """Train with a job on each rank, twice where it is resumed; the last iteration of each start.

        Raises:
            Stopped: it fails, hangs, or a rank's job does not step.
        """
        folder = self._place("with")
        names, filling = spins(folder, self.shrunk.ranks)
        ends, before = [], {}
        if self.shrunk.resumed:
            ends = [self._fill_once(filling, {}, FIRST)]
            before = {job["name"]: job["steps"] for job in Trained("", folder).report["jobs"]}
        further = {name: _beyond(before.get(name, 0)) for name in names}
        return [*ends, self._fill_once(filling, further, SECOND - FIRST * len(ends))]

    def _fill_once(self, filling: str, expected: dict[str, Callable[[Job], bool]], iterations: int) -> int:
        folder, ranks = self._place("with"), self.shrunk.ranks
        running = Running(
            folder, filling, rest_ms=REST_MS, script=self._script(OURS), ranks=ranks, model=self._model(folder)
        )
        missing = "it hangs"
        try:
            running.wait(lambda: running.iterations >= iterations, self.limit_s)
            missing = f"it goes on, and the jobs of a rank did not step within {self.limit_s:.0f} s"
            running.wait_for_jobs(expected, self.limit_s)
            missing = "it does not end"
            running.end(ENDING_S)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            if running.process.poll() is None:
                _end(running.process)
                output = "".join(running.output)
                raise Stopped(f"{missing}; {who_waits(output)}", None, first_error(output)) from error
            time.sleep(1)  # for the last lines of its output
            raise Stopped(told("".join(running.output)), running.process.returncode) from error
        finally:
            _end(running.process)
        return max(Trained("", folder).losses)

    def _train(self, ends: list[int]) -> None:
        """Train with no patch but the CPU backend, to the same iterations.

        Raises:
            Stopped: it fails or hangs.
        """
        folder = self._place("without")
        for end in ends:
            ending = f"--exit-interval {end}"
            script, model = self._script(UPSTREAM), self._model(folder)
            self._wait(start(folder, ending, ENDLESS, script, self.shrunk.ranks, model=model))

    def _wait(self, process: subprocess.Popen[str]) -> None:
        try:
            output, _ = process.communicate(timeout=self.limit_s)
        except subprocess.TimeoutExpired as error:
            _end(process)
            stacks = ""
            with suppress(subprocess.TimeoutExpired):  # what a rank started may hold the pipe
                stacks = process.communicate(timeout=20)[0]
            raise Stopped(f"it hangs; {who_waits(stacks)}", None, first_error(stacks)) from error
        finally:
            _end(process)
        if process.returncode:
            raise Stopped(told(output), process.returncode)

    def clean(self) -> None:
        """Remove what takes place."""
        for name in ("with", "without"):
            shutil.rmtree(self.folder / name / "checkpoints", ignore_errors=True)


def _beyond(steps: int) -> Callable[[Job], bool]:
    return lambda job: job.progress.steps > steps


def _steps(report: dict, rank: int) -> int:
    return sum(job["steps"] for job in report["jobs"] if job["rank"] == rank)


def _end(process: subprocess.Popen[str]) -> None:
    """Have the ranks of a training that goes on print where they are, and end."""
    if process.poll() is None:
        process.send_signal(signal.SIGABRT)  # the launcher passes it on; it is gone once they are
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
    process.kill()


def who_waits(output: str) -> str:
    """Megatron's innermost lines in the main threads of ranks that were aborted, each with the number of ranks."""
    places: dict[str, int] = {}
    for stack in re.split(r"^Current thread .*$", output, flags=re.MULTILINE)[1:]:
        found = re.search(r'File "[^"]*/(megatron/(?:core|training)/[^"]*)", line (\d+) in (\w+)', stack)
        place = "{}:{} {}".format(*found.groups()) if found else "outside of Megatron"
        places[place] = places.get(place, 0) + 1
    return "; ".join(f"{count} ranks in {place}" for place, count in places.items()) or "no rank says where it waits"


# What the other ranks say when one has failed.
_ECHOES = ("Connection closed by peer", "Connection reset", "ProcessLookup", "Gloo connectFullMesh failed")


def told(output: str) -> str:
    """The first error in the output of a training that failed, or the end of the output, in one line."""
    return first_error(output) or output[-300:].replace("\n", " ")


def first_error(output: str) -> str:
    """The first error in the output of a training, in one line, or an empty text."""
    errors = []
    lines = [re.sub(r"^\[rank\d+\]:\s?", "", line) for line in output.splitlines()]
    for number, line in enumerate(lines):
        if "error: unrecognized arguments" in line:
            return line[line.index("unrecognized") :]
        # Another rank's output may be in the middle of a line.
        if re.match(r"(\w+\.)*\w*(Error|Exception|StopIteration|Interrupt)(:|\s*$)", line):
            if re.fullmatch(r"[\w.]+:?\s*", line):  # no words: the line of code has them
                code = [
                    before.strip() for before in lines[max(0, number - 4) : number] if not set(before) <= set(" ^~")
                ]
                line = f"{line.rstrip(': ')} at {code[-1]}" if code else line
            errors.append(line)
    own = [error for error in errors if not any(echo in error for echo in _ECHOES)]
    return (own or errors or [""])[0][:300]
