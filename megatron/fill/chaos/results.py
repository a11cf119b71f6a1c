"""The outcome of a chaos run: a table, and the same as JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron.fill.chaos import measure
from megatron.fill.chaos.campaign import Findings
from megatron.fill.chaos.kinds import Kind
from megatron.fill.report import Slowdown
from megatron.fill.types import Iteration


@dataclass(frozen=True, slots=True)
class KindResult:
    """One row.

    Attributes:
        main_failures, loss_differences: trainings that failed, and losses that differ, shortly after such a fault.
        slowdown: of the iterations that overlap such a fault; 0.01 is 1%; None if there are none.
        recovery_s: the median; None if no worker followed at that rank.
    """

    kind: str
    injected: int
    main_failures: int
    loss_differences: int
    jobs_lost: int
    slowdown: float | None
    recovery_s: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a chaos run.

    Attributes:
        wanted: how many faults there should have been.
        not_run: the kinds that could not be injected here, and why.
    """

    wanted: int
    kinds: Sequence[KindResult]
    not_run: Mapping[str, str]
    findings: Findings
    slowdown: Slowdown | None
    recoveries: Sequence[measure.Recovery]
    seen: Sequence[Iteration]

    @property
    def summary(self) -> dict[str, Any]:
        """The totals, in plain data."""
        findings = self.findings
        slowed = self.slowdown
        return {
            "injected": sum(one.injected for one in self.kinds),  # the tasks' marks are gone by now
            "kinds": sum(one.injected > 0 for one in self.kinds),
            "main_failures": sum(bool(segment.failure) for segment in findings.segments),
            "loss_differences": sum(len(segment.differing) for segment in findings.segments),
            "jobs_lost": len(findings.lost),
            "jobs": len(findings.jobs),
            "leaked_processes": len(findings.leaked),
            "trainings": len(findings.segments),
            "iterations": len(self.seen),
            "slowdown": slowed and {"mean": slowed.mean, "ci95": list(slowed.ci95), "pairs": slowed.pairs},
            "recovery_s": _spread([one.seconds for one in self.recoveries]),
            "startup_s": _spread([one.startup_s for one in self.recoveries if one.startup_s is not None]),
        }

    @property
    def passed(self) -> bool:
        """Whether every fault was injected, and none did any harm."""
        summary = self.summary
        harm = ("main_failures", "loss_differences", "jobs_lost", "leaked_processes")
        return summary["injected"] >= self.wanted and not any(summary[name] for name in harm)

    def as_dict(self, command: str) -> dict[str, Any]:
        """All of it, in plain data."""
        return {
            "command": command,
            "summary": self.summary,
            "kinds": [asdict(one) for one in self.kinds],
            "not_run": [{"kind": kind, "why": why} for kind, why in self.not_run.items()],
            "lost": [asdict(one) for one in self.findings.lost],
        }


def compile_result(findings: Findings, kinds: Sequence[Kind], wanted: int, not_run: Mapping[str, str]) -> Result:
    """Count and measure what a chaos run saw, from its run folders.

    Args:
        kinds: those that were injected.
    """
    seen = measure.iterations(segment.run_dir for segment in findings.segments)
    recovered = measure.recoveries(findings)
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for one in recovered:
        seconds[one.kind].append(one.seconds)
    injected, slowed = findings.injected(), measure.slowdown_by_kind(findings, seen)
    lost = Counter(one.kind for one in findings.lost)
    failures, differences = _harm(findings, seen)
    rows = [
        KindResult(
            kind=kind.name,
            injected=injected[kind.name],
            main_failures=failures[kind.name],
            loss_differences=differences[kind.name],
            jobs_lost=lost[kind.name],
            slowdown=slowed.get(kind.name),
            recovery_s=median(seconds[kind.name]) if seconds[kind.name] else None,
        )
        for kind in kinds
    ]
    return Result(wanted, rows, not_run, findings, measure.slowdown(findings.windows, seen), recovered, seen)


def _harm(findings: Findings, seen: Sequence[Iteration]) -> tuple[Counter[str], Counter[str]]:
    """Trainings that failed, and losses that differ, by the kinds of the faults just before."""
    failures: Counter[str] = Counter()
    differences: Counter[str] = Counter()
    for segment in findings.segments:
        if segment.failure:
            failures.update(measure.blamed(findings, segment.end_ns))
        if segment.differing:
            first = min(segment.differing)  # all after it follow from it
            ends = [
                one.end_ns
                for one in seen
                if one.iteration == first and segment.start_ns <= one.start_ns <= segment.end_ns
            ]
            for kind in measure.blamed(findings, ends[0] if ends else segment.end_ns):
                differences[kind] += len(segment.differing)
    return failures, differences


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {
        "median": float(median(values)),
        "p95": float(np.percentile(values, 95)),
        "max": max(values),
        "count": len(values),
    }


def print_result(result: Result, console: Console) -> None:
    """A row per kind, what was not run, and the totals; readable at 80 columns."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("FAULT", overflow="fold", min_width=12)
    for heading in ("INJECTED", "MAIN JOB\nFAILED", "LOSSES\nDIFFER", "JOBS\nLOST", "SLOWDOWN\n%", "NEXT JOB\nAFTER S"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in result.kinds:
        table.add_row(
            one.kind,
            str(one.injected),
            str(one.main_failures),
            str(one.loss_differences),
            str(one.jobs_lost),
            "-" if one.slowdown is None else f"{100 * one.slowdown:.1f}",
            "-" if one.recovery_s is None else f"{one.recovery_s:.2f}",
        )
    console.print(table)
    for kind, why in result.not_run.items():
        console.print(f"not run: {kind}: {why}", highlight=False)
    for lost in result.findings.lost:
        console.print(f"lost: {lost.job}: {lost.why}", highlight=False, markup=False)
    _print_totals(result, console)


def _print_totals(result: Result, console: Console) -> None:
    total = result.summary
    console.print(
        f"{total['injected']} faults of {total['kinds']} kinds in {total['trainings']} trainings and {total['jobs']} "
        f"jobs: {total['main_failures']} trainings failed, {total['loss_differences']} losses differ, "
        f"{total['jobs_lost']} jobs were lost, {total['leaked_processes']} processes were left",
        highlight=False,
    )
    slowed, after, startup = total["slowdown"], total["recovery_s"], total["startup_s"]
    if slowed:
        low, high = (100 * value for value in slowed["ci95"])
        console.print(
            f"slowdown while faults were injected: {100 * slowed['mean']:.2f}% (95% interval {low:.2f} to {high:.2f}, "
            f"{slowed['pairs']} pairs of windows)",
            highlight=False,
        )
    if after:
        began = f", and its start-up took {startup['median']:.2f} s" if startup else ""
        console.print(
            f"the next worker started {after['median']:.2f} s after the end of the last (median; 95% within "
            f"{after['p95']:.2f} s){began}",
            highlight=False,
        )
