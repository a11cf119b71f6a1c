"""``pipefill memory-model``: fits a correction of ``pipefill configure``'s memory accounting to measured peaks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from megatron.fill.cli.options import Json, check_writable


def memory_model(
    peaks: Annotated[Path, Argument(metavar="PEAKS", help="A JSON file: docs/configure.md.")],
    output: Annotated[Path, Option(metavar="FILE", help="Write the correction here.")],
    seed: Annotated[int, Option(metavar="N", min=0, help="Of what is held out and learned.")] = 0,
    as_json: Json = False,
) -> None:
    """Learn from measured peaks how much more or less than the accounting a GPU holds.

    A fifth of the peaks is held out; what is printed are the errors on these, of the accounting and of the correction.
    pipefill configure --memory-model FILE then uses it. --json prints samples, held_out, margin and the errors.
    """
    from megatron.fill.cli.views import print_json
    from megatron.fill.wings.configure.peaks import learn, load_peaks

    measured = load_peaks(peaks)
    check_writable(output=output)
    found, errors = learn(measured, seed)
    found.save(output)
    if as_json:
        figures = {name: getattr(errors, name) for name in errors.__slots__ if name != "samples"}
        print_json({"samples": found.samples, "held_out": errors.samples, "margin": found.margin} | figures)
        return
    print(f"Learned from {found.samples} peaks; on {errors.samples} others, mean and worst error:")
    print(f"  the accounting  {errors.analytic_mean:.2%} {errors.analytic_worst:.2%}")
    print(f"  with {output.name}  {errors.corrected_mean:.2%} {errors.corrected_worst:.2%}")
    if errors.corrected_mean >= errors.analytic_mean:
        print("The accounting is as good: pipefill configure needs no --memory-model for such trainings.")
