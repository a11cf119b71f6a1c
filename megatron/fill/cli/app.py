"""All commands of ``pipefill``, in the order in which the help lists them.

Each command is a function; slow modules (SQLAlchemy, pydantic, matplotlib) are imported inside it, so that help and
completion stay quick.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from megatron.fill.cli import (
    batch,
    chaos,
    configure,
    control,
    doctor,
    evaluate,
    graph,
    jobs,
    logs,
    memory,
    network,
    plan,
    profile,
    report,
    simulate,
    speccheck,
    trial,
)
from megatron.fill.cli.version import print_version


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> Any:
        return _switches_without_type(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> Any:
        return _switches_without_type(super().get_params(ctx))


def _switches_without_type(options: list[Any]) -> list[Any]:
    """Remove ``<bool>`` from switches in the help, which would look as if they took a value."""
    for option in options:
        if getattr(option, "is_flag", False) and option.metavar is None:
            option.metavar = ""
    return options


class _App(typer.Typer):
    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, **{"cls": _Command} | options)


app = _App(
    cls=_Group,
    help="Jobs for the pipeline bubbles of Megatron-LM training.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # paragraphs are filled
)


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=print_version, help="Print the versions of what is used."),
    ] = False,
) -> None:
    pass


app.command("try")(trial.try_)
app.command("submit")(jobs.submit)
app.command("batch")(batch.batch)
app.command("evaluate")(evaluate.evaluate)
app.command("list")(jobs.list_jobs)
app.command("show")(jobs.show)
app.command("logs")(logs.logs)
app.command("cancel")(jobs.cancel)
app.command("retry")(jobs.retry)
app.command("status")(control.status)
app.command("pause")(control.pause)
app.command("resume")(control.resume)
app.command("drain")(control.drain)
app.command("kill")(control.kill)
app.command("report")(report.report)
app.command("profile")(profile.profile)
app.command("plan")(plan.plan)
app.command("network")(network.network)
app.command("simulate")(simulate.simulate)
app.command("configure")(configure.configure)
app.command("pays")(configure.pays)
app.command("memory-model")(memory.memory_model)
graphs = _App(cls=_Group, help="Pipelines for models with branches: graphs of stages.", rich_markup_mode="markdown")
graphs.command("plan")(graph.plan)
graphs.command("show")(graph.show)
app.add_typer(graphs, name="graph")
app.command("speccheck")(speccheck.speccheck)
app.command("doctor")(doctor.doctor)
app.command("chaos")(chaos.chaos)
