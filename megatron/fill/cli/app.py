"""All commands of ``pipefill``, in the order in which the help lists them: those of the core, then each wing's.

The core knows no wing: the module ``commands`` of a package in ``megatron.fill.wings`` has a function ``add``, which
adds the wing's commands under a heading of their own.

Each command is a function; slow modules (SQLAlchemy, pydantic, matplotlib) are imported inside it, so that help and
completion stay quick.
"""

from __future__ import annotations

from typing import Annotated

from typer import Option

from megatron.fill import wings
from megatron.fill.cli import control, doctor, gc, jobs, logs, plan, profile, report, schedule, top, trial, usage
from megatron.fill.cli.typed import App, Group
from megatron.fill.cli.version import print_version

app = App(
    cls=Group,
    help="Jobs for the pipeline bubbles of Megatron-LM training.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # paragraphs are filled
)


@app.callback()
def options(
    version: Annotated[
        bool, Option("--version", is_eager=True, callback=print_version, help="Print the versions of what is used.")
    ] = False,
) -> None:
    pass


app.command("try")(trial.try_)
app.command("submit")(jobs.submit)
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
app.command("top")(top.top)
app.command("report")(report.report)
app.command("usage")(usage.usage)
app.command("gc")(gc.gc)
app.command("profile")(profile.profile)
app.command("plan")(plan.plan)
app.command("schedule")(schedule.schedule)
app.command("doctor")(doctor.doctor)
for commands in wings.modules("commands"):
    commands.add(app)
