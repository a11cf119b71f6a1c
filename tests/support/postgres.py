"""A private PostgreSQL: its own cluster in a temporary folder, reached through a socket in it, gone afterwards."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_START_S = 60
_POOLER_PORT = 6432
_PROGRAMS = ("initdb", "postgres", "pg_isready")


class NoPostgres(Exception):
    """It cannot be run here; the message says why."""


class PrivatePostgres:
    """A running PostgreSQL, as a context manager.

    Args:
        durable: write through to the disk, as a real one does.
        address: address in ``within`` at which it listens besides, for that network.
        within: command that runs another one in a network namespace.

    Raises:
        NoPostgres: it is not installed, or does not start.
    """

    def __init__(self, durable: bool = False, address: str = "", within: Sequence[str] = ()) -> None:
        self._binaries = _binaries()
        self._durable = durable
        self._address = address
        self._within = within
        self._databases = 0
        self._pooler: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PrivatePostgres:
        self.folder = Path(tempfile.mkdtemp(prefix="pipefill-postgres-"))
        try:
            self._initialise()
            self.start()
        except BaseException:
            shutil.rmtree(self.folder)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pooler is not None:
            self._pooler.kill()
            self._pooler.wait()
        self.stop()
        shutil.rmtree(self.folder)

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://pipefill@/{database}?host={self.folder}"

    def over_network(self, url: str) -> str:
        """The URL of the same database by way of ``address``."""
        return url.replace("@/", f"@{self._address}/").partition("?")[0]

    def new_database(self) -> str:
        """The URL of a new database, which is empty."""
        import psycopg

        self._databases += 1
        name = f"db{self._databases}"
        with psycopg.connect(f"host={self.folder} user=pipefill dbname=postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self.url(name)

    def pooled(self, url: str) -> str:
        """The URL of the same database by way of PgBouncer, which gives each transaction another connection.

        Raises:
            NoPostgres: PgBouncer is not installed, or does not start.
        """
        if self._pooler is None:
            self._pooler = self._start_pooler()
        return url.replace(f"?host={self.folder}", f"?host={self.folder}&port={_POOLER_PORT}")

    def start(self) -> None:
        log = (self.folder / "log").open("ab")
        with log:
            self._server = subprocess.Popen(
                # The kernel ends it when the thread that starts it dies, however that happens.
                [
                    *(*self._within, *_as_other_user("--pdeathsig", "INT")),
                    *(self._binaries / "postgres", "-D", self.folder / "data"),
                ],
                stdout=log,
                stderr=log,
                cwd="/",
            )
        until = time.monotonic() + _START_S
        ready = [str(self._binaries / "pg_isready"), "--quiet", "--host", str(self.folder)]
        while subprocess.run(ready, check=False).returncode != 0:
            if self._server.poll() is not None or time.monotonic() > until:
                self.stop()
                raise NoPostgres(f"PostgreSQL does not start: {(self.folder / 'log').read_text()[-400:]}")
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Shut it down at once, with SIGQUIT as in a crash; its clients lose their connections."""
        self._server.send_signal(how)
        self._server.wait(_START_S)

    def _start_pooler(self) -> subprocess.Popen[bytes]:
        program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if program is None:
            raise NoPostgres("PgBouncer is not installed")
        settings = self.folder / "pgbouncer.ini"
        # auth_type any forgets who the client is, so the database names the user.
        settings.write_text(
            f"[databases]\n* = host={self.folder} user=pipefill\n"
            f"[pgbouncer]\npool_mode = transaction\nauth_type = any\ndefault_pool_size = 3\nserver_idle_timeout = 1\n"
            f"listen_port = {_POOLER_PORT}\nunix_socket_dir = {self.folder}\n"
        )
        with (self.folder / "pgbouncer.log").open("ab") as log:
            pooler = subprocess.Popen(
                [*_as_other_user("--pdeathsig", "KILL"), program, settings], stdout=log, stderr=log, cwd="/"
            )
        socket = self.folder / f".s.PGSQL.{_POOLER_PORT}"
        until = time.monotonic() + _START_S
        while not socket.exists():
            if pooler.poll() is not None or time.monotonic() > until:
                raise NoPostgres(f"PgBouncer does not start: {(self.folder / 'pgbouncer.log').read_text()[-400:]}")
            time.sleep(0.05)
        return pooler

    def _initialise(self) -> None:
        if os.geteuid() == 0:
            shutil.chown(self.folder, _USER)
        self._call(
            "initdb",
            "--auth=trust",
            "--username=pipefill",
            "--no-sync",
            "--encoding=UTF8",
            "--locale=C",
            f"--pgdata={self.folder / 'data'}",
        )
        settings = f"listen_addresses = '{self._address}'\nunix_socket_directories = '{self.folder}'\n"
        if not self._durable:
            settings += "fsync = off\nsynchronous_commit = off\nfull_page_writes = off\n"
        with (self.folder / "data" / "postgresql.conf").open("a") as file:
            file.write(settings)
        with (self.folder / "data" / "pg_hba.conf").open("a") as file:
            file.write("host all all samenet trust\n")

    def _call(self, program: str, *arguments: str) -> None:
        command = [*_as_other_user(), str(self._binaries / program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
        if done.returncode != 0:
            raise NoPostgres(f"{program} failed: {done.stderr.strip()[-400:]}")


def _user() -> str:
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


_USER = _user()


def _as_other_user(*options: str) -> list[str]:
    """What goes before a command: PostgreSQL refuses to run as root."""
    if os.geteuid() == 0:
        group = str(pwd.getpwnam(_USER).pw_gid)
        options = ("--reuid", _USER, "--regid", group, "--clear-groups", *options)
    return ["setpriv", *options, "--"]


def _binaries() -> Path:
    """The newest PostgreSQL that is installed."""
    on_path = shutil.which("initdb")
    debian = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: float(folder.parent.name), reverse=True
    )
    candidates = debian + ([Path(on_path).resolve().parent] if on_path else [])
    for folder in candidates:
        if all((folder / program).exists() for program in _PROGRAMS):
            return folder
    raise NoPostgres(
        "PostgreSQL is not installed: no initdb with the other programs on PATH or under /usr/lib/postgresql"
    )
