"""Checks that jobs can be loaded, in a process with the sandbox of a job."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.fill.agent.admission import default_user, environment
from megatron.fill.errors import ConfigError
from megatron.fill.given.jobs import JobSpec, distinct
from megatron.fill.linux import host
from megatron.fill.linux.isolated import program
from megatron.fill.trial.examine import Examined
from megatron.fill.trial.spec import NOTE, CheckSpec
from megatron.fill.untrusted import parse_json, plain

_MOST_S = 120.0  # timeout for all jobs together: importing torch takes a while on a busy machine


def examine(jobs: Sequence[JobSpec], search: Sequence[str], settings: Mapping[str, Any]) -> list[Examined]:
    """Check each job, in another process, and return the findings; ConfigError if the check itself failed.

    Args:
        search: absolute folders that tasks are imported from, besides the installed packages.
        settings: ``FillSettings`` on which the sandbox depends, by field.
    """
    groups: dict[str, list[JobSpec]] = {}
    for job in distinct(jobs):
        groups.setdefault(repr(sorted(job.env.items())), []).append(job)
    in_order = [job for group in groups.values() for job in group]
    with tempfile.TemporaryDirectory(prefix="pipefill-check-") as folder:
        os.chmod(folder, 0o755)
        spec = CheckSpec(
            parent=os.getpid(),
            folder=folder,
            search=list(search),
            groups=[
                {"env": group[0].env, "jobs": [job.model_dump(include={"task", "args", "command"}) for job in group]}
                for group in groups.values()
            ],
            settings=dict(settings),
        )
        lines, notes, said = _run(spec)
    found = _read(lines, in_order)
    if not found:
        raise ConfigError(f"the jobs cannot be looked at: {(said or ['the process ended without a word'])[-1]}")
    known = {job.kind: _with_notes(its, notes) for job, its in zip(in_order, found, strict=True)}
    return [known[job.kind] for job in jobs]


def _run(spec: CheckSpec) -> tuple[list[str], list[str], list[str]]:
    """Run the checker; return its answers, its notes on the folders to import from, and its error output, as lines."""
    user = default_user()
    checker = subprocess.Popen(
        program("megatron.fill.trial.checker"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env=environment(os.environ, {}, user, Path(spec.folder)),
    )
    try:
        out, err = checker.communicate(spec.to_json().encode(), _MOST_S)
    except subprocess.TimeoutExpired:
        checker.kill()
        out, err = checker.communicate()
    except BaseException:
        checker.kill()
        checker.wait()
        raise
    lines = out.decode(errors="replace").splitlines()
    notes = [line.removeprefix(NOTE) for line in lines if line.startswith(NOTE)]
    notes = [note for note in notes if any(folder in note for folder in spec.search)]
    return [line for line in lines if line.startswith("{")], notes, err.decode(errors="replace").strip().splitlines()


def _read(lines: Sequence[str], jobs: Sequence[JobSpec]) -> list[Examined]:
    """Return an answer for each job, ignoring lines that jobs have written among them; empty if none was begun."""
    found: dict[object, Examined] = {}
    endings: dict[object, object] = {}  # by job: exit code of the process that began it; None while it runs
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):
            answer = parse_json(line)
            if "begun" in answer:
                endings[answer["begun"]] = None
            elif "of" in answer:
                number = answer.pop("of")
                found[number] = _sane(answer)
            elif "ended" in answer:
                endings = {at: answer["ended"] if code is None else code for at, code in endings.items()}
    if not endings:
        return []
    return [found.get(at) or _unanswered(job, at in endings, endings.get(at)) for at, job in enumerate(jobs)]


def _sane(answer: dict[str, Any]) -> Examined:
    kinds = {"error": str, "raised": bool, "trace": str, "nodes": bool, "resumable": bool}
    if not all(isinstance(answer.get(name), kind) for name, kind in kinds.items()):
        raise ValueError("no answer of ours")
    return Examined(**answer | {"error": plain(answer["error"])})


def _unanswered(job: JobSpec, begun: bool, ended: object) -> Examined:
    if not begun:
        return Examined("not looked at, since looking at another job failed")
    if not isinstance(ended, int):
        how = f"took more than {_MOST_S:g} s"
    elif ended < 0:
        how = host.how_ended(ended)
    else:
        how = f"ended the process with status {ended}"
    return Examined(f"importing {job.what.partition(':')[0]} {how}", raised=True)


def _with_notes(found: Examined, notes: Sequence[str]) -> Examined:
    """Add the notes on folders to a failed check, since they may be the reason."""
    more = found.error and not found.raised and notes
    return Examined(f"{found.error} ({'; '.join(map(plain, notes))})") if more else found
