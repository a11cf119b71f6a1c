"""The figures of a step of the GPU day, as the lines of its table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MOST_LINES = 8  # of one variant in the table; the JSON file has all
_DELAYS = {
    "mark_to_relay_us": "mark to relay",
    "opened_to_kernel_us": "bubble to first kernel",
}


def figures(step: str, found: dict[str, Any]) -> list[str]:
    """Lines for what ``step`` found; none where nothing is known of how it writes."""
    if "summary" in found:
        return _bench(found["summary"])
    return _OF.get(step, lambda found: [])(found)


def _bench(summary: dict[str, Any]) -> list[str]:
    """Of bench_gpu.py: a part has figures for each variant."""
    lines: list[str] = [summary["not_run"]] if "not_run" in summary else []
    for part, variants in summary.items():
        for found in variants.values() if isinstance(variants, dict) else ():
            why = [f"{name.replace('_', ' ')}: {found[name]}" for name in ("failed", "not_run") if name in found]
            lines += [f"{part}: {line}" for line in why or _trained(found)]
            lines += [f"{part}: {found['remark']}"] if "remark" in found else []
    return lines


def _trained(found: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    if slowdown := found.get("slowdown"):
        low, high = slowdown["ci95"]
        lines.append(f"slowdown {slowdown['mean']:+.2%} ({low:+.2%} to {high:+.2%}, {slowdown['pairs']} pairs)")
    for name, value in found.items():
        if isinstance(value, bool | int | float) and len(lines) < _MOST_LINES:
            told = f"{value:.4g}" if isinstance(value, float) else str(value)
            lines.append(f"{name.replace('_', ' ')} {told}")
        elif isinstance(value, dict) and value.get("count"):
            lines.append(f"{name.removesuffix('_us').replace('_', ' ')} {_us(value)}")
    return lines


def _look(found: dict[str, Any]) -> list[str]:
    mps = found["programs"]["nvidia-cuda-mps-control"]
    return [
        f"kernel {found['kernel']}, {found['cores']} cores, Landlock ABI {found['landlock_abi']}",
        f"GPU: {found['gpus']}",
        f"MPS: {mps or 'no nvidia-cuda-mps-control'}",
    ]


def _doctor(found: dict[str, Any]) -> list[str]:
    missing = [layer["name"] for layer in found["sandbox"] if layer["lacks"]]
    return [f"walls missing: {', '.join(missing) or 'none'}"]


def _micro(found: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    parts = found.get("parts", {})
    for name, one in parts.get("marks", {}).items():
        for figure, called in _DELAYS.items():
            if isinstance(one, dict) and one.get(figure, {"count": 0})["count"]:
                lines.append(f"{called}, {name}: {_us(one[figure])}")
    for way, one in _ways(parts.get("spinning")):
        shares = ", ".join(f"{wait} {found['share']:.0%}" for wait, found in one.items() if isinstance(found, dict))
        lines.append(f"products beside a wait, {way}: {shares} of alone")
    for way, one in _ways(parts.get("slices")):
        lines.append(f"tiny kernel beside products, {way}: {_us(one['beside_us'])}")
    for way, one in _ways(parts.get("memory")):
        bind = ", ".join(name.removesuffix("_binds") for name in ("fraction_binds", "limit_binds") if one.get(name))
        lines.append(f"context, {way}: {one['context_mib']:.0f} MiB; caps that bind: {bind or 'none'}")
        lines.append(f"behind Landlock, {way}: {one['landlock']['context']}")
    for way, one in _ways(parts.get("killing")):
        lines.append(f"longest tiny kernel around a kill, {way}: {one['around_the_kill_us']['max']:.0f} us")
    return lines + [f"{part} failed: {why}" for part, why in found.get("failed", {}).items()]


def _ways(part: dict[str, Any] | None) -> list[tuple[str, dict[str, Any]]]:
    """The ways of sharing of one part, without how long it took."""
    return [(way, one) for way, one in (part or {}).items() if isinstance(one, dict)]


def _us(spread: dict[str, float]) -> str:
    return f"p50 {spread['p50']:.0f}, p99 {spread['p99']:.0f} us"


def _losses(found: dict[str, Any]) -> list[str]:
    same = "the same, to the bit" if found["identical"] else f"NOT the same from {found['first_that_differs']} on"
    return [f"losses of {found['iterations']} iterations: {same}", f"harvest ratio {found['harvest_ratio']:.4g}"]


def _free_waits(found: dict[str, Any]) -> list[str]:
    if "not_run" in found:
        return []
    slowdowns = ", ".join(f"{one:+.1%}" for one in found["slowdown_by_pair"])
    return [
        f"iterations with free waits longer by {slowdowns}",
        f"harvest ratio {found['harvest_with']:.3f} with, {found['harvest_without']:.3f} without",
    ]


_OF: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "machine": _look,
    "doctor": _doctor,
    "micro": _micro,
    "losses": _losses,
    "free-waits": _free_waits,
}
