"""The pipeline simulator against published measurements: the bubble rates of Qi et al. 2023 (arXiv 2401.10241).

Their Table 9 has the profiled times of F, B and W on 8 to 32 A100s, in ms, and the time of a transfer; their Table 5
the bubble rates of 1F1B and ZB-H1. Times go in here, rates come out: the rate is what is left of
the longest rank's time from its first to its last pass without its passes (their section 5.3), so optimizer and
reduction do not count.

    python scripts/benchmarks/sim_zero_bubble.py
"""

from __future__ import annotations

from typing import Any

from megatron.fill.pipeline.costs import PipelineCosts
from megatron.fill.pipeline.schedules import make_schedule
from megatron.fill.pipeline.timeline import simulate

# model, stages, micro-batches; F, B, W and transfer in ms; bubble rate of 1F1B and of ZB-H1
PUBLISHED = (
    ("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585),
    ("1.5B", 8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242),
    ("1.5B", 8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674),
    ("6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323),
    ("6.2B", 8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045),
    ("6.2B", 8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554),
    ("14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397),
    ("14.6B", 16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088),
    ("14.6B", 16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576),
    ("28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421),
    ("28.3B", 32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106),
    ("28.3B", 32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594),
)


def study() -> list[dict[str, Any]]:
    """A row per published configuration."""
    rows = []
    for model, stages, microbatches, forward, backward, weight, p2p, *published in PUBLISHED:
        forward_ns, backward_ns, weight_ns = (round(ms * 1e6) for ms in (forward, backward + weight, weight))
        costs = PipelineCosts.uniform(stages, forward_ns, backward_ns, weight_ns, p2p_ns=round(p2p * 1e6))
        row: dict[str, Any] = {"model": model, "stages": stages, "microbatches": microbatches}
        for name, rate in zip(("1f1b", "zb-h1"), published, strict=True):
            timeline = simulate(make_schedule(name, stages, microbatches), costs)
            longest_ns = max(spans[-1].end_ns - spans[0].start_ns for spans in timeline.spans)
            row[name] = 1 - microbatches * (forward_ns + backward_ns) / longest_ns
            row[f"{name}_published"] = rate
        rows.append(row)
    return rows


def print_study(rows: list[dict[str, Any]]) -> None:
    print("model  stages micro-batches   1F1B  published   ZB-H1  published")
    for row in rows:
        print(
            f"{row['model']:6} {row['stages']:6} {row['microbatches']:13} {row['1f1b']:6.1%}"
            f" {row['1f1b_published']:10.1%} {row['zb-h1']:7.1%} {row['zb-h1_published']:10.1%}"
        )


if __name__ == "__main__":
    print_study(study())
