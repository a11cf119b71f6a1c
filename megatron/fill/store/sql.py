"""The job store in a SQL database: SQLite for one machine, PostgreSQL where several nodes share a queue.

Everything is one short transaction.  In SQLite, one that writes takes the write lock at its beginning; in PostgreSQL it
locks the rows that it reads, and a claim skips those that others hold.
"""

from __future__ import annotations

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
from megatron.fill.store.filesystem import network_file_system
from megatron.fill.store.location import locate, shown
from megatron.fill.store.migrate import migrate
from megatron.fill.store.queue import JobQueue
from megatron.fill.store.rows import SqlTransaction
from megatron.fill.store.transaction import Transaction

_FIRST_DELAY_S = 0.005
# Between two attempts.  SQLite's own waiting grows to 100 ms, so that those who have waited long lose to those who come
# anew, for seconds on end; hence short and even delays, and almost none of its own.
_LONGEST_DELAY_S = {"sqlite": 0.01, "postgresql": 0.5}
_SQLITE_WAIT_S = 0.005
_OPENING_S = 30.0  # whoever else opens it may be making its tables, at the lowest priority on a busy machine
_CONNECT_S = 5  # libpq takes whole seconds
# PostgreSQL's: serialization failure, deadlock; lock not available; shutting down, starting up; too many connections.
_PASSING_STATES = ("40001", "40P01", "55P03", "57P01", "57P02", "57P03", "53300")


class SqlStore(JobQueue):
    """A job store in a SQL database; usable from several threads, and from many processes that each open it.

    Open it after a fork, not before: SQLite's connections do not survive one.

    Args:
        where: as ``open_store`` takes it.
        create: make what is missing.
        clock: seconds since the epoch; by default PostgreSQL's own, since nodes' clocks differ, and this machine's for
            SQLite.
        patience_s: how long one call goes on trying while the database is locked or just went away; opening it waits
            30 s or more.

    Raises:
        StoreError: as ``open_store``.
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
        if url.drivername == "sqlite":
            clock = clock or time.time
            self._engine = _sqlite(url, self._shown, create)
        else:
            self._engine = _postgresql(url, self._shown, patience_s)
        self._clock = clock
        self._writing = self._engine.execution_options(writing=True)
        try:
            opening_s = max(patience_s, _OPENING_S)
            self._retried(lambda: migrate(self._engine, self._writing, self._shown, create), opening_s)
        except BaseException:
            self._engine.dispose()
            raise
        self._opened = True

    def close(self) -> None:
        self._engine.dispose()

    def _run[T](self, work: Callable[[Transaction], T], *, write: bool = True) -> T:
        def once() -> T:
            with (self._writing if write else self._engine).begin() as connection:
                return work(SqlTransaction(connection, self._clock, locking=write))

        return self._retried(once, self._patience_s)

    def _retried[T](self, work: Callable[[], T], patience_s: float) -> T:
        until = time.monotonic() + patience_s
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                return work()
            except SQLAlchemyError as error:
                if not self._passes(error) or time.monotonic() + delay_s > until:
                    raise StoreError(f"job store {self._shown}: {_reason(error)}") from error
            time.sleep(delay_s * random.uniform(0.5, 1))  # so that those who collided do not meet again
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S[self._engine.dialect.name])

    def _passes(self, error: SQLAlchemyError) -> bool:
        """Whether the same call may well succeed in a moment."""
        if isinstance(error, IntegrityError):  # another process inserted the same name, key or table just now
            return True
        if isinstance(error, DBAPIError) and error.connection_invalidated:  # the server went away
            return True
        if not isinstance(error, OperationalError):
            return False
        if isinstance(error.orig, sqlite3.Error):
            return getattr(error.orig, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))
        state = getattr(error.orig, "sqlstate", None)
        # Without a state, the server cannot be reached: one that never could be is a wrong address.
        return self._opened if state is None else state in _PASSING_STATES


def _sqlite(url: URL, where: str, create: bool) -> Engine:
    path = Path(str(url.database))
    try:
        if not path.exists():
            if not create:
                raise StoreError(f"there is no job store {path}; expected a database file, or a folder with one")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    except OSError as error:
        raise StoreError(f"job store {where}: cannot be made: {error.strerror}") from error
    # A connection that finds no file, because it is away for a moment, is not to make one: it would stay with that.
    # WAL's shared memory is one machine's; rollback journals need only the file system's locks.
    journal = "DELETE" if network_file_system(path) else "WAL"
    existing = f"file:{quote(str(path))}?mode=rw"
    engine = create_engine(
        url, creator=lambda: sqlite3.connect(existing, uri=True, timeout=_SQLITE_WAIT_S, check_same_thread=False)
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, record: object) -> None:
        connection.isolation_level = None  # the driver would begin transactions by rules of its own
        connection.execute(f"PRAGMA journal_mode = {journal}")
        # WAL's usual NORMAL may lose the last commits when the power fails: a job that has finished would run again.
        connection.execute("PRAGMA synchronous = FULL")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that first reads and then writes can fail halfway, however long it waits: lock at once.
        writing = connection.get_execution_options().get("writing", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")

    return engine


def _postgresql(url: URL, where: str, patience_s: float) -> Engine:
    if importlib.util.find_spec("psycopg") is None:
        raise StoreError(f"job store {where}: PostgreSQL needs psycopg; expected: pip install 'pipefill[postgres]'")
    limit_ms = max(1, round(patience_s * 1000))
    settings = {
        "connect_timeout": _CONNECT_S,
        "tcp_user_timeout": 2 * limit_ms,  # notice that the server's machine is gone
        # An agent that is stopped in the middle of a transaction must not hold up the others.
        "options": f"-c lock_timeout={limit_ms} -c idle_in_transaction_session_timeout={4 * limit_ms}",
        "application_name": "pipefill",
    }
    own = {name: value for name, value in settings.items() if name not in url.query}
    return create_engine(url, connect_args=own)


def _reason(error: SQLAlchemyError) -> str:
    """What the driver said, in one line, without the statement and its values."""
    said = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    text = " ".join(str(said).split())
    return text or type(said).__name__
