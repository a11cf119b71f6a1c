"""The job store in a SQL database: SQLite for one machine, PostgreSQL for a queue that several nodes share.

Every method is one short transaction.  In SQLite, a writing transaction takes the write lock at its beginning; in
PostgreSQL it locks the rows that it reads, and a claim skips rows that others hold.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.engine import URL, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, SQLAlchemyError

from megatron.fill.errors import StoreError
from megatron.fill.store.filesystem import has_locks, network_file_system
from megatron.fill.store.location import locate, shown
from megatron.fill.store.queue import JobStore
from megatron.fill.store.rows import SqlTransaction
from megatron.fill.store.schema import check_usable, make_tables
from megatron.fill.store.transaction import Transaction

_MISSING = "there is no job store {}; expected a database file, or a folder with one"
_FIRST_DELAY_S = 0.005
# Longest delay between two attempts.  SQLite's own delays grow to 100 ms, so that a process that has waited long loses
# to newcomers for seconds; hence short, even delays here, and almost none of SQLite's own.
_LONGEST_DELAY_S = {"sqlite": 0.01, "postgresql": 0.5}
_SQLITE_WAIT_S = 0.005
_OPENING_S = 30.0  # another process may be creating the tables, at the lowest priority on a busy machine
_CONNECT_S = 5  # libpq accepts only whole seconds
# PostgreSQL errors worth a retry: serialization failure, deadlock; lock not available; shutdown, startup; too many
# connections.
_PASSING_STATES = ("40001", "40P01", "55P03", "57P01", "57P02", "57P03", "53300")


class SqlStore(JobStore):
    """A job store in a SQL database, usable from several threads, and from many processes that each open it.

    Open it after a fork, not before: SQLite's connections do not survive a fork.

    Args:
        where, create: as for ``open_store``, also the errors.
        clock: clock in seconds since the epoch; None for PostgreSQL's own, since nodes' clocks differ, and for this
            machine's with SQLite.
        patience_s: time for which a call retries while the database is locked or away; opening waits 30 s at least.
    """

    def __init__(
        self,
        where: str | Path,
        *,
        create: bool = True,
        clock: Callable[[], float] | None = None,
        patience_s: float = 5.0,
    ) -> None:
        url = locate(where)
        self._shown = shown(url)
        self._patience_s = patience_s
        self._opened = False
        self._file: Path | None = None  # of SQLite
        if url.drivername == "sqlite":
            clock = clock or time.time
            self._file = Path(str(url.database))
            self._engine = _sqlite(url, self._shown, create)
        else:
            self._engine = _postgresql(url, self._shown, patience_s)
        self._clock = clock
        self._writing = self._engine.execution_options(writing=True)
        self._identity = None if self._file is None else _identity(self._file)
        try:
            opening_s = max(patience_s, _OPENING_S)
            self._retried(lambda: make_tables(self._engine, self._shown, create), opening_s)
        except BaseException:
            self._engine.dispose()
            raise
        self._opened = True

    def close(self) -> None:
        self._engine.dispose()

    def _run[T](self, work: Callable[[Transaction], T], *, write: bool = True) -> T:
        repeats = False

        def once() -> T:
            nonlocal repeats
            self._follow()
            try:
                with (self._writing if write else self._engine).begin() as connection:
                    return work(SqlTransaction(connection, self._clock, write, repeats))
            except DBAPIError as error:
                repeats = repeats or error.connection_invalidated
                raise

        return self._retried(once, self._patience_s)

    def _follow(self) -> None:
        """Use the file that is in the place of a removed one, to which nobody else writes any more."""
        if self._file is None:
            return
        found = _identity(self._file)
        if found is None:
            raise StoreError(_MISSING.format(self._file))
        if found != self._identity:
            self._identity = None  # until it is known to be a store
            self._engine.dispose()
            make_tables(self._engine, self._shown, create=False)
            self._identity = found

    def _retried[T](self, work: Callable[[], T], patience_s: float) -> T:
        until = time.monotonic() + patience_s
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                return work()
            except SQLAlchemyError as error:
                if not self._passes(error) or time.monotonic() + delay_s > until:
                    raise StoreError(f"job store {self._shown}: {_reason(error)}") from error
            time.sleep(delay_s * random.uniform(0.5, 1))  # random, so that processes that collided do not again
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S[self._engine.dialect.name])

    def _passes(self, error: SQLAlchemyError) -> bool:
        """True if the same call may succeed in a moment."""
        if isinstance(error, IntegrityError):  # another process inserted the same name, key or table just now
            return True
        if isinstance(error, DBAPIError) and error.connection_invalidated:  # the server went away
            return True
        if not isinstance(error, OperationalError):
            return False
        if isinstance(error.orig, sqlite3.Error):
            return getattr(error.orig, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))
        state = getattr(error.orig, "sqlstate", None)
        # Without a state, the server cannot be reached; if it never could be, the address is wrong.
        return self._opened if state is None else state in _PASSING_STATES


def why_away(where: str) -> str:
    """Say in a line why the server of a store cannot be used by this process now; empty if it can, and for a file.

    It asks once; how long that takes is up to the network.
    """
    url = locate(where)
    if url.drivername == "sqlite":
        return ""
    try:
        engine = _postgresql(url, shown(url), 1.0)
        try:
            check_usable(engine, shown(url))
        finally:
            engine.dispose()
    except SQLAlchemyError as error:
        return _reason(error)
    except StoreError as error:
        return str(error)
    return ""


def _identity(file: Path) -> tuple[int, int] | None:
    """The device and number of a file, which another one in its place does not have; None if it is missing."""
    with contextlib.suppress(OSError):
        at = file.stat()
        return at.st_dev, at.st_ino
    return None


def _sqlite(url: URL, where: str, create: bool) -> Engine:
    path = Path(str(url.database))
    try:
        if not path.exists():
            if not create:
                raise StoreError(_MISSING.format(path))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    except OSError as error:
        raise StoreError(f"job store {where}: cannot be made: {error.strerror}") from error
    if not has_locks(path.parent):
        expected = "a file on a local disk, or postgresql+psycopg://USER@HOST/DATABASE"
        without = "its file system has no file locks, so two processes could take one job"
        raise StoreError(f"job store {where}: {without}; expected: {expected}")
    # A connection that finds the file missing for a moment must not create it: it would keep using the new file.
    # WAL needs memory that all processes share, so a single machine; rollback journals need only file locks.
    journal = "DELETE" if network_file_system(path) else "WAL"
    existing = f"file:{quote(str(path))}?mode=rw"
    engine = create_engine(
        url, creator=lambda: sqlite3.connect(existing, uri=True, timeout=_SQLITE_WAIT_S, check_same_thread=False)
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, record: object) -> None:
        connection.isolation_level = None  # the driver would begin transactions by its own rules
        connection.execute(f"PRAGMA journal_mode = {journal}")
        # The usual NORMAL may lose the last commits in a power failure, and a finished job would run again.
        connection.execute("PRAGMA synchronous = FULL")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads first and then writes can fail halfway, however long it waits; so it locks at once.
        writing = connection.get_execution_options().get("writing", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")

    return engine


def _postgresql(url: URL, where: str, patience_s: float) -> Engine:
    if importlib.util.find_spec("psycopg") is None:
        raise StoreError(f"job store {where}: PostgreSQL needs psycopg; expected: pip install 'pipefill[postgres]'")
    limit_ms = max(1, round(patience_s * 1000))
    # Nothing may outlive a transaction on the server: a pooler such as PgBouncer gives each transaction another
    # connection, which knows neither prepared statements nor settings of the last one.
    settings = {
        "connect_timeout": _CONNECT_S,
        "tcp_user_timeout": 2 * limit_ms,  # detects that the server's machine is gone
        "prepare_threshold": None,
        "application_name": "pipefill",
    }
    own = {name: value for name, value in settings.items() if name not in url.query}
    engine = create_engine(url, connect_args=own)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # An agent that is stopped in the middle of a transaction must not block the others.
        connection.exec_driver_sql(
            f"SET LOCAL lock_timeout = {limit_ms}; SET LOCAL idle_in_transaction_session_timeout = {4 * limit_ms}"
        )

    return engine


def _reason(error: SQLAlchemyError) -> str:
    """The driver's message in one line, without the statement and its values."""
    said = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    text = " ".join(str(said).split())
    if getattr(said, "sqlite_errorname", "").startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
        text += (
            "; expected a database that this user may write, in such a folder, as SQLite writes there to read it, too"
        )
    return text or type(said).__name__
