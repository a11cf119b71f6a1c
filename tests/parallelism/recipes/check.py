"""Do NVIDIA's own training recipes go on to the bit with jobs in their bubbles?

Reads the recipes of a checkout of Megatron-LM (tests/functional_tests/test_cases), takes those with more than one
pipeline stage, shrinks their sizes, and trains each on the CPU: with a job on every rank, and with none of PipeFill but
its CPU backend.  All losses are compared to the bit.  Megatron's own layers stand in for Transformer Engine's.  What
had to be replaced besides, and why a recipe cannot be trained here, is said of each.

    python -m tests.parallelism.recipes.check --megatron ../Megatron-LM --json docs/benchmarks/megatron-recipes.json

Recipes that are in the file already are not trained again, but for those that are named by --recipes.  Nothing of the
checkout is changed or copied.  Exits with 1 where a recipe fails: losses differ, a rank's jobs do not step, or it
trains without PipeFill only.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import textwrap
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from megatron.fill.linux.files import write_text
from scripts.benchmarks.harness import arguments
from tests.e2e.training import warm_ranks
from tests.parallelism.check import earlier
from tests.parallelism.recipes.read import Recipe, read
from tests.parallelism.recipes.sizes import Shrunk, shrink
from tests.parallelism.recipes.trials import Outcome, Trial

COMMAND = "python -m tests.parallelism.recipes.check --megatron PATH --json docs/benchmarks/megatron-recipes.json"


@dataclass(frozen=True, slots=True)
class Row:
    """A recipe and what became of it.

    Attributes:
        local: the recipe itself has Megatron's own layers.
        replaced: what had to change besides sizes.
        same_as: the recipe that is the same training when both are shrunk; it was trained once.
        seconds: for all of its trainings.
    """

    name: str
    family: str
    kind: str
    local: bool
    ranks: int
    resumed: bool
    replaced: tuple[str, ...]
    flags: str
    outcome: Outcome
    same_as: str = ""
    seconds: float = 0.0

    def told(self) -> list[str]:
        """The row in lines of at most 80 columns."""
        found = self.outcome
        if found.refusal:
            words = f"cannot be trained here: {found.refusal}"
        elif found.failure:
            words = f"FAILED: {found.failure}"
        else:
            losses = "identical" if found.identical else "DIFFERENT LOSSES"
            least = min(found.steps, default=0)
            words = f"{self.ranks} ranks {found.iterations:>4} iterations  {losses} {found.bubble_share:>5.0%} bubbles"
            words += f" {least:>6} steps" + (" resumed" if self.resumed else "")
            words += f" exit code {found.exit_code}" if found.exit_code else ""
        if self.same_as:
            words += f" (as {self.same_as})"
        return [self.name, *textwrap.wrap(words, 78, initial_indent="  ", subsequent_indent="  ")]

    def content(self) -> dict[str, Any]:
        """The row as the file has it, without its name."""
        found = asdict(self)
        del found["name"]
        return found | {"well": self.outcome.well}


def row(name: str, content: dict[str, Any]) -> Row:
    """The row that the file has.

    Raises:
        ValueError: it has something else.
    """
    fields = {key: value for key, value in content.items() if key != "well"}
    return TypeAdapter(Row).validate_python({"name": name, **fields})


def untrained(recipe: Recipe) -> str:
    """The reason why a recipe is no training; nothing where it is one."""
    if recipe.mode == "inference":
        return "it is no training: it answers prompts from a checkpoint of NVIDIA's"
    if recipe.mode == "rl":
        return "reinforcement learning from a checkpoint of NVIDIA's, with CUDA graphs and a server for its answers"
    return ""


def check(recipe: Recipe, done: list[Row], checkout: Path, folder: Path, limit_s: float) -> Row:
    """Train a recipe, if that is possible and no other of the same flags was trained."""
    shrunk, begun = shrink(recipe), time.monotonic()
    reason = untrained(recipe)
    if reason:
        return _row(recipe, shrunk, Outcome(refusal=reason))
    for other in done:
        if _flags(shrunk) == other.flags and (other.ranks, other.resumed) == (shrunk.ranks, shrunk.resumed):
            return _row(recipe, shrunk, other.outcome, same_as=other.same_as or other.name)
    trial = Trial(shrunk, recipe.family, checkout, folder, limit_s)
    outcome = trial.run()
    trial.clean()
    return _row(recipe, shrunk, outcome, seconds=round(time.monotonic() - begun, 1))


def _row(recipe: Recipe, shrunk: Shrunk, outcome: Outcome, same_as: str = "", seconds: float = 0.0) -> Row:
    facts = recipe.name, recipe.family, recipe.kind, recipe.local
    return Row(*facts, shrunk.ranks, shrunk.resumed, shrunk.replaced, _flags(shrunk), outcome, same_as, seconds)


def _flags(shrunk: Shrunk) -> str:
    """In one order: recipes differ in it where they are the same."""
    groups: list[str] = []
    for argument in shrunk.flags:
        if argument.startswith("--"):
            groups.append(argument)
        else:
            groups[-1] += f" {argument}"
    return " ".join(sorted(groups))


def summary(rows: list[Row], recipes_read: int) -> dict[str, int]:
    trained = [row for row in rows if row.outcome.iterations]
    return {
        "recipes": recipes_read,
        "trained": len(trained),
        "identical_and_stepped": sum(row.outcome.stepped for row in trained),
        "identical": sum(row.outcome.identical for row in trained),
        "local": sum(row.local for row in rows),
        "local_identical_and_stepped": sum(row.local and row.outcome.stepped for row in rows),
        "trainings_of_their_own": sum(not row.same_as for row in trained),
        "iterations": sum(row.outcome.iterations for row in trained if not row.same_as),
        "cannot_be_trained_here": sum(bool(row.outcome.refusal) for row in rows),
        "failed": sum(bool(row.outcome.failure) for row in rows),
        "not_yet_tried": recipes_read - len(rows),
    }


def write(path: Path, rows: list[Row], recipes_read: int) -> None:
    content = {
        "command": COMMAND,
        "megatron_core": version("megatron-core"),
        "summary": summary(rows, recipes_read),
        "rows": {row.name: row.content() for row in rows},
    }
    write_text(path, json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--megatron", type=Path, required=True, metavar="PATH", help="a checkout of Megatron-LM")
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="only these, also if they were trained before")
    parser.add_argument("--limit", type=float, default=240, metavar="S", help="seconds for each start of a training")
    parser.add_argument("--minutes", type=float, metavar="M", help="begin no other recipe after so long")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and reports in this new folder")
    options = parser.parse_args()
    try:
        found = read(options.megatron.resolve())
        before = earlier(options.json) if options.json is not None else {}
        rows = {name: row(name, content) for name, content in before.items()}
        if options.keep is not None:
            options.keep.mkdir(parents=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        parser.error(str(error))
    by_name = {recipe.name: recipe for recipe in found}
    unknown = sorted({*(options.recipes or ())} - {*by_name})
    if unknown:
        parser.error(f"--recipes {unknown[0]}: no such recipe with a pipeline in {options.megatron}")
    for name in options.recipes or ():
        rows.pop(name, None)
    for done in rows.values():
        print("\n".join(done.told()), flush=True)
    wanted = [by_name[name] for name in options.recipes or by_name if name not in rows]
    end = time.monotonic() + (options.minutes or 1e9) * 60
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the training and its folder go too
    with tempfile.TemporaryDirectory(prefix="pipefill-", dir="/var/tmp") as scratch, warm_ranks():
        base = options.keep or Path(scratch)
        base.chmod(0o755)  # the jobs run as a user without rights
        for recipe in wanted:
            if time.monotonic() > end:
                break
            folder = base / recipe.name
            folder.mkdir(mode=0o755)
            done = check(recipe, list(rows.values()), options.megatron.resolve(), folder, options.limit)
            rows[recipe.name] = done
            print("\n".join(done.told()), flush=True)
            if options.json is not None:
                write(options.json, [rows[name] for name in by_name if name in rows], len(found))
    print(json.dumps(summary(list(rows.values()), len(found)), indent=2))
    sys.exit(any(not (row.outcome.well or row.outcome.refusal) for row in rows.values()))


if __name__ == "__main__":
    main()
