"""The account of one rank's time in one segment: ``account0.json``, replaced every few seconds while it trains."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megatron.fill.account import Account, Spent
from megatron.fill.linux.files import replacing
from megatron.fill.linux.proc import waited_ns_in
from megatron.fill.records.files import content_of, head, read_lines
from megatron.fill.types import RankInfo

logger = logging.getLogger("pipefill")

_WRITE_S = 10.0
MOST_SAMPLES = 100  # sampled iterations of a rank that are kept
BLIND = (
    "NO WAIT FOR ANOTHER STAGE WAS SEEN: this training's waits do not go through torch.distributed as PipeFill knows "
    "it, so nothing can be filled there; megatron.fill.bubble marks bubbles by hand"
)


class Traced(NamedTuple):
    """The span of an iteration in the training's own trace: OpenTelemetry's numbers of both, in hexadecimal."""

    iteration: int
    trace: str
    span: str


@dataclass(frozen=True, slots=True)
class AccountRecord:
    """The account of a rank from the start of its process to the latest write."""

    rank: int
    stage: int
    stages: int
    wall_ns: int  # the time from the start of its process
    waited: bool  # False if no wait for another stage was seen
    spent: Mapping[str, Spent] = field(default_factory=dict)  # the time by name
    # seconds of each of Megatron's own timers; empty below ``--timing-log-level 1``
    timers: Mapping[str, float] = field(default_factory=dict)
    traced: Sequence[Traced] = ()  # the spans of the training's own trace that the latest sampled iterations ran in
    host_late_ns: int = 0  # the time since the start-up for which its main thread was ready and had no core

    @property
    def blind(self) -> bool:
        """True if an optimizer step of several stages has begun and no wait was seen."""
        return self.stages > 1 and not self.waited and "optimizer" in self.spent


def _file(folder: Path, rank: int) -> Path:
    return folder / f"account{rank}.json"


def read_accounts(folder: Path) -> list[AccountRecord]:
    """Return the accounts that a segment's ranks left, ascending by rank; FillError if one is damaged."""
    return sorted(map(_read, folder.glob("account*.json")), key=lambda one: one.rank)


def read_account(folder: Path, rank: int) -> AccountRecord | None:
    """Return the account of one rank, read as by ``read_accounts``; None if it has left none yet."""
    path = _file(folder, rank)
    return _read(path) if path.exists() else None


def _read(path: Path) -> AccountRecord:
    content = next(read_lines(path, "account"))
    with content_of(path):
        spent = {name: Spent(**values) for name, values in content["spent"].items()}
        return AccountRecord(**content | {"spent": spent, "traced": [Traced(*one) for one in content["traced"]]})


class AccountWriter:
    """Writes the account of this process, in a thread of its own; a slow or full disk delays nobody.

    The thread that makes it is the one whose account it is.  ``waited`` returns True once a wait for another stage has
    been seen; the training's thread appends to ``traced``.
    """

    def __init__(
        self,
        folder: Path,
        info: RankInfo,
        account: Account,
        waited: Callable[[], bool],
        traced: deque[Traced] | None = None,
    ) -> None:
        self._path = _file(folder, info.rank)
        self._info, self._account, self._waited = info, account, waited
        self._traced = deque[Traced]() if traced is None else traced
        self._warned = False
        account.without_core = partial(waited_ns_in, Path(f"/proc/self/task/{threading.get_native_id()}/schedstat"))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="account", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the account a last time."""
        self._over.set()
        self._thread.join(_WRITE_S)

    def _run(self) -> None:
        self._write()  # of a training that is killed before the next one this is left
        while not self._over.wait(_WRITE_S):
            self._write()
        self._write()

    def _write(self) -> None:
        spent, info = self._account.snapshot(), self._info
        wall_ns = sum(one.ns for one in spent.values())
        try:
            timers = self._account.timers()
        except Exception:  # another version's: the account itself is not lost
            logger.debug("Megatron's timers cannot be read", exc_info=True)
            timers = {}
        traced = list(self._traced.copy())
        late_ns = self._account.host_late_ns
        record = AccountRecord(
            info.rank, info.stage, info.stages, wall_ns, self._waited(), spent, timers, traced, late_ns
        )
        if record.blind and not self._warned:
            self._warned = True
            logger.error("rank %d (stage %d): %s", info.rank, info.stage, BLIND)
        try:
            with replacing(self._path) as temporary:
                temporary.write_bytes(head("account", **asdict(record)))
        except OSError as error:
            logger.debug("%s cannot be written: %s", self._path, error)
