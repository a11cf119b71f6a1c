"""Do trainings that are more than a pipeline go on to the bit, and are their bubbles filled?

Each row is a tiny GPT on the CPU with flags of Megatron's own.  It is trained with a job on every rank, until each of
them has stepped, and then as long with none of PipeFill but its CPU backend.  Said of a row is whether the losses of
all iterations are equal to the bit, how much of the time was bubbles, how many steps the jobs did, and whether the
report knows the stage of each rank and sees the same bubbles on all ranks of a stage.  A row must also show that its
flags had effect: ``rows.py`` has what each rank of it must be seen to train.  Where Megatron itself does
not train on a CPU, its error is shown.

    python -m tests.parallelism.check --json docs/benchmarks/parallelism.json

Rows that are in the file already and are not checked now stay in it.  Exits with 1 where a row fails.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.e2e.training import (
    ENDLESS,
    MODEL,
    SCRIPT,
    UPSTREAM,
    Trained,
    settings,
    start,
    stepped,
    train_until,
    warm_ranks,
    write_jobs,
)
from tests.parallelism.rows import ROWS, TENSOR, Row, at, unmet

FLAGS = (
    "--num-layers 2 --hidden-size 32 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 "
    "--global-batch-size 8"
)
ITERATIONS = 10  # at least
PROBE = "tests/parallelism/probe.py"


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of a row.

    Attributes:
        iterations: that were compared; 0 where Megatron does not train.
        bubble_share: of the iterations' time, over all ranks.
        steps: that each rank's job did.
        identical: the losses of all iterations, to the bit.
        stages_right: the report has the stage of each rank, and all of its iterations.
        peers_alike: the ranks of a stage have the same kinds of bubbles, in the same order.
        expected: what the ranks had to show for the flags to have had effect, by path into their facts.
        found: what each rank showed there.
        unmet: the expectations that a rank does not meet.
        seconds: for both trainings.
        error: Megatron's own, where it does not train on a CPU.
    """

    ranks: int
    flags: str
    iterations: int = 0
    bubble_share: float = 0.0
    steps: tuple[int, ...] = ()
    identical: bool = False
    stages_right: bool = False
    peers_alike: bool = False
    expected: Mapping[str, str] = field(default_factory=dict)
    found: Mapping[str, list[Any]] = field(default_factory=dict)
    unmet: tuple[str, ...] = ("it was not checked",)
    seconds: float = 0.0
    error: str = ""

    @property
    def well(self) -> bool:
        right = self.identical and self.stages_right and self.peers_alike and not self.unmet
        return right and bool(self.steps) and min(self.steps) > 0


def check(row: Row, folder: Path, iterations: int = ITERATIONS, rest_ms: float = 0) -> Checked:
    """Train a row with jobs and without.

    Args:
        folder: an empty one, that others may enter.
        iterations: how many at least.
        rest_ms: that each rank sleeps after an iteration with jobs, so that they start sooner.

    Raises:
        AssertionError: the training fails or its jobs do not step, though it goes well without PipeFill.
    """
    begun = time.monotonic()
    (folder / "upstream").mkdir()
    iterations = max(iterations, row.iterations)
    try:
        filled = fill(row, folder, iterations, rest_ms)
    except AssertionError:
        error = train_upstream(row, folder / "upstream", iterations)
        if error:
            return Checked(row.ranks, row.flags, error=error)
        raise
    losses, report = filled.losses, filled.report
    error = train_upstream(row, folder / "upstream", len(losses))
    assert not error, error
    ranks = seen(folder)
    return Checked(
        row.ranks,
        row.flags,
        iterations=len(losses),
        bubble_share=round(report["summary"]["bubble_share"], 3),
        steps=tuple(sum(job["steps"] for job in report["jobs"] if job["rank"] == rank) for rank in range(row.ranks)),
        identical=losses == Trained("", folder / "upstream").losses,
        stages_right=[(rank["stage"], rank["iterations"]) for rank in report["ranks"]]
        == [(stage, len(losses)) for stage in stages(row)],
        peers_alike=len({(rank["stage"], *kinds(rank)) for rank in report["cycle"]}) == 2,
        expected={path: repr(value) for path, value in row.expected.items()},
        found={path: [at(facts, path) for facts in ranks] for path in row.expected},
        unmet=tuple(unmet(row.expected, ranks)),
        seconds=round(time.monotonic() - begun, 1),
    )


