"""The end of a training: jobs are measured alone, the report is made, and what was lost or goes on is said.

Records that ranks and agents could not write are gathered on rank 0 for the report.  They go through the key-value
store of the process group, which Megatron has made anyway: no collective is added, no GPU memory is used, and no rank
waits for one that has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron.fill.app.runfolder import store_of
from megatron.fill.app.session import Session
from megatron.fill.config import FillSettings
from megatron.fill.errors import FillError
from megatron.fill.records.segment import Segment, note_failure
from megatron.fill.records.unwritten import Unwritten
from megatron.fill.store.location import database_file, locate, print_next, shown
from megatron.fill.store.states import current_states
from megatron.fill.types import JobState, RankInfo

logger = logging.getLogger("pipefill")

_RANK_BYTES, _ALL_BYTES = 4 << 20, 128 << 20  # limits of unwritten records, for one rank and for all together
_COUNT, _OF_RANK = "pipefill/unwritten", "pipefill/unwritten/{}"  # keys in the process group's store
_MOST_S = 20.0  # timeout of a request to that store


@contextlib.contextmanager
def kept(lost: str) -> Iterator[None]:
    """Log an exception of this block, in a message that begins with what is ``lost``: the training itself is done."""
    try:
        yield
    except (OSError, FillError) as error:  # a full disk, a damaged record
        logger.warning("%s, the training itself is done: %s", lost, error)
    except Exception:
        logger.exception("%s; the training itself is done", lost)


def go_on(settings: FillSettings, run_dir: Path) -> str:
    """Return how the jobs go on once the training has ended; empty if they only wait."""
    if not (settings.between and settings.serves):
        return ""
    return f"go on alone for at most {settings.between:g} s; pipefill kill {shlex.quote(str(run_dir))} ends them"


def tell_of_jobs(session: Session, names: Collection[str]) -> None:
    """Print the state of a failed training's jobs, by name, in one line, on the first rank that has failed."""
    if not note_failure(session.segment, session.info.rank):
        return
    store, run_dir = session.store, session.run_dir
    file = database_file(store)
    if file is not None and not file.exists():  # its agent has not made it yet
        found = Counter({"not submitted": len(names)})
    else:
        found = Counter(
            "not submitted" if not job.what else str(job.state) if job.state.finished else "open"
            for job in current_states(store, run_dir, False, names).values()
        )
    ended = [f"{found[state]} {state}" for state in JobState if found[state]]
    where = shown(locate(store))
    said = [f"of its {len(names)} jobs {', '.join(ended)}"] if ended else []
    if found["open"]:
        unfinished = f"{found['open']} of its {len(names)} jobs have not ended" if not ended else f"{found['open']} not"
        said.append(f"{unfinished}: they are queued in the job store {where} and go on when a training serves it again")
    elif not names or not found:
        said.append(f"jobs that have not ended are queued in the job store {where}")
    if found["not submitted"]:
        those = "" if said else f" of its {len(names)} jobs"
        said.append(f"{found['not submitted']}{those} were not submitted yet; the next start in {run_dir} submits them")
    # One write, so that output of other ranks does not break the line.
    alone = go_on(session.settings, run_dir) if found["open"] or not names or not found else ""
    after = f"; meanwhile they {alone}" if alone else ""
    os.write(1, f"PipeFill: the training has failed; {', '.join(said)}{after}\n".encode())


def rounds(settings: FillSettings, info: RankInfo) -> int:
    """Return the number of rounds in which the ranks measure their jobs alone; 0 if that was not requested.

    On the CPU, whose cores share caches and memory bandwidth, the ranks of a node follow one another.  GPUs measure
    all at once.
    """
    together = info.local_world_size if info.device == "cpu" else 1
    return together if settings.baseline_seconds else 0


def measure_alone(session: Session | None, of: int, seconds: float) -> None:
    """Measure the jobs alone, without those of the node's other ranks, in ``of`` rounds of so many seconds.

    Every rank reaches every barrier at about the same time, also one whose session failed.
    """
    import torch.distributed as dist

    for number in range(of):
        dist.barrier()
        if session is not None and session.info.local_rank % of == number:
            session.measure_alone(seconds)
        else:
            time.sleep(seconds)
    if of:
        dist.barrier()  # so that no rank stops its jobs while others measure


def hand_in(rank: int, ranks: int, unwritten: Unwritten) -> None:
    """Store a rank's unwritten records for rank 0; called before the last barrier."""
    if not unwritten:
        return
    with _store() as store:
        store.set(_OF_RANK.format(rank), unwritten.packed(min(_RANK_BYTES, _ALL_BYTES // ranks)))
        store.add(_COUNT, 1)


def collect(ranks: int) -> dict[int, Unwritten]:
    """Return the unwritten records by rank; called on rank 0 after the last barrier."""
    with _store() as store:
        left = store.add(_COUNT, 0)
        names = {rank: _OF_RANK.format(rank) for rank in range(ranks if left else 0)}
        # `check` does not wait: a key that is missing now will not come.
        return {rank: Unwritten.unpacked(store.get(name)) for rank, name in names.items() if store.check([name])}


@contextlib.contextmanager
def _store() -> Iterator[Any]:
    """Provide the process group's store, with a timeout for each request."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    usual = store.timeout
    store.set_timeout(timedelta(seconds=_MOST_S))
    try:
        yield store
    finally:
        store.set_timeout(usual)


def report_end(settings: FillSettings, run_dir: Path, segment: Segment, unwritten: Mapping[int, Unwritten]) -> None:
    """Make, print and write the report of a training, whose unwritten records are given by rank.

    OSError or FillError if not all could be written, or there is nothing to report.
    """
    from megatron.fill import report
    from megatron.fill.display import report_console

    console = report_console()
    if settings.profile_only:
        report.profile(segment, run_dir / "bubbles.json", console, unwritten)
        print(f"PipeFill: bubble cycles in {run_dir / 'bubbles.json'}")
        return
    store = store_of(settings, run_dir)
    made = report.compose(
        run_dir,
        lambda names: current_states(store, run_dir, False, names),
        ended=segment,
        unwritten=unwritten,
        show=lambda made: report.print_report(made, console),
    )
    print(f"PipeFill: report.json, trace.json and timeline.png in {run_dir}")
    if (alone := go_on(settings, run_dir)) and any(not job.state.finished for job in made.jobs):
        print(f"PipeFill: jobs that have not ended {alone}")
    page = f"report {shlex.quote(str(run_dir))} --html {shlex.quote(str(run_dir / 'report.html'))}"
    if settings.serves:
        print_next(store, "list", "usage --by job", plain=[page])
    else:
        print_next(None, page)
