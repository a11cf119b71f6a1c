"""Do trainings that are more than a pipeline go on to the bit, and are their bubbles filled?

Each row is a tiny GPT on the CPU with flags of Megatron's own.  It is trained with a job on every rank, until each of
them has stepped, and then as long with none of PipeFill but its CPU backend.  Said of a row is whether the losses of
all iterations are equal to the bit, how much of the time was bubbles, how many steps the jobs did, and whether the
report knows the stage of each rank and sees the same bubbles on all ranks of a stage.  Where Megatron itself does not
train on a CPU, its error is shown.

    python scripts/benchmarks/check_parallelism.py --json docs/benchmarks/parallelism.json

Rows that are in the file already and are not checked now stay in it.  Exits with 1 where a row fails.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.e2e.training import ENDLESS, UPSTREAM, Trained, start, stepped, train_until, warm_ranks, write_jobs  # noqa: E402

MODEL = "--num-layers 2 --hidden-size 32 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1"
ITERATIONS = 10  # at least
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --swiglu --disable-bias-linear "
    "--expert-model-parallel-size 2"
)
INTERLEAVED = "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
TENSOR, CONTEXT, SHARDED = "--tensor-model-parallel-size 2", "--context-parallel-size 2", "--use-distributed-optimizer"
OVERLAPPED = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"


@dataclass(frozen=True, slots=True)
class Row:
    """A training of two stages: how many ranks, and its flags besides the model's."""

    ranks: int
    flags: str = ""


ROWS: dict[str, Row] = {
    "tensor": Row(4, TENSOR),
    "tensor-sequence": Row(4, f"{TENSOR} --sequence-parallel"),
    "data": Row(4),
    "data-overlapped": Row(4, "--overlap-grad-reduce"),
    "data-unaligned": Row(4, f"{SHARDED} --overlap-grad-reduce --no-align-grad-reduce"),
    "distributed-optimizer": Row(4, SHARDED),
    "distributed-optimizer-overlapped": Row(4, OVERLAPPED),
    "context": Row(4, CONTEXT),
    "experts-alltoall": Row(4, f"{MOE} --moe-token-dispatcher-type alltoall"),
    "experts-allgather": Row(4, f"{MOE} --moe-token-dispatcher-type allgather"),
    "tensor-data": Row(8, f"{TENSOR} --sequence-parallel {OVERLAPPED}"),
    "tensor-data-gpipe": Row(8, f"{TENSOR} --fill-pipeline-schedule gpipe"),
    "tensor-pipeline-data-order": Row(8, f"{TENSOR} --use-tp-pp-dp-mapping"),
    "tensor-context": Row(8, f"{TENSOR} --sequence-parallel {CONTEXT}"),
    "tensor-experts": Row(8, f"{TENSOR} --sequence-parallel {MOE} --moe-token-dispatcher-type alltoall"),
    "context-data-experts": Row(8, f"{CONTEXT} {MOE} --moe-token-dispatcher-type alltoall {SHARDED}"),
    "interleaved-data": Row(4, f"{INTERLEAVED} {OVERLAPPED}"),
    "interleaved-tensor": Row(4, f"{INTERLEAVED} {TENSOR} --sequence-parallel"),
    "interleaved-flush": Row(2, f"{INTERLEAVED} --overlap-p2p-communication-warmup-flush"),
    "interleaved-groups": Row(2, f"{INTERLEAVED} --microbatch-group-size-per-virtual-pipeline-stage 4"),
    "interleaved-experts": Row(4, f"{INTERLEAVED} {MOE} --moe-token-dispatcher-type alltoall"),
    "interleaved-experts-overlapped": Row(
        4,
        f"{INTERLEAVED} {MOE} --moe-token-dispatcher-type alltoall --bf16 --overlap-moe-expert-parallel-comm",
    ),
    "recompute-full": Row(2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "recompute-selective": Row(2, "--recompute-granularity selective"),
    "llama": Row(
        2,
        "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
        "--group-query-attention --num-query-groups 2",
    ),
    "bf16": Row(4, "--bf16"),
    "fp16": Row(4, "--fp16"),
    "uneven-first": Row(2, "--num-layers 4 --decoder-first-pipeline-num-layers 1"),
    "uneven-last": Row(2, "--num-layers 4 --decoder-last-pipeline-num-layers 1"),
    "uneven-layout": Row(2, "--num-layers 3 --pipeline-model-parallel-layout Et|ttL"),
    "embedding-counted": Row(2, "--num-layers 3 --account-for-embedding-in-pipeline-split"),
    "loss-counted": Row(2, "--num-layers 3 --account-for-loss-in-pipeline-split"),
    "untied-embeddings": Row(2, "--untie-embeddings-and-output-weights"),
    "more-tokens": Row(2, "--mtp-num-layers 1 --position-embedding-type rope --use-rotary-position-embeddings"),
    "evaluations": Row(4, "--eval-interval 3 --eval-iters 2"),
    "loss-per-token": Row(4, "--calculate-per-token-loss"),
    "zeros-and-norm": Row(2, "--log-num-zeros-in-grad --log-params-norm"),
    "memory-emptied": Row(2, "--empty-unused-memory-level 2"),
    "embedding-deferred": Row(2, "--defer-embedding-wgrad-compute"),
    "optimizer-instances": Row(
        8, f"{SHARDED} --num-distributed-optimizer-instances 2 --overlap-grad-reduce --calculate-per-token-loss"
    ),
    "gather-with-step": Row(
        4, f"{INTERLEAVED} {OVERLAPPED} --overlap-param-gather-with-optimizer-step --ckpt-format torch"
    ),
}


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
    seconds: float = 0.0
    error: str = ""

    @property
    def well(self) -> bool:
        return self.identical and self.stages_right and self.peers_alike and bool(self.steps) and min(self.steps) > 0


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
    """Train until a job on each rank has stepped, and for some iterations."""
    names, filling = spins(folder, row.ranks)
    flags = f"{MODEL} {row.flags} {filling}"
    return train_until(folder, flags, dict.fromkeys(names, stepped), iterations, ranks=row.ranks, rest_ms=rest_ms)


def spins(folder: Path, ranks: int) -> tuple[list[str], str]:
    """The names of jobs without an end, one for each rank, and the flags that fill with them."""
    names = [f"spin-{number}" for number in range(ranks)]
    jobs = [{"name": name, "task": "tasks:Spin", "args": {"milliseconds": 0.2}} for name in names]
    # No brake: what it leaves unfilled to compare with is a good part of so short a run.
    settings = "--fill-warmup-iterations 3 --fill-max-slowdown 0 --fill-min-bubble-us 300"
    return names, f"{write_jobs(folder, *jobs)} {settings}"


def train_upstream(row: Row, folder: Path, iterations: int) -> str:
    """Train for so many iterations with no patch but the CPU backend; the error if it fails."""
    flags = re.sub(r"--fill-\S+ \S+", "", row.flags)
    process = start(folder, f"{MODEL} {flags} --exit-interval {iterations}", ENDLESS, UPSTREAM, row.ranks)
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
    }
    result = {"command": "python scripts/benchmarks/check_parallelism.py", "summary": summary, "rows": rows}
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