def stages(row: Row) -> list[int]:
    """The stage of each rank, in Megatron's order: pipelines are made last, or before data parallelism if so asked."""
    tensor = 2 if TENSOR in row.flags else 1
    if "--use-tp-pp-dp-mapping" in row.flags:
        return [rank // tensor % 2 for rank in range(row.ranks)]
    return [rank // (row.ranks // 2) for rank in range(row.ranks)]


def kinds(cycle: Mapping[str, Any]) -> Iterator[str]:
    return (bubble["kind"] for bubble in cycle["training"])


def fill(row: Row, folder: Path, iterations: int, rest_ms: float) -> Trained:
    """Train until a job on each rank has stepped, and for some iterations; the ranks' facts are left in the folder."""
    names, filling = spins(folder, row.ranks)
    script = (PROBE, str(folder), SCRIPT)
    expected = dict.fromkeys(names, stepped)
    options: dict[str, Any] = {"ranks": row.ranks, "rest_ms": rest_ms, "model": model(row), "script": script}
    return train_until(folder, filling, expected, iterations, **options)


def model(row: Row) -> list[str]:
    """The model's flags, but those that the row does without, and the row's."""
    words = [*MODEL.split(), *FLAGS.split()]
    for name in row.without:
        while name in words:
            place = words.index(name)
            del words[place : place + 2]
    return [*words, *shlex.split(row.flags)]


def seen(folder: Path) -> list[dict[str, Any]]:
    """The facts of the ranks that wrote them, in their order."""
    files = sorted(folder.glob("facts-*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


def spins(folder: Path, ranks: int) -> tuple[list[str], str]:
    """The names of jobs without an end, one for each rank, and the flags that fill with them."""
    names = [f"spin-{number}" for number in range(ranks)]
    jobs = [{"name": name, "task": "tasks:Spin", "args": {"milliseconds": 0.2}} for name in names]
    # No brake: what it leaves unfilled to compare with is a good part of so short a run.
    rest = f"--fill-max-slowdown 0 {settings(warmup_iterations=3, min_bubble_us=300)}"
    return names, f"{write_jobs(folder, *jobs)} {rest}"


def train_upstream(row: Row, folder: Path, iterations: int) -> str:
    """Train for so many iterations with no patch but the CPU backend; the error if it fails."""
    plain = replace(row, flags=re.sub(r"--fill-\S+ \S+", "", row.flags))
    process = start(folder, f"--exit-interval {iterations}", ENDLESS, UPSTREAM, row.ranks, model=model(plain))
    output, _ = process.communicate(timeout=240)
    if process.returncode == 0:
        return ""
    errors = re.findall(r"^(?:\[rank\d+\]: )?(\w*Error: .*)", output, re.MULTILINE)
    told = [error for error in errors if "Connection closed by peer" not in error and "ProcessLookup" not in error]
    return told[0] if told else output[-500:]


def line(name: str, found: Checked) -> str:
    if found.error:
        return f"{name:<33}{found.ranks:>3}  Megatron: {found.error}"
    words = (
        "identical" if found.identical else "DIFFERENT LOSSES",
        "" if found.stages_right else "STAGES WRONG",
        "" if found.peers_alike else "PEERS DIFFER",
        f"NO EFFECT: {'; '.join(found.unmet)}" if found.unmet else "",
    )
    return (
        f"{name:<33}{found.ranks:>3}{found.iterations:>6}{found.bubble_share:>9.0%}"
        f"{min(found.steps):>7}{found.seconds:>7.0f}  {' '.join(filter(None, words))}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", metavar="ROW", choices=ROWS, default=list(ROWS), help=", ".join(ROWS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found here, after each row")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and reports in this new folder")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if options.json is not None:
        try:
            results = earlier(options.json)
        except (OSError, ValueError) as error:
            parser.error(f"--json {options.json}: {error}")
    if options.keep is not None:
        try:
            options.keep.mkdir(parents=True)
        except OSError as error:
            parser.error(f"--keep {options.keep}: {error.strerror}; expected a new folder that can be made")
    failed = False
    print(f"{'':<33}{'ranks':>3}{'iter.':>5}{'bubbles':>9}{'steps':>7}{'s':>7}  losses", flush=True)
    with tempfile.TemporaryDirectory(prefix="pipefill-", dir="/var/tmp") as scratch, warm_ranks():
        base = options.keep or Path(scratch)
        base.chmod(0o755)  # the jobs run as a user without rights
        for name in options.rows:
            folder = base / name
            folder.mkdir()
            try:
                found = check(ROWS[name], folder)
            except AssertionError as error:
                print(f"{name}: FAILED: {str(error)[-3000:]}", flush=True)
                failed = True
                continue
            print(line(name, found), flush=True)
            failed = failed or not (found.error or found.well)
            results[name] = asdict(found)
            if options.json is not None:
                write(options.json, {name: results[name] for name in ROWS if name in results})
    sys.exit(failed)


def earlier(path: Path) -> dict[str, Any]:
    """The rows that are in the file; none if it is new.

    Raises:
        OSError: it cannot be written.
        ValueError: something else is in it.
    """
    with path.open("a+", encoding="utf-8") as file:
        file.seek(0)
        text = file.read()
    try:
        return json.loads(text)["rows"] if text else {}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("is not of this script; expected a file that it wrote, or a new one") from error


def write(path: Path, rows: dict[str, Any]) -> None:
    trained = [row for row in rows.values() if not row["error"]]
    summary = {
        "trained": len(trained),
        "identical": sum(row["identical"] for row in trained),
        "iterations": sum(row["iterations"] for row in trained),
        "refused_by_megatron": len(rows) - len(trained),
        "shown_to_have_effect": sum("unmet" in row and not row["unmet"] for row in trained),
    }
    result = {"command": "python -m tests.parallelism.check", "summary": summary, "rows": rows}
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
