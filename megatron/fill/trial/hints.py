"""Hints for improving a job, from its trial."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.fill.trial.result import Ended, RoundTrip, Steps, Trial

_MIB = 1 << 20
_LONG = 0.2  # share of a bubble above which a step wastes a good part of it
_SLOW = 0.1  # share of a bubble above which start() or pause() is slow
_UNEVEN, _UNEVEN_MS = 3.0, 1.0  # ratio of p99 to median, and their difference, above which steps are uneven
_FEW = 100  # number of steps below which p99 is not meaningful


def hints(trial: Trial, max_overruns: int, kinds: bool) -> Iterator[str]:
    """Yield the hints, a sentence or two each; steps of several ``kinds`` (nodes) are expected to be uneven."""
    for callback in ("start()", "pause()"):
        took_ms = trial.callbacks_ms.get(callback, 0.0)
        if took_ms > _SLOW * trial.bubble_ms:
            yield f"{callback} took up to {took_ms:.3g} ms of a bubble of {trial.bubble_ms:g} ms."
    if trial.ended is not Ended.OK:
        return
    if trial.steps is not None:
        yield from _of_steps(trial.steps, trial.bubble_ms, kinds)
    if trial.use is not None and trial.use.offences:
        times = f"{trial.use.offences} times" if trial.use.offences > 1 else "once"
        beyond = f"It ran on after its bubble by more than {trial.grace_ms:g} ms (grace_ms) {times}"
        yield f"{beyond}; {max_overruns} times (max_overruns) end a job."
    if trial.memory_bytes is None and trial.peak_bytes:
        cap_mib = -(-3 * trial.peak_bytes // (2 * 64 * _MIB)) * 64  # 1.5 times the peak, in steps of 64 MiB
        yield f"It has no cap: with `memory: {cap_mib}MiB` it could harm nobody beyond that."
    if trial.command or trial.checkpoint.outcome is RoundTrip.NOT_RESUMABLE:
        what = "A command" if trial.command else "Without state_dict() and load_state_dict() it"
        yield f"{what} begins again from its start in every run that does not finish it."
    elif trial.checkpoint.outcome is RoundTrip.NEVER_SAVED:
        yield "It was done before it could be saved: with more work, its checkpoint would be tried too."


def _of_steps(steps: Steps, bubble_ms: float, kinds: bool) -> Iterator[str]:
    if steps.p50_ms > bubble_ms:
        yield (
            f"A step takes {steps.p50_ms:.3g} ms and a bubble {bubble_ms:g} ms: beside a training on a GPU hardly any "
            "would begin. Make steps shorter."
        )
    elif steps.p50_ms > _LONG * bubble_ms:
        lost = steps.p50_ms / 2 / bubble_ms
        yield f"Half a step is lost in every bubble, {lost:.0%} of it here: shorter steps use more."
    if kinds or steps.count < _FEW:
        return
    if steps.p99_ms > _UNEVEN * steps.p50_ms and steps.p99_ms - steps.p50_ms > _UNEVEN_MS:
        times = f"{steps.p99_ms / steps.p50_ms:.0f} times the median"
        yield f"The slowest steps take {times}: if that is their nature, tell kinds of steps apart with next_node."
