"""The tables that ``sim_pipefill.py`` prints: per part, from its figures to lines of at most 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

type Rows = Sequence[dict[str, Any]]


def _share(rows: Rows) -> Iterator[str]:
    yield "5B on 128 GPUs: each bubble filled up to a share of its mean length"
    yield "noise        share slowdown harvested overruns  TFLOPS/GPU fill total   worth"
    for row in rows:
        share = "as predicted" if row["share"] is None else f"{row['share']:.0%}"
        main, fill = row["main_tflops"], row["fill_tflops"]
        yield (
            f"{row['noise']:5.0%} {share:>12} {row['slowdown']:8.2%} {row['harvested_share']:9.1%}"
            f" {row['overrun_share']:8.1%} {main:11.2f} {fill:4.1f} {main + fill:5.2f} {row['gpus_worth']:7.1f}"
        )


def _kinds(rows: Rows) -> Iterator[str]:
    yield "40B: a second of bubble in seconds alone, and the configuration of most devices"
    yield "GPUs      each kind                      share configuration"
    for row in rows:
        other = " " if row["configuration"] == row["configuration_alone"] else "*"
        yield (
            f"{row['gpus']:4} {row['gpu']:>9} {row['kind']:25} {row['relative']:5.3f}{other}"
            f"{row['configuration'] or 'fits no bubble'}"
        )
    yield "* alone another one"


def _queues(title: str, column: str) -> Callable[[Rows], Iterator[str]]:
    def lines(rows: Rows) -> Iterator[str]:
        yield title
        yield f"{column:>8} policy     jobs left  mean h median h   p99 h makespan h deadlines met"
        for row in rows:
            met = "" if row["deadlines_met"] is None else f"{row['deadlines_met']:.0%}"
            hours = [_hours(row[name]) for name in ("mean_s", "median_s", "p99_s", "makespan_s")]
            yield (
                f"{row[column]:>8} {row['policy']:9} {row['jobs']:5} {row['unfinished']:4} {hours[0]:>7} {hours[1]:>8}"
                f" {hours[2]:>7} {hours[3]:>10} {met:>13}"
            )

    return lines


def _hours(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds / 3600:.2f}"


def _described(title: str, column: str) -> Callable[[Rows], Iterator[str]]:
    def lines(rows: Rows) -> Iterator[str]:
        yield title
        yield f"{column:>12} schedule    iteration bubbles ideal  free GiB  worth   gain per s"
        for row in rows:
            if "impossible" in row:
                yield f"{row[column]:>12} {row['schedule']:11} memory does not do"
                continue
            free = f"{row['free_gib_least']:.1f}-{row['free_gib_most']:.1f}"
            yield (
                f"{row[column]:>12} {row['schedule']:11} {row['iteration_s']:7.2f} s {row['bubble_share']:7.1%}"
                f" {row['ideal_bubble_share']:5.1%} {free:>9} {row['gpus_worth']:6.0f} {row['gain']:+6.0%}"
                f" {row['per_bubble_second']:5.3f}"
            )

    return lines


def _sensitivity(rows: Rows) -> Iterator[str]:
    yield "40B on 8K GPUs: a second of bubble in seconds alone, and how many kinds fit"
    sizes = list(dict.fromkeys(row["free_gib"] for row in rows))
    fit = {row["free_gib"]: row["kinds_that_fit"] for row in rows if row["length"] == 1}
    yield "length  mean bubble" + "".join(f"{size:>3} GiB" for size in sizes)
    for length in dict.fromkeys(row["length"] for row in rows):
        its = [row for row in rows if row["length"] == length]
        values = "".join(f"{row['per_bubble_second']:7.3f}" for row in its)
        yield f"{length:5g}x {its[0]['mean_bubble_s'] * 1e3:9.0f} ms{values}"
    yield "kinds that fit     " + "".join(f"{fit[size]:7}" for size in sizes)


def _loss(found: dict[str, Any]) -> Iterator[str]:
    yield "40B on 8K GPUs: steps slower in bubbles than alone"
    yield "step efficiency  GPUs' worth, one job    gain  with a tail job"
    for row in found["rows"]:
        yield (
            f"{row['step_efficiency']:15.1f} {row['gpus_worth']:21.0f} {row['gain']:+7.0%}"
            f" {row['gpus_worth_with_tail']:16.0f}"
        )
    for name, value in found["meets_paper_at"].items():
        where = "not between these" if value is None else f"{value:.3f}"
        yield f"the paper's {found['paper_gpus_worth']:,} at a step efficiency of ({name.replace('_', ' ')}): {where}"
    yield f"as many GPUs' worth are a gain of {found['gain_of_paper_gpus_worth']:+.0%} here"


TABLES: dict[str, Callable[[Any], Iterator[str]]] = {
    "share": _share,
    "kinds": _kinds,
    "policies": _queues("5B on 128 GPUs, a day of arrivals", "load"),
    "schedules": _described("40B", "gpus"),
    "sensitivity": _sensitivity,
    "trace": _queues("5B on 128 GPUs, sizes and arrivals shaped like published traces", "arrivals"),
    "physical": _described("5B on 128 GPUs", "microbatches"),
    "loss": _loss,
}
