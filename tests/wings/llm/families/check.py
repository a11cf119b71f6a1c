"""Does the engine generate the library's own tokens with every family of causal language models?

For each family of ``AutoModelForCausalLM`` that the installed ``transformers`` can build here: a tiny model with random
weights, greedily, in five ways (alone, in a batch, with prompts in chunks, with token trees, with long sequences).

    python -m tests.wings.llm.families.check --json docs/benchmarks/models.json

A family is ``equal`` in all ways, ``refused`` by the product when it loads the model, or ``differs``; or no tiny config
of it fits (``not built``), or its process did not end (``not compared``).  Results are written after each family; those
that are in the file already, of the same versions, are not computed again but for those named by --families.  Exits
with 1 where a family differs.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from megatron.fill.linux.files import write_text
from scripts.benchmarks import harness
from tests.wings.llm.families import compared, tiny

COMMAND = "python -m tests.wings.llm.families.check --json docs/benchmarks/models.json"
NOT_COMPARED = "not compared"
_WALL = 4  # seconds that may pass for each one of a limit of CPU time: other processes may keep a machine busy
STATUSES = (
    compared.EQUAL,
    compared.REFUSED,
    compared.DIFFERS,
    compared.NOT_BUILT,
    NOT_COMPARED,
)


@dataclass(slots=True)
class _Running:
    process: Any
    connection: Connection
    begun: float
    doing: str = "building it"


def main() -> int:
    arguments = _arguments()
    found = earlier(arguments.json, _versions())
    named = arguments.families or [name for name in tiny.families() if name not in found]
    for name, result in _all(named, arguments):
        found[name] = result
        print(f"{name:28} {result['status']:12} {result['reason'][:120]}", flush=True)
        if arguments.json:
            write_text(arguments.json, json.dumps(_content(found), indent=1) + "\n")
    print(", ".join(f"{number} {status}" for status, number in _counts(found).items()))
    return 1 if _counts(found)[compared.DIFFERS] else 0


def _arguments() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    parser.add_argument("--families", nargs="+", help="model types; without: all that the file does not have")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="begin no family after so long")
    parser.add_argument(
        "--limit-seconds", type=float, default=25.0, help=f"of CPU time for each family, and {_WALL} times that in all"
    )
    parser.add_argument("--processes", type=int, default=2, help="at a time")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.families or ()) - set(tiny.families())):
        parser.error(f"--families {' '.join(unknown)}: transformers {version('transformers')} has no such model type")
    if arguments.processes < 1:
        parser.error(f"--processes is {arguments.processes}; expected 1 or more")
    return arguments


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("transformers", "torch", "pipefill")}


def earlier(path: Path | None, versions: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The families that a file has, if they are of these versions.

    Raises:
        ValueError: the file is none of this program.
    """
    if path is None or not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not {"versions", "families"} <= set(content):
        raise ValueError(f"{path} has no versions and families; expected a file that was written by --json")
    return dict(content["families"]) if content["versions"] == versions else {}


def _counts(found: dict[str, dict[str, Any]]) -> dict[str, int]:
    counts = Counter(result["status"] for result in found.values())
    return {status: counts[status] for status in STATUSES}


def _content(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "command": COMMAND,
        "versions": _versions(),
        "summary": {"families": len(found), **_counts(found), "ties": sum(one["ties"] for one in found.values())},
        "ways": {name: asdict(way) for name, way in compared.WAYS.items()},
        "families": {name: found[name] for name in sorted(found)},
    }


def _all(names: list[str], arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each family's result as it comes, from a process of its own."""
    # Imported once and forked, before anything is computed: these imports take seconds.
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: F401

    from megatron.fill.wings.llm import engine, models, selfcheck, verify  # noqa: F401

    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    end = time.monotonic() + arguments.budget_seconds
    left, running = list(reversed(names)), dict[str, _Running]()
    while left or running:
        while left and len(running) < arguments.processes and time.monotonic() < end:
            name = left.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(name, theirs, arguments.limit_seconds))
            process.start()
            theirs.close()
            running[name] = _Running(process, ours, time.monotonic())
        if not running:
            print(f"{len(left)} families are left for another call")
            return
        wait([one.connection for one in running.values()], timeout=0.5)
        for name, one in list(running.items()):
            if (result := _result(one, arguments.limit_seconds)) is not None:
                del running[name]
                yield name, result


def _result(one: _Running, limit_s: float) -> dict[str, Any] | None:
    """What a process has found; None while it goes on."""
    outcome, why = None, ""
    try:
        while outcome is None and one.connection.poll():
            told = one.connection.recv()
            if isinstance(told, str):
                one.doing = told
            else:
                outcome = told
    except EOFError:
        one.process.join()
        code = one.process.exitcode
        limit = f"it took more than {limit_s:g} s of CPU time" if code == -signal.SIGXCPU else ""
        why = f"{limit or f'its process ended with exit code {code}'}, at last with {one.doing}"
    seconds = time.monotonic() - one.begun
    if outcome is None and not why and seconds > _WALL * limit_s:
        why = f"it took more than {_WALL * limit_s:g} s, at last with {one.doing}"
    if outcome is None and not why:
        return None
    one.process.kill()
    one.process.join()
    outcome = outcome or compared.Outcome(NOT_COMPARED, why)
    return {**asdict(outcome), "seconds": round(seconds, 1)}


def _child(family: str, connection: Connection, limit_s: float) -> None:
    used = sum(os.times()[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used + limit_s), resource.RLIM_INFINITY))
    connection.send(compared.compare(family, connection.send))


if __name__ == "__main__":
    os.environ.update(
        HF_HUB_DISABLE_PROGRESS_BARS="1", OMP_NUM_THREADS="1", TRANSFORMERS_VERBOSITY="error", PYTHONWARNINGS="ignore"
    )
    sys.exit(main())
