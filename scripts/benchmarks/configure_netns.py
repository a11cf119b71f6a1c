"""Four ranks on four hosts with unequal links, for real: is the chosen order of ranks the fastest?

The hosts are network namespaces of this machine, linked pair by pair (``netns.py``).  ``pipefill network`` measures
them, one profiled training of pp=4 in the hosts' own order says what passes take, and from both the iteration of each
of the 24 orders is predicted, for pp=4 and for pp=2 with dp=2.  The order that annealing chooses, the hosts' own, the
one predicted to be the worst, and others between are then trained (``--fill-rank-order``).
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megatron.fill.pipeline.schedules import make_schedule
from megatron.fill.records import last_segment
from megatron.fill.types import RankRecord
from megatron.fill.wings.configure.dedicate import anneal
from megatron.fill.wings.configure.energy import Energy
from megatron.fill.wings.configure.flags import layout_flags, read_flags
from megatron.fill.wings.configure.latency import iteration, timeline
from megatron.fill.wings.configure.layout import lay_out
from megatron.fill.wings.configure.links import Links
from megatron.fill.wings.configure.network import Network
from megatron.fill.wings.configure.passes import Passes, profile_of
from megatron.fill.wings.configure.space import padded
from megatron.fill.wings.mainjob.hardware import GPUS
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Precision
from megatron.fill.wings.sim.recorded.busy import RecordedMainJob
from scripts.benchmarks.forked import ForkedRanks, preload
from scripts.benchmarks.netns import INTERFACE, address, linked, why_not

HOSTS = 4
MBITS = {(0, 1): 20, (0, 2): 130, (0, 3): 50, (1, 2): 33, (1, 3): 100, (2, 3): 27}  # both ways
# Little is computed for what is sent, a megabyte from stage to stage: four ranks may have fewer cores, on which passes
# of several replicas take longer than those of the one that is profiled.
MODEL = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 64 --num-attention-heads 1 --seq-length 16 --vocab-size 127 "
    "--global-batch-size 1024 --untie-embeddings-and-output-weights"
)
REST = (
    "--max-position-embeddings 16 --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --lr-decay-style constant "
    "--mock-data --tokenizer-type NullTokenizer --eval-iters 0 --eval-interval 100000 --log-interval 1 "
    '--fill-profile-only --fill-settings {"trace_iterations":1000}'
)
SIZES = "8,64KiB,1MiB"
WARMUP = 2  # iterations that do not count
LIMIT_S = 200.0

type Order = tuple[int, ...]

LAYOUTS = {
    f"pp={pp} dp={dp}": Parallel(pp=pp, dp=dp, microbatch=256, global_batch=1024, precision=Precision.FP32)
    for pp, dp in ((4, 1), (2, 2))
}
PROFILED = LAYOUTS["pp=4 dp=1"]


class Hosts:
    """The namespaces, and what runs in them."""

    def __init__(self, folder: Path, files: Sequence[int]) -> None:
        self._folder, self._files = folder, files
        self._started = 0

    def run(self, program: Sequence[str]) -> Path:
        """A program in all of them, to its end; its folder."""
        self._started += 1
        folder = self._folder / str(self._started)
        folder.mkdir()
        shared = {"MASTER_ADDR": address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": INTERFACE}
        program = [part.format(folder=folder) for part in program]
        ranks = ForkedRanks(program, folder / "log", HOSTS, shared, self._files)
        try:
            ranks.wait(LIMIT_S)
        except BaseException:
            ranks.kill()
            raise
        return folder

    def network(self) -> Network:
        """As ``pipefill network`` measures it."""
        pipefill = str(Path(sys.executable).parent / "pipefill")
        folder = self.run(
            [pipefill, "network", "--output", "{folder}/network.json", "--sizes", SIZES, "--repeats", "2"]
        )
        return Network.load(folder / "network.json")

    def train(self, its: Parallel, order: Order, iterations: int) -> list[RankRecord]:
        """With physical ranks in an order; what the ranks saw."""
        path = self._folder / "order.json"
        path.write_text(json.dumps({"order": order}), encoding="utf-8")
        flags = [*MODEL.split(), *layout_flags(its), *REST.split(), "--train-iters", str(iterations + WARMUP + 1)]
        flags += ["--fill-rank-order", str(path), "--fill-report", "{folder}/run"]
        return list(last_segment(self.run(["pretrain_gpt.py", *flags]) / "run").records())


class Predictor:
    """Predicts the iteration of each order."""

    def __init__(self, network: Network, passes: Passes) -> None:
        self.links, self.passes = Links.measured(network, HOSTS - 1), passes

    def iteration_s(self, its: Parallel, order: Order) -> float:
        layout = lay_out(self.links, its, order)
        return timeline(iteration(model(), GPUS["a100-80gb"], 1.0, its, layout, self.passes)).period_ns / 1e9

    def chosen(self, its: Parallel) -> Order:
        energy = Energy(model(), GPUS["a100-80gb"], 1.0, its, self.links, self.passes)
        return min(anneal(energy, its, 1, seed=0, moves=2000).orders, key=lambda order: self.iteration_s(its, order))


def model() -> ModelSpec:
    return padded(read_flags(MODEL.split()), 1)


def passes_of(records: Sequence[RankRecord]) -> Passes:
    """From a training of ``PROFILED``.  The hosts share one clock, which no real ones do."""
    job = RecordedMainJob(records, make_schedule("1f1b", PROFILED.pp, PROFILED.microbatches))
    samples = [one for one in job.samples if one.iteration > WARMUP]
    return Passes([profile_of(job, model(), PROFILED, samples)])


def period_s(records: Sequence[RankRecord]) -> float:
    """The median time from one iteration's start to the next one's."""
    starts = [one.start_ns for one in records[0].iterations if one.iteration > WARMUP]
    return median((after - before) / 1e9 for before, after in pairwise(starts))


def sample(predicted: dict[Order, float], chosen: Order, count: int) -> list[Order]:
    """The chosen order, the hosts' own, the worst, and others evenly between the best and the worst."""
    ranked = sorted(predicted, key=lambda order: (predicted[order], order))
    found = [chosen, tuple(range(HOSTS)), ranked[-1]]
    places = [round(at * (len(ranked) - 1) / max(1, count - 1)) for at in range(count)]
    found += [ranked[place] for place in places]
    found = list(dict.fromkeys(found))[: max(3, count)]
    random.Random(0).shuffle(found)  # so that a drift of the machine favours none
    return found


