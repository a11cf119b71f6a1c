"""The URL of a store's database, from the text that a user gives for the store."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from megatron.fill.errors import StoreError

JOBS_DB = "jobs.db"  # in a run folder
ENVIRONMENT = "PIPEFILL_STORE"  # the variable
WHERE_PASSWORDS_GO = f"in ${ENVIRONMENT}, $PGPASSWORD or ~/.pgpass"
_FILE_SUFFIXES = (".db", ".sqlite", ".sqlite3")
_EXPECTED = "expected sqlite:///FILE, postgresql+psycopg://USER@HOST/DATABASE, a database file or a run folder"


def shown(url: URL | str) -> str:
    """The URL without its passwords."""
    text = url if isinstance(url, str) else url.render_as_string(hide_password=False)
    text = re.sub(r"(://[^:/@]*):.*@", r"\1:***@", text)
    return re.sub(r"(password=)[^&]*", r"\1***", text)


def has_password(where: str) -> bool:
    """True if a store is given by a PostgreSQL URL with a password."""
    try:
        url = make_url(where)
    except (ArgumentError, ValueError):  # a file, or an empty text
        return False
    if not url.drivername.startswith("postgres"):
        return False
    return bool(url.password) or any("password" in name for name in url.query)


def password_files(where: str) -> tuple[str, ...]:
    """The files from which libpq may take the password of a PostgreSQL store; none for another database."""
    url = locate(where)
    if url.drivername == "sqlite":
        return ()
    named = url.query.get("passfile") or os.environ.get("PGPASSFILE") or "~/.pgpass"
    service = os.environ.get("PGSERVICEFILE") or "~/.pg_service.conf"
    return tuple(os.path.expanduser(path) for path in (str(named), service))


def print_next(store: str | None, *commands: str, plain: Sequence[str] = ()) -> None:
    """Print the commands that one wants next (``plain``: without the store) for people, so not into a pipe."""
    if not sys.stdout.isatty():
        return
    known = not store or store == os.environ.get(ENVIRONMENT)
    option = "" if known else f" --store {shlex.quote(shown(str(store)))}"
    lines = [*plain, *(f"{command}{option}" for command in commands)]
    print("\n".join(["Next:", *(f"  pipefill {line}" for line in lines)]), flush=True)


def locate(where: str | Path) -> URL:
    """The URL of a store given as a URL, a database file or a run folder; StoreError if ``where`` is something else."""
    if isinstance(where, str) and "://" in where:
        return _parse(where)
    if not str(where).strip():
        raise StoreError(f"the job store is given as {str(where)!r}; {_EXPECTED}")
    path = Path(where).expanduser()
    # os.path's functions report a too long name as missing; the error is then raised when the file is created.
    if os.path.isdir(path) or (not os.path.exists(path) and path.suffix not in _FILE_SUFFIXES):
        path /= JOBS_DB
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise StoreError(f"the job store {str(path)!r} is not UTF-8, as SQLite needs; {_EXPECTED}") from None
    return URL.create("sqlite", database=str(path.absolute()))


def database_file(where: str) -> Path | None:
    """The file of an SQLite store; None for another database."""
    url = locate(where)
    return Path(str(url.database)) if url.drivername == "sqlite" else None


def database_files(where: str) -> tuple[str, ...]:
    """The files that an SQLite store consists of while it is in use; none for another database."""
    file = database_file(where)
    return () if file is None else tuple(f"{file}{suffix}" for suffix in ("", "-wal", "-shm", "-journal"))


def _parse(text: str) -> URL:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise StoreError(f"{shown(text)!r} is not a database URL; {_EXPECTED}") from None
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    if url.drivername not in ("sqlite", "postgresql+psycopg"):
        raise StoreError(f"{shown(text)!r} is a database of another kind ({url.drivername}); {_EXPECTED}")
    if url.drivername == "sqlite":
        if url.database in (None, "", ":memory:") or url.query:
            raise StoreError(f"{shown(text)!r} names no file; expected sqlite:///FILE, without options")
        url = url.set(database=str(Path(str(url.database)).expanduser().absolute()))
    return url
