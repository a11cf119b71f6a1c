"""The comparison of real runs with predictions, as a table and as a summary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from scripts.benchmarks.studies.truth.compare import Figure

WAYS = ("profile", "halves", "same")  # methods of prediction
AIM = 0.03  # target for the largest error


def table(results: Mapping[str, Sequence[Figure]]) -> str:
    """All figures as a Markdown table."""
    lines = [
        "| run | figure | measured | profile | halves | same | noise | 95% of measured | odd - even |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run, figures in results.items():
        for figure in figures:
            errors = " | ".join(f"{figure.error[way]:+.1%}" for way in WAYS)
            amount = f"{figure.measured:.4g}" if figure.unit == "per iteration" else f"{1000 * figure.measured:.1f} ms"
            name = figure.name + (" (of the iteration)" if figure.small else "")
            noise = f"{figure.noise:.1%} | +-{figure.ci95:.1%} | {figure.halves:+.1%}"
            lines.append(f"| {run} | {name} | {amount} | {errors} | {noise} |")
    return "\n".join(lines)


def summary(results: Mapping[str, Sequence[Figure]]) -> dict[str, dict[str, float]]:
    """Return, per method of prediction, the mean and largest absolute error, and the number of figures within 3%, and
    within 3% plus the noise."""
    errors: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for figures in results.values():
        for figure in figures:
            for way, error in figure.error.items():
                errors[way].append((abs(error), figure.noise))
    return {
        way: {
            "figures": len(values),
            "mean": fmean(error for error, _ in values),
            "largest": max(error for error, _ in values),
            "within_3_percent": sum(error <= AIM for error, _ in values),
            "within_3_percent_and_noise": sum(error <= AIM + noise for error, noise in values),
        }
        for way, values in errors.items()
    }
