"""Many simulations: every combination of the values of a sweep, and every policy, in parallel processes."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from typing import Any

from megatron.fill.errors import ConfigError
from megatron.fill.given.plainyaml import PlainYamlError, parse_yaml
from megatron.fill.wings.sim.recorded.groups import Reschedule

_RESCHEDULE = {field.name for field in fields(Reschedule)}

type Sweep = tuple[str, tuple[Any, ...]]  # a field and its values


def parse_sweep(text: str) -> Sweep:
    """Parse a sweep such as ``dp=8,16,32`` or ``runtime.harvest=0.7,0.9``.

    ConfigError, which shows the text and the expected form, if it is invalid.
    """
    field, _, rest = text.partition("=")
    try:
        values = tuple(parse_yaml(part).value for part in rest.split(",") if part.strip())
    except PlainYamlError:
        values = ()
    if not field.strip() or not values or any(isinstance(value, dict | list) for value in values):
        raise ConfigError(f"--sweep is {text!r}: expected FIELD=VALUE,VALUE,..., such as dp=8,16,32")
    return field.strip(), values


def variants(data: dict[str, Any], sweeps: Sequence[Sweep]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield every combination of the swept values, with the configuration that contains them.

    A field is a dotted path (``fill.generate.jobs``, ``main_jobs.0.gpu``); a name alone is a field of ``parallel``, or
    of a recorded job's ``reschedule``, in every main job.  ConfigError if the configuration has no such field.
    """
    fields = [field for field, _ in sweeps]
    if len(set(fields)) < len(fields):
        raise ConfigError(f"--sweep names a field twice: {', '.join(fields)}; expected each one once")
    for values in itertools.product(*(values for _, values in sweeps)):
        changed = copy.deepcopy(data)
        for field, value in zip(fields, values, strict=True):
            for place, name in _places(changed, field):
                place[name] = value
        yield dict(zip(fields, values, strict=True)), changed


def _places(data: dict[str, Any], field: str) -> list[tuple[Any, Any]]:
    """Return the places of a field: each a mapping or list, and the key in it."""
    if "." not in field and field not in data:
        jobs = data.get("main_jobs")
        found = []
        for job in jobs if isinstance(jobs, list) else ():
            if isinstance(job, dict):
                again = "report" in job and field in _RESCHEDULE
                mapping = job.setdefault("reschedule", {}) if again else job.get("parallel")
                if isinstance(mapping, dict):
                    found.append((mapping, field))
        if not found:
            raise ConfigError(f"--sweep {field}: no main job has a 'parallel' to change; expected a dotted path")
        return found
    *path, last = field.split(".")
    place: Any = data
    for at, name in enumerate(path):
        try:
            place = place[int(name)] if isinstance(place, list) else place[name]
        except (KeyError, IndexError, ValueError, TypeError):
            where = ".".join(path[: at + 1])
            raise ConfigError(f"--sweep {field}: there is no {where} in the configuration") from None
    if isinstance(place, list):
        if not (last.isdigit() and int(last) < len(place)):
            raise ConfigError(f"--sweep {field}: there is no entry {last} in the configuration")
        return [(place, int(last))]
    if not isinstance(place, dict):
        raise ConfigError(f"--sweep {field}: {'.'.join(path)} has no fields")
    return [(place, last)]


def run_all[T, R](work: Any, tasks: Sequence[T], processes: int | None = None) -> list[R]:
    """Call ``work`` on every task, by default in a process per core; return the results in the tasks' order.

    ``work`` is a function at a module's top level.  Of its errors the first one is raised, and the other tasks are
    abandoned.
    """
    processes = min(processes or len(os.sched_getaffinity(0)), len(tasks))
    if processes <= 1:
        return [work(task) for task in tasks]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(work, task) for task in tasks]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
