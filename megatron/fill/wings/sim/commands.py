"""``pipefill simulate``: simulates the gain from filling, on clusters of any size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from megatron.fill.cli.options import Json, check_writable
from megatron.fill.cli.typed import App
from megatron.fill.errors import ConfigError

if TYPE_CHECKING:
    from megatron.fill.wings.sim.results import SimResult


def simulate(
    config: Annotated[Path | None, Argument(metavar="CONFIG", help="A YAML file: docs/simulator.md.")] = None,
    report: Annotated[
        Path | None,
        Option("--from", metavar="RUN", help="Instead: a real run's folder, or its report.json, to scale up."),
    ] = None,
    gpus: Annotated[int | None, Option(metavar="N", min=1, help="With --from: on how many devices.")] = None,
    policy: Annotated[
        list[str] | None, Option(metavar="POLICY", help="Instead of the file's; may be repeated.")
    ] = None,
    sweep: Annotated[
        list[str] | None, Option(metavar="FIELD=V,V", help="Every value of a field: dp=8,16,32. May be repeated.")
    ] = None,
    schedule: Annotated[
        Path | None, Option(metavar="FILE", help="Of every main job: a CSV file, docs/schedules.md.")
    ] = None,
    price: Annotated[
        float | None, Option(metavar="X", min=0, max=1e9, help="Of a GPU-hour, for what is saved a day.")
    ] = None,
    processes: Annotated[int | None, Option(metavar="N", min=1, help="At a time (default: one per core).")] = None,
    png: Annotated[Path | None, Option(metavar="FILE", help="Draw the results into this file.")] = None,
    csv: Annotated[Path | None, Option(metavar="FILE", help="Write a line per simulation.")] = None,
    as_json: Json = False,
) -> None:
    """Simulate trainings, their bubbles, and the jobs in them, with PipeFill's own planner and scheduler.

    MAIN is the share of the devices' time in which trainings compute, FILL the share that the jobs' work would take on
    such devices alone. With --from, jobs like each of the report's that did steps wait always, and bubbles are
    harvested as they were in that run.

    --json prints a list with an entry per simulation; docs/simulator.md explains its fields.
    """
    from rich.console import Console

    from megatron.fill.cli.views import print_json
    from megatron.fill.wings.sim.draw import draw_results
    from megatron.fill.wings.sim.run import from_report, load, plan_runs, run_one
    from megatron.fill.wings.sim.sweep import parse_sweep, run_all
    from megatron.fill.wings.sim.terminal import print_comparison, print_result, write_csv

    notes: list[str] = []
    if config is not None and report is None and gpus is None:
        source, data = load(config)
    elif config is None and report is not None:
        source, data, notes = from_report(report, gpus)
    else:
        raise ConfigError("expected a CONFIG file, or --from with a run folder and perhaps --gpus")
    sweeps = [parse_sweep(text) for text in sweep or ()]
    if schedule is not None:
        sweeps.append(("schedule", (str(schedule.resolve()),)))
    tasks = plan_runs(source, data, sweeps, policy or (), price)
    check_writable(png=png, csv=csv)
    results: list[SimResult] = run_all(run_one, tasks, processes)
    for path, write in ((png, draw_results), (csv, write_csv)):
        if path is not None:
            write(path, results)
    if as_json:
        print_json([result.to_dict() for result in results])
    elif len(results) == 1:
        print_result(results[0])
    else:
        print_comparison(results)
    console = Console(highlight=False, markup=False, stderr=as_json)
    for note in notes:
        console.print(note)


def add(app: App) -> None:
    app.command("simulate", rich_help_panel="Simulator")(simulate)
