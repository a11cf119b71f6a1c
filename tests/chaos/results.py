"""The result of a chaos run, in figures and as plain data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np

from megatron.fill.report.schema import Slowdown
from megatron.fill.types import Iteration
from tests.chaos import harm, measure
from tests.chaos.campaign import Findings
from tests.chaos.controls.engine import Controlled
from tests.chaos.kind import FaultKind, Source


@dataclass(frozen=True, slots=True)
class FaultResult:
    """The result of one kind of fault: a row of the table.

    Attributes:
        expected, observed: the required and the observed outcome, in a few words.
        injected: number of independent causes: jobs with such a fault, or actions of the driver.
        marks: number of times the fault was seen to happen; a job that is tried again repeats its own.
        main_failures, loss_differences: trainings that failed, and losses that differ, shortly after such a fault.
        outcomes: number of attacks that went through, were refused, and found no target.
        stalls: iterations that took two seconds more than usual, in or shortly after such a fault.
        longest_s: longest iteration that overlaps such a fault; None if there is none.
        slowed: slowdown of the 100 iterations from such a fault on, against quiet ones; None if unknown.
        slowdown: slowdown of the iterations that overlap such a fault; 0.01 is 1%; None if there are none.
        recovery_s: median of the recoveries; None if no worker followed at that rank.
    """

    kind: str
    expected: str
    observed: str
    injected: int
    marks: int
    main_failures: int
    loss_differences: int
    outcomes: Mapping[str, int]
    jobs_lost: int
    stalls: int
    longest_s: float | None
    slowed: float | None
    slowdown: float | None
    recovery_s: float | None


@dataclass(frozen=True, slots=True)
class ChaosResult:
    """The result of a chaos run.

    Attributes:
        wanted: number of faults that were asked for.
        slowed: kinds after whose faults 100 iterations took more than 5% longer, beyond the noise.
        not_run: reason for each kind that could not be injected here.
        untested: reason for each kind of attack that was not run because its control did not succeed.
        controls: controls of all kinds of attacks.
        never_tried: for each kind of attack that never found a target, the message of one of its jobs.
    """

    wanted: int
    kinds: Sequence[FaultResult]
    not_run: Mapping[str, str]
    findings: Findings
    slowdown: Slowdown | None
    recoveries: Sequence[measure.Recovery]
    seen: Sequence[Iteration]
    stalls: Sequence[harm.Stall]
    slowed: Sequence[str]
    untested: Mapping[str, str] = field(default_factory=dict)
    controls: Sequence[Controlled] = ()
    never_tried: Mapping[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> dict[str, Any]:
        """The totals as plain data."""
        findings = self.findings
        slowed = self.slowdown
        return {
            "injected": sum(one.injected for one in self.kinds),  # the tasks' marks are gone by now
            "marks": sum(one.marks for one in self.kinds),
            "kinds": sum(one.injected > 0 for one in self.kinds),
            "main_failures": sum(bool(segment.failure) for segment in findings.segments),
            "loss_differences": sum(len(segment.differing) for segment in findings.segments),
            "jobs_lost": len(findings.lost),
            "stalls": len(self.stalls),
            "slowed": list(self.slowed),
            "never_tried": sorted(self.never_tried),
            "untested": sorted(self.untested),
            "controls": sum(not one.wrong for one in self.controls),
            "jobs": len(findings.jobs),
            "leaked_processes": len(findings.leaked),
            "trainings": len(findings.segments),
            "iterations": len(self.seen),
            "cut_off": findings.cut_off,
            "slowdown": slowed and {"mean": slowed.mean, "ci95": list(slowed.ci95), "pairs": slowed.pairs},
            "recovery_s": _spread([one.seconds for one in self.recoveries]),
            "startup_s": _spread([one.startup_s for one in self.recoveries if one.startup_s is not None]),
        }

    @property
    def passed(self) -> bool:
        """True if every fault was injected, and none did harm."""
        summary = self.summary
        harmful = (
            *("main_failures", "loss_differences", "jobs_lost", "leaked_processes", "stalls", "slowed"),
            *("never_tried", "untested", "cut_off"),
        )
        return summary["injected"] >= self.wanted and not any(summary[name] for name in harmful)

    def as_dict(self, command: str) -> dict[str, Any]:
        """The whole result as plain data."""
        return {
            "command": command,
            "summary": self.summary,
            "kinds": [asdict(one) for one in self.kinds],
            "not_run": [{"kind": kind, "why": why} for kind, why in self.not_run.items()],
            "never_tried": [{"kind": kind, "why": why} for kind, why in self.never_tried.items()],
            "untested": [{"kind": kind, "why": why} for kind, why in self.untested.items()],
            "controls": [asdict(one) for one in self.controls],
            "lost": [asdict(one) for one in self.findings.lost],
            "stalls": [asdict(one) for one in self.stalls],
        }


def compile_result(
    findings: Findings,
    kinds: Sequence[FaultKind],
    wanted: int,
    not_run: Mapping[str, str],
    controls: Sequence[Controlled] = (),
) -> ChaosResult:
    """Count and measure the findings of a chaos run, from its run folders.

    Args:
        kinds: the kinds that were injected.
        controls: controls of the attacks, also of those that were not run because theirs did not succeed.
    """
    seen = measure.iterations(segment.run_dir for segment in findings.segments)
    recovered = measure.recoveries(findings)
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for one in recovered:
        seconds[one.kind].append(one.seconds)
    injected, marks, slowdowns = findings.injected(), findings.marks(), measure.slowdown_by_kind(findings, seen)
    longest, slowed, stalls = harm.longest_s(findings, seen), harm.slowed(findings, seen), harm.stalls(findings, seen)
    stalled = Counter(kind for one in stalls for kind in one.kinds)
    lost = Counter(one.kind for one in findings.lost)
    failures, differences = _harm(findings, seen)
    rows = [
        FaultResult(
            kind=kind.name,
            expected=kind.expected,
            observed=observed(kind, findings),
            injected=injected[kind.name],
            marks=marks[kind.name],
            main_failures=failures[kind.name],
            loss_differences=differences[kind.name],
            outcomes=outcomes(kind, findings),
            jobs_lost=lost[kind.name],
            stalls=stalled[kind.name],
            longest_s=longest.get(kind.name),
            slowed=slowed[kind.name].mean if kind.name in slowed else None,
            slowdown=slowdowns.get(kind.name),
            recovery_s=median(seconds[kind.name]) if seconds[kind.name] else None,
        )
        for kind in kinds
    ]
    beyond = [kind.name for kind in kinds if kind.name in slowed and slowed[kind.name].beyond]
    overall = measure.slowdown(findings.windows, seen)
    untested = {one.kind: one.wrong for one in controls if one.wrong}
    return ChaosResult(
        wanted,
        rows,
        not_run,
        findings,
        overall,
        recovered,
        seen,
        stalls,
        beyond,
        untested,
        list(controls),
        findings.never_tried(),  # not later: the tasks' marks may go with the run's folder
    )


def outcomes(kind: FaultKind, findings: Findings) -> dict[str, int]:
    """The number of attacks of a kind that went through, were refused, and found no target."""
    if kind.source not in (Source.ATTACK, Source.BROUGHT):
        return {}
    jobs = [job for job in findings.judged() if job.kind is kind]
    return {
        "done": sum(bool(job.through()) for job in jobs),
        "refused": sum(bool(job.held()) for job in jobs),
        "no_target": sum(bool(job.missed()) for job in jobs),
    }


def observed(kind: FaultKind, findings: Findings) -> str:
    """The observed outcome of the faults of a kind in a few words, the worst one first."""
    lost = [one.why for one in findings.lost if one.kind == kind.name]
    jobs = [job for job in findings.judged() if job.kind is kind]
    through = [mark.detail for job in jobs for mark in job.through()]
    held = [mark.detail for job in jobs for mark in job.held()]
    if lost:
        return f"LOST: {lost[0]}"
    if through:
        return f"as expected; went through: {through[0]}"
    if held:
        return f"as expected; refused: {held[0]}"
    missed = [mark.detail for job in jobs for mark in job.missed()]
    if missed:
        return f"NEVER TRIED: {missed[0]}"
    return "as expected" if findings.injected()[kind.name] else "was not seen"


def _harm(findings: Findings, seen: Sequence[Iteration]) -> tuple[Counter[str], Counter[str]]:
    """The numbers of failed trainings and of differing losses, by the kinds of the faults just before."""
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
