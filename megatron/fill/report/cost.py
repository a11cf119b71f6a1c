"""Cost of filling to the training and the saving from it, as defined by FreeRide (arXiv 2409.06941, and its artifact's
``analyze_cost.ipynb``).

With T the time of the training, W the side work, Th its throughput on a cheaper device, and P the prices::

    time increase I = (T_with - T_without) / T_without
    saving        S = (sum W / Th * P_side - (T_with - T_without) * P_main) / (T_without * P_main)
                    = sum W / Th * P_side / (T_without * P_main) - I

One run measures I in its paired blocks and T_with in its iterations with filling, hence T_without = T_with / (1 + I).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from megatron.fill.report.part import JobWork
from megatron.fill.report.schema import Cost, HourPrices, JobReport, SideWork, Slowdown
from megatron.fill.types import Prices

_S = 1e9  # nanoseconds
_NAMED = 3  # jobs named in a message


def cost_of(
    with_s: float,
    slowdown: Slowdown | None,
    done: Mapping[str, JobWork],
    jobs: Sequence[JobReport],
    prices: Prices | None,
    paired: bool = False,
) -> Cost:
    """Return the cost and the saving as far as they are known, and the inputs that are missing.

    Args:
        with_s: seconds of training in iterations with filling on.
        done: work of each job, in bubbles and alone, by name.
        jobs: reports of the jobs, with the throughputs that the user stated.
        paired: True if the run had paired blocks, so that no advice to turn them on is given.
    """
    stated = {job.name: job.side_throughput for job in jobs}
    work = [_side_work(job, its, stated.get(job)) for job, its in done.items() if its.work > 0]
    lacking = list(_lacking(with_s, slowdown, work, prices, paired))
    saving = low = high = None
    if not lacking:
        assert prices is not None
        assert slowdown is not None
        worth = sum(one.side_s or 0.0 for one in work) * prices.side / (with_s * prices.main)
        # The saving is linear in I, so its interval ends where that of I does.
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
    side_s, measured = done.work / throughput if throughput else None, stated is None and alone is not None
    return SideWork(job=job, throughput=throughput, measured=measured, side_s=side_s)


def _lacking(
    with_s: float, slowdown: Slowdown | None, work: Sequence[SideWork], prices: Prices | None, paired: bool
) -> Iterator[str]:
    if prices is None:
        yield "prices (pipefill report --price, or the setting price)"
    if slowdown is None:
        yield "two whole blocks with and without filling" if paired else "the slowdown (--fill-paired-blocks)"
    if not with_s:
        yield "iterations with filling"
    unknown = [one.job for one in work if one.throughput is None]
    if unknown:
        names = ", ".join(unknown[:_NAMED]) + (", ..." if len(unknown) > _NAMED else "")
        yield f"the throughput of {names} (side_throughput in the jobs file, or the setting baseline_seconds)"
