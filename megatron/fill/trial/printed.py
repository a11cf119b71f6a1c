"""The result of a trial on a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron.fill.console import facts_table, harmless, literal
from megatron.fill.display import plain_table, results, size
from megatron.fill.trial.result import Ended, RoundTrip, Trial

_CALLBACKS = (
    *("create()", "load_state_dict()", "init()", "start()", "run_next_step()", "pause()"),
    *("state_dict()", "stop()"),
)
_STEP = "run_next_step()"
_VERDICTS = {
    Ended.OK: ("It would run.", "green"),
    Ended.FAILED: ("It would fail: ", "red"),
    Ended.REFUSED: ("It cannot run: ", "red"),
}


def print_trial(trial: Trial, console: Console) -> None:
    """Print a trial's callbacks, bubbles and verdict."""
    console.print(literal(f"{trial.job}: {trial.what} on {trial.device}", "bold"))
    if trial.callbacks_ms:
        console.print(_callbacks(trial))
    if facts := [(name, literal(said)) for name, said in _facts(trial)]:
        console.print(facts_table(facts))
    verdict, colour = _VERDICTS[trial.ended]
    console.print(literal(verdict + trial.reason, colour))
    for line in trial.output:
        console.print(Padding(Text(harmless(line), overflow="fold"), (0, 0, 0, 2)))
    for hint in trial.hints:
        console.print(_hint(hint))
    if trial.folder:
        console.print(literal(f"Its folder: {trial.folder}"))


def _callbacks(trial: Trial) -> Table:
    table = plain_table("CALLBACK", ">LONGEST", "")
    for name in _CALLBACKS:
        if name == _STEP and trial.steps is not None:
            steps = trial.steps
            said = f"{steps.count:,} steps: p50 {_ms(steps.p50_ms)}, p99 {_ms(steps.p99_ms)}"
            table.add_row(name, _ms(steps.longest_ms), said)
        elif name in trial.callbacks_ms:
            table.add_row(name, _ms(trial.callbacks_ms[name]), "")
    return table


def _facts(trial: Trial) -> Iterator[tuple[str, str]]:
    use, checkpoint, unit = trial.use, trial.checkpoint, trial.unit
    if use is not None:
        inside = "while it ran" if trial.command else "inside steps"
        if use.first_step_us is not None and not trial.command:
            inside += f"; the first step began {use.first_step_us:.0f} us after the start"
        every = f"{use.bubbles} of {trial.bubble_ms:g} ms, one every {trial.period_ms:g} ms"
        yield "bubbles", f"{every}: {use.used:.0%} of their time {inside}"
        what = "it" if trial.command else "the last step"
        ran_on = f"{what} ran on after {use.overran} of them, {_ms(use.longest_overrun_ms)} at most"
        beyond = f"{use.violations or 'none'} beyond the grace of {trial.grace_ms:g} ms"
        yield "overruns", f"{ran_on}; {beyond}" if use.overran else beyond
    if trial.peak_bytes:
        of = "" if trial.memory_bytes is None else f", of {size(trial.memory_bytes)}"
        yield "memory", f"{size(trial.peak_bytes)} at most{of}"
    if checkpoint.outcome is RoundTrip.OK:
        went_on = f"saved at {checkpoint.saved_work:g} {unit}, and a new process went on from there"
        yield "checkpoint", f"{size(checkpoint.size_bytes)}: {went_on}"
    elif checkpoint.outcome is not RoundTrip.NOT_TRIED and use is not None and not trial.command:
        yield "checkpoint", str(checkpoint.outcome)
    if trial.work_done:
        of = "" if trial.total_work is None else f" of {trial.total_work:g}"
        yield "work", f"{trial.work_done:g}{of} {unit}{', finished' if trial.finished else ''}"
    if trial.result:
        yield "result", results(trial.result)


def _hint(text: str) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_row("-", literal(text))
    return table


def _ms(value: float) -> str:
    return f"{value:,.3f} ms" if value < 10 else f"{value:,.1f} ms"
