"""Checks jobs in the sandbox that they would run in: the process that ``pipefill submit`` starts for that.

It answers in lines of JSON: ``{"begun": 3}`` before job 3 is checked, ``{"of": 3, ...}`` with the result, and
``{"ended": -11}`` with the exit code when the checking process has ended.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megatron.fill.agent.admission import job_sandbox
from megatron.fill.app.sandboxing import find_sandbox
from megatron.fill.config import FillSettings
from megatron.fill.errors import FillError
from megatron.fill.linux import host
from megatron.fill.sandbox.config import Bind
from megatron.fill.sandbox.powers import limit_resources, most_tasks
from megatron.fill.sandbox.process import SandboxedProcess
from megatron.fill.trial.examine import Examined, examine_command, examine_task
from megatron.fill.trial.spec import CheckSpec
from megatron.fill.untrusted import to_json

_MOST_TRACE = 4000  # most characters of a traceback, from its end


def main() -> None:
    """Check the jobs of the spec that is on the standard input."""
    spec = CheckSpec.from_json(sys.stdin.read())
    host.die_with_parent(spec.parent)
    host.adopt_orphans()
    settings = FillSettings(store=spec.folder, report=spec.folder, **spec.settings)
    try:
        run_sandbox = find_sandbox(settings, None, spec.search)
        directory = Path(spec.folder) / "job"
        directory.mkdir()
        user = run_sandbox.user
        if user is not None:
            os.chown(directory, user.uid, user.gid)
        binds = (*map(Bind, spec.search), *run_sandbox.binds)
        sandbox = job_sandbox(user, run_sandbox.namespaces, directory, settings.network, binds)
        first = 0
        for group in spec.groups:  # jobs that share an environment, in a process of their own
            tasks = most_tasks(os.getuid() if user is None else user.uid, settings.max_processes)
            limit = partial(limit_resources, None, tasks, settings.max_files)
            held = SandboxedProcess(sandbox, limit, partial(_look, group, spec.search, directory, first))
            held.begin()
            _tell(1, ended=held.wait())
            first += len(group["jobs"])
    except FillError as error:
        sys.exit(str(error))


def _look(group: dict[str, Any], search: Sequence[str], directory: Path, first: int) -> NoReturn:
    """Check the jobs of a group, from number ``first`` on."""
    os.chdir(directory)
    answers, nowhere = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    host.apply_environment(group["env"])
    failed: dict[str, Examined] = {}
    for number, job in enumerate(group["jobs"], first):
        _tell(answers, begun=number)
        _tell(answers, of=number, **asdict(_examine(job, search, failed)))
    os._exit(0)  # in spite of threads that an import has started


def _examine(job: dict[str, Any], search: Sequence[str], failed: dict[str, Examined]) -> Examined:
    """Check one job; ``failed`` has the tasks that cannot be loaded, which are not tried again."""
    task = job["task"]
    if task is None:
        return examine_command(job["command"])
    if task not in failed:
        found = examine_task(task, job["args"], search)
        if not found.raised:
            return found
        failed[task] = replace(found, trace=found.trace[-_MOST_TRACE:])
    return failed[task]


def _tell(fd: int, **what: Any) -> None:
    data = to_json(what).encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]
