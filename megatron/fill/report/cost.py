"""What filling cost the training and what it saved, as FreeRide has it (arXiv 2409.06941, and its artifact's
``analyze_cost.ipynb``).

With T the time of the training, W the side work, Th its throughput on a cheaper device, and P the prices::

    time increase I = (T_with - T_without) / T_without
    saving        S = (sum W / Th * P_side - (T_with - T_without) * P_main) / (T_without * P_main)
                    = sum W / Th * P_side / (T_without * P_main) - I

One run tells I from its paired blocks and T_with from its iterations with filling, and so T_without = T_with / (1 + I).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from megatron.fill.report.part import JobWork
from megatron.fill.report.schema import Cost, HourPrices, JobReport, SideWork, Slowdown
from megatron.fill.types import Prices

_S = 1e9  # nanoseconds
_NAMED = 3  # jobs


def cost_of(
    with_s: float,
    slowdown: Slowdown | None,
    done: Mapping[str, JobWork],
    jobs: Sequence[JobReport],
    prices: Prices | None,
    paired: bool = False,
) -> Cost:
    """What can be said of the cost.

    Args:
        with_s: how long the training was in iterations with filling, in seconds.
        done: by job, in bubbles and alone.
        jobs: for the throughputs that the user stated.
        paired: the run had blocks with and without filling, so that another flag would not help.
    """
    stated = {job.name: job.side_throughput for job in jobs}
    work = [_side_work(job, its, stated.get(job)) for job, its in done.items() if its.work > 0]
    lacking = list(_lacking(with_s, slowdown, work, prices, paired))
    saving = low = high = None
    if not lacking:
        assert prices is not None
        assert slowdown is not None
        worth = sum(one.side_s or 0.0 for one in work) * prices.side / (with_s * prices.main)
        # In I it is a straight line, so its ends are at those of I.
        saving, *ends = (worth * (1 + increase) - increase for increase in (slowdown.mean, *slowdown.ci95))
        low, high = sorted(ends)
    return Cost(
        with_s=with_s or None,
        without_s=with_s / (1 + slowdown.mean) if with_s and slowdown else None,
        time_increase=slowdown.mean if slowdown else None,
        time_increase_ci95=slowdown.ci95 if slowdown else None,
        saving=saving,
        saving_ci95=None if low is None or high is None else (low, high),
        prices=None if prices is None else HourPrices(**asdict(prices)),
        work=work,
        lacking=lacking,
    )


def _side_work(job: str, done: JobWork, stated: float | None) -> SideWork:
    alone = done.alone_work / done.alone_ns * _S if done.alone_ns > 0 and done.alone_work > 0 else None
    throughput = stated or alone
    return SideWork(
        job=job,
        throughput=throughput,
        measured=stated is None and alone is not None,
        side_s=done.work / throughput if throughput else None,
    )


def _lacking(
    with_s: float, slowdown: Slowdown | None, work: Sequence[SideWork], prices: Prices | None, paired: bool
) -> Iterator[str]:
    if prices is None:
        yield "prices (--fill-price, or pipefill report --price)"
    if slowdown is None:
        yield "two whole blocks with and without filling" if paired else "the slowdown (--fill-paired-blocks)"
    if not with_s:
        yield "iterations with filling"
    unknown = [one.job for one in work if one.throughput is None]
    if unknown:
        names = ", ".join(unknown[:_NAMED]) + (", ..." if len(unknown) > _NAMED else "")
        yield f"the throughput of {names} (side_throughput in the jobs file, or --fill-baseline-seconds)"
