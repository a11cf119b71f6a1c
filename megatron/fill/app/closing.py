"""Messages at the end of a training: records that were lost, and the state of its jobs if it failed."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from megatron.fill.errors import FillError
from megatron.fill.records import note_failure
from megatron.fill.store.location import locate, shown
from megatron.fill.store.states import current_states
from megatron.fill.types import JobState

logger = logging.getLogger("pipefill")


@contextlib.contextmanager
def kept(lost: str) -> Iterator[None]:
    """Log an exception of this block instead of raising it: the training itself is done.

    Args:
        lost: beginning of the message, which names what is lost.
    """
    try:
        yield
    except (OSError, FillError) as error:  # a full disk, a damaged record
        logger.warning("%s, the training itself is done: %s", lost, error)
    except Exception:
        logger.exception("%s; the training itself is done", lost)


def tell_of_jobs(store: str, run_dir: Path, segment: Path, rank: int, names: Collection[str]) -> None:
    """Print the state of the jobs of a training that has failed, in one line, on the first rank that has failed.

    Args:
        store: the job store that the training served.
        segment: the folder of its records.
        names: names of the jobs in its jobs file.
    """
    if not note_failure(segment, rank):
        return
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
        said.append(f"{found['not submitted']} were not submitted yet; the next start in {run_dir} submits them")
    # One write, so that output of other ranks does not break the line.
    os.write(1, f"PipeFill: the training has failed; {', '.join(said)}\n".encode())
