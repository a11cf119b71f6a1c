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
from pathlib import Path

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
# Keys in the process group's store: of a rank's unwritten records, of how many came to a meeting, that all did, and
# that ranks do not meet any more.
_OF_RANK, _CAME, _TOGETHER, _APART = "ended/{}", "came/{}", "together/{}", "apart"
_LOOK_S = 0.05  # time between two looks at it
_SOON_S = 10.0  # longest wait that goes without saying


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


class Others:
    """The other ranks at the end of the training, met over the process group's store, with no collective.

    The script may have destroyed its process groups by now, and a rank that works on, as to export a checkpoint, may
    come later than a collective waits for it.

    Args:
        segment: name of the training's segment, which no other start of the run has.
        most_s: time to wait for the others.
    """

    def __init__(self, segment: str, info: RankInfo, most_s: float) -> None:
        from torch.distributed import PrefixStore, distributed_c10d

        # Held from the start: at the end the script may have let go of it.
        self._store = PrefixStore(f"pipefill/{segment}", distributed_c10d._get_default_store())
        self._info, self._most_s = info, most_s

    def meet(self, number: int) -> None:
        """Wait until every rank calls this with the same number; FillError if they do not or cannot."""
        came, together = _CAME.format(number), _TOGETHER.format(number)
        try:
            if self._store.add(came, 1) == self._info.world_size:
                self._store.set(together, b"")
            if self._store.check([_APART]) or not self._wait_for([together]):
                self._store.set(_APART, b"")  # so that a rank that comes now does not wait for those that have gone on
                raise FillError(f"not all ranks have ended their training within {self._most_s:g} s")
        except RuntimeError as error:
            raise FillError(f"the other ranks cannot be reached: {error}") from error

    def hand_in(self, unwritten: Unwritten) -> None:
        """Tell rank 0 that this rank has ended its part, and store what it could not write; it waits for nobody."""
        packed = unwritten.packed(min(_RANK_BYTES, _ALL_BYTES // self._info.world_size)) if unwritten else b""
        try:
            self._store.set(_OF_RANK.format(self._info.rank), packed)
        except RuntimeError:  # rank 0 has ended, and made the report without this rank
            if unwritten:
                raise

    def collect(self) -> dict[int, Unwritten]:
        """Return the unwritten records by rank; called on rank 0, which waits for the others."""
        names = {rank: _OF_RANK.format(rank) for rank in range(self._info.world_size)}
        if not self._wait_for(list(names.values())):
            from megatron.fill.report.rows import listed

            late = [rank for rank, name in names.items() if not self._store.check([name])]
            said = "%s had not ended after %g s: the report may lack what was recorded last"
            logger.warning(said, listed(late), self._most_s)
            names = {rank: name for rank, name in names.items() if rank not in late}
        packed = {rank: self._store.get(name) for rank, name in names.items()}
        return {rank: Unwritten.unpacked(its) for rank, its in packed.items() if its}

    def _wait_for(self, names: list[str]) -> bool:
        """Wait for keys of the store; False if they did not come in time."""
        began_s, said = time.monotonic(), self._info.rank != 0
        while not self._store.check(names):
            waited_s = time.monotonic() - began_s
            if waited_s > self._most_s:
                return False
            if waited_s > _SOON_S and not said:
                said = True
                print(f"PipeFill: waiting for other ranks to end, for at most {self._most_s:g} s", flush=True)
            time.sleep(_LOOK_S)
        return True


def measure_alone(session: Session | None, of: int, seconds: float, others: Others) -> None:
    """Measure the jobs alone, without those of the node's other ranks, in ``of`` rounds of so many seconds.

    Every rank takes part in every round, also one whose session failed.  FillError if the ranks do not meet.
    """
    for number in range(of):
        others.meet(number)
        if session is not None and session.info.local_rank % of == number:
            session.measure_alone(seconds)
        else:
            time.sleep(seconds)
    if of:
        others.meet(of)  # so that no rank stops its jobs while others measure


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