def measure_netns(folder: Path, iterations: int, orders: int) -> dict[str, Any]:
    """Measure, predict, and train.

    Args:
        iterations: of each training, that count.
        orders: of each layout, that are trained.

    Returns:
        ``netns_lacks`` alone, if there can be no namespaces here.
    """
    lacks = why_not()
    if lacks:
        return {"netns_lacks": lacks}
    preload()
    bits = [[1e6 * MBITS.get((min(a, b), max(a, b)), 0) for a in range(HOSTS)] for b in range(HOSTS)]
    with linked(bits) as files:
        hosts = Hosts(folder, files)
        network = hosts.network()
        predictor = Predictor(network, passes_of(hosts.train(PROFILED, tuple(range(HOSTS)), iterations)))
        rows = {name: _measure(hosts, predictor, its, iterations, orders) for name, its in LAYOUTS.items()}
    errors = [abs(one["error"]) for row in rows.values() for one in row["orders"]]
    speeds = [network.bandwidth_bytes_per_s[a][b] or 0.0 for a, b in itertools.permutations(range(HOSTS), 2)]
    return {
        "netns_error": fmean(errors),
        "netns_worst_error": max(errors),
        "netns_rank": max(row["rank"] for row in rows.values()),
        "netns_over_best": max(row["chosen_over_best"] for row in rows.values()),
        "netns_links_mbit": [round(min(speeds) * 8e-6), round(max(speeds) * 8e-6)],
        "netns": rows,
    }


def _measure(hosts: Hosts, predictor: Predictor, its: Parallel, iterations: int, orders: int) -> dict[str, Any]:
    predicted = {order: predictor.iteration_s(its, order) for order in itertools.permutations(range(HOSTS))}
    chosen, identity = predictor.chosen(its), tuple(range(HOSTS))
    measured = {order: period_s(hosts.train(its, order, iterations)) for order in sample(predicted, chosen, orders)}
    worst = max(predicted, key=lambda order: (predicted[order], order))
    return {
        "chosen": list(chosen),
        "rank": 1 + sum(measured_s < measured[chosen] for measured_s in measured.values()),
        "chosen_over_best": measured[chosen] / min(measured.values()) - 1,
        "identity_over_chosen": measured[identity] / measured[chosen],
        "worst_over_chosen": measured[worst] / measured[chosen],
        "orders": [
            {
                "order": list(order),
                "measured_s": measured_s,
                "predicted_s": predicted[order],
                "error": predicted[order] / measured_s - 1,
            }
            for order, measured_s in sorted(measured.items(), key=lambda one: one[1])
        ],
    }
