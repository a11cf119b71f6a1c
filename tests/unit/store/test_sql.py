"""What only the SQL stores must do: find their database, make its tables, wait for it, and say what is wrong."""

from __future__ import annotations

import importlib.util
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from megatron.fill.errors import JobError, StoreError
from megatron.fill.store import open_store
from megatron.fill.store.location import has_password, locate, password_files, shown
from megatron.fill.store.schema import VERSION
from megatron.fill.store.sql import SqlStore, why_away
from megatron.fill.types import JobState
from megatron.fill.work import NewJob, Work
from tests.support.postgres import NoPostgres, PrivatePostgres


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a database that is not there or empty."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    return request.getfixturevalue("postgres").new_database()


def test_a_url_of_several_hosts_follows_a_failover():
    """The second server has its tables from before; what a standby had copied would be in them."""
    pytest.importorskip("psycopg", reason="needs the extra postgres")
    try:
        with PrivatePostgres() as first, PrivatePostgres() as second:
            urls = [server.new_database() for server in (first, second)]
            for url, name in zip(urls, ("in-first", "in-second"), strict=True):
                with closing(open_store(url)) as store:
                    store.submit([job(name)])
            both = f"{urls[0]},{second.folder}&target_session_attrs=read-write"
            with closing(open_store(both)) as store:
                assert [one.name for one in store.list()] == ["in-first"]
                first.stop()
                assert [one.name for one in store.list()] == ["in-second"]
                first.start()
    except NoPostgres as error:
        pytest.skip(str(error))


def test_why_a_store_is_away_is_told_in_a_line(url):
    assert why_away(url) == ""
    if "postgresql" in url:
        assert 'database "none" does not exist' in why_away(str(locate(url).set(database="none")))


def test_a_user_without_rights_in_the_database_is_told_which_one_is_lacking(postgres):
    url = postgres.new_database()
    ours = create_engine(locate(url), isolation_level="AUTOCOMMIT")
    theirs = str(locate(url).set(username="guest"))
    with closing(ours.raw_connection()) as connection:

        def run(statement: str) -> None:
            connection.cursor().execute(statement)
            connection.commit()

        run("DROP ROLE IF EXISTS guest")
        run("CREATE ROLE guest LOGIN")
        assert "GRANT CREATE ON SCHEMA" in why_away(theirs)
        with closing(SqlStore(url)) as store:
            assert "permission denied for table pipefill_schema" in why_away(theirs)
            run("GRANT SELECT ON ALL TABLES IN SCHEMA public TO guest")
            assert "GRANT INSERT ON pipefill_jobs" in why_away(theirs)
            run("GRANT ALL ON ALL TABLES IN SCHEMA public TO guest")
            assert "GRANT USAGE ON SEQUENCE pipefill_jobs_id_seq" in why_away(theirs)
            run("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO guest")
            assert why_away(theirs) == ""
            with closing(SqlStore(theirs)) as guest:
                guest.submit([job()])
            assert [one.name for one in store.list()] == ["pi"]
        run("UPDATE pipefill_schema SET version_num = 'v9999'")
        assert "has the schema v9999" in why_away(theirs)
        run("DROP OWNED BY guest")
        run("DROP ROLE guest")
    ours.dispose()


def test_what_was_done_although_its_answer_was_lost_is_no_error(postgres, monkeypatch):
    import psycopg

    with closing(SqlStore(postgres.new_database())) as store:
        [pi] = store.submit([job()])
        commit = store._engine.dialect.do_commit
        lost: list[bool] = []

        def commit_and_lose(connection: Any) -> None:
            commit(connection)
            if not lost:
                lost.append(True)
                connection.dbapi_connection.close()
                raise psycopg.OperationalError("server closed the connection unexpectedly")

        monkeypatch.setattr(store._engine.dialect, "do_commit", commit_and_lose)
        assert store.cancel(pi.id).state is JobState.CANCELLED
        assert lost
        with pytest.raises(JobError, match="is CANCELLED"):
            store.cancel(pi.id)
        lost.clear()
        assert store.retry(pi.id).state is JobState.QUEUED
        with pytest.raises(JobError, match="is QUEUED"):
            store.retry(pi.id)
        store.cancel(pi.id)
        store.submit([job("newest")])
        lost.clear()
        assert store.forget([pi.id], store.now_s() + 1) == [pi.id]
        assert store.forget([pi.id], store.now_s() + 1) == []


def job(name: str = "pi") -> NewJob:
    return NewJob(name, Work("tasks:Pi"))


def test_a_removed_database_is_missed_and_the_one_in_its_place_used(tmp_path):
    with closing(open_store(tmp_path)) as store:
        store.submit([job("before")])
        away = [path.rename(tmp_path / f"away-{path.name}") for path in tmp_path.iterdir()]
        with pytest.raises(StoreError, match="there is no job store"):
            store.submit([job("lost")])
        with closing(sqlite3.connect(tmp_path / "jobs.db")) as another:
            another.execute("CREATE TABLE pipefill_schema (version_num)")
            another.execute("INSERT INTO pipefill_schema VALUES ('v9999')")
            another.commit()
        with pytest.raises(StoreError, match="has the schema v9999"):
            store.list()
        for path in tmp_path.glob("jobs.db*"):
            path.unlink()
        for path in away:
            path.rename(tmp_path / path.name.removeprefix("away-"))
        assert [one.name for one in store.list()] == ["before"]
        for path in tmp_path.iterdir():
            path.unlink()
        with closing(open_store(tmp_path)) as other:
            other.submit([job("after")])
            assert [one.name for one in store.list()] == ["after"]
            store.submit([job("too")])
            assert [one.name for one in other.list()] == ["after", "too"]


@pytest.mark.parametrize("change", ["progress = '{\"new\": 1}'", "spec = '[]'", "status = '3'", "result = '['"])
def test_a_row_that_cannot_be_read_is_named(url, change):
    with closing(open_store(url)) as store:
        store.submit([job()])
        engine = create_engine(locate(url))
        with engine.begin() as connection:
            connection.execute(text(f"UPDATE pipefill_jobs SET {change}".replace(":", "\\:")))
        engine.dispose()
        with pytest.raises(StoreError, match="job 1 in the job store cannot be read"):
            store.list()


def test_importing_the_package_is_cheap():
    slow = ("torch", "sqlalchemy", "pydantic", "megatron.core")
    code = f"import sys, megatron.fill.store; sys.exit(any(name in sys.modules for name in {slow}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestLocation:
    @pytest.mark.parametrize(
        ("where", "database"),
        [
            ("sqlite:///jobs.db", "jobs.db"),
            ("jobs.db", "jobs.db"),
            ("other.sqlite3", "other.sqlite3"),
            ("runs/first", "runs/first/jobs.db"),
            ("runs/v1.2", "runs/v1.2/jobs.db"),
            (Path("there"), "there/jobs.db"),
            ("there", "there/jobs.db"),
            ("odd", "odd"),
        ],
    )
    def test_files_and_folders(self, tmp_path, monkeypatch, where, database):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "there").mkdir()
        (tmp_path / "odd").touch()
        assert locate(where).drivername == "sqlite"
        assert locate(where).database == str(tmp_path / database)

    @pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
    def test_postgresql_is_taken_as_psycopg(self, scheme):
        assert str(locate(f"{scheme}://ada@host:5433/jobs")) == "postgresql+psycopg://ada@host:5433/jobs"

    @pytest.mark.parametrize(
        ("where", "message"),
        [
            ("", "the job store is given as ''; expected"),
            ("mysql://ada:secret@host/jobs", r"'mysql://ada:\*\*\*@host/jobs' is a database of another kind \(mysql\)"),
            ("postgresql+psycopg2://ada:secret@host/jobs", r"of another kind \(postgresql\+psycopg2\)"),
            (
                "postgresql://ada:secret@host:port/jobs",
                r"'postgresql://ada:\*\*\*@host:port/jobs' is not a database URL",
            ),
            ("://ada:sec@ret@host", r"'://ada:\*\*\*@host' is not a database URL; expected"),
            ("sqlite://", "names no file; expected sqlite:///FILE"),
            ("sqlite:///:memory:", "names no file"),
            ("sqlite:///jobs.db?mode=ro", "without options"),
        ],
    )
    def test_what_is_none_says_what_was_expected(self, where, message):
        with pytest.raises(StoreError, match=message) as caught:
            open_store(where)
        assert "secret" not in str(caught.value)

    def test_passwords_are_not_shown(self):
        for text_ in ("postgresql://ada:sec:r@et@host/jobs", "postgresql://host/jobs?user=ada&password=secret&x=1"):
            assert "sec" not in shown(locate(text_))
        assert shown(locate("postgresql://ada:p@host/jobs")) == "postgresql+psycopg://ada:***@host/jobs"


class TestOpening:
    @pytest.mark.parametrize(
        ("where", "has"),
        [
            ("postgresql://ada:secret@db/x", True),
            ("postgresql+psycopg://db/x?user=ada&password=secret", True),
            ("postgresql://db/x?sslpassword=secret", True),
            ("postgresql://ada@db:5432/x?passfile=/etc/pgpass", False),
            ("postgresql://db:5432/x?user=a%40b", False),
            ("sqlite:////data/a:b@c.db", False),
            ("runs/first", False),
            ("", False),
        ],
    )
    def test_a_url_with_a_password_is_told_from_others(self, where, has):
        assert has_password(where) == has

    def test_the_files_that_hold_passwords(self, monkeypatch):
        for name in ("PGPASSFILE", "PGSERVICEFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", "/home/ada")
        usual = ("/home/ada/.pgpass", "/home/ada/.pg_service.conf")
        assert password_files("postgresql://ada@db/x") == usual
        assert password_files("postgresql://ada@db/x?passfile=/etc/p")[0] == "/etc/p"
        monkeypatch.setenv("PGPASSFILE", "/run/secrets/p")
        assert password_files("postgresql://ada@db/x") == ("/run/secrets/p", usual[1])
        assert password_files("runs/first") == ()

    def test_a_missing_psycopg_is_named(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(StoreError, match=r"pip install 'pipefill\[postgres\]'") as caught:
            open_store("postgresql://ada:secret@host/jobs")
        assert "secret" not in str(caught.value)

    def test_an_unreachable_server_is_named_at_once(self):
        pytest.importorskip("psycopg", reason="needs the extra postgres")
        # It does not wait for a server that never was there: the patience is longer than a test may take.
        with pytest.raises(
            StoreError, match=r"job store postgresql\+psycopg://ada:\*\*\*@127.0.0.1:1/jobs: "
        ) as caught:
            SqlStore("postgresql://ada:secret@127.0.0.1:1/jobs", patience_s=3600)
        assert "secret" not in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_a_wrong_option_of_a_url(self):
        with pytest.raises(StoreError, match="nonsense"):
            open_store("postgresql://ada@127.0.0.1:1/jobs?nonsense=1")

    def test_folders_are_made(self, tmp_path):
        open_store(tmp_path / "runs" / "first").close()
        assert (tmp_path / "runs" / "first" / "jobs.db").exists()

    def test_nothing_is_made_where_that_was_not_asked(self, tmp_path, url):
        with pytest.raises(StoreError, match=r"there is no job store|has no job store in it"):
            open_store(url, create=False)
        assert list(tmp_path.iterdir()) == []
        open_store(url).close()
        open_store(url, create=False).close()

    def test_a_file_that_is_no_database(self, tmp_path):
        path = tmp_path / "notes.txt"
        path.write_text("not a database " * 100)
        with pytest.raises(StoreError, match=r"notes\.txt: file is not a database"):
            open_store(path)

    def test_a_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(StoreError, match="cannot be made: Not a directory"):
            open_store(tmp_path / "file" / "runs" / "jobs.db")

    @pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + ".db"])
    def test_a_name_that_is_too_long(self, tmp_path, name):
        with pytest.raises(StoreError, match="cannot be made: File name too long"):
            open_store(tmp_path / name)

    def test_a_file_that_is_away_is_not_made_anew(self, tmp_path):
        path, away = tmp_path / "jobs #1?.db", tmp_path / "away.db"
        store = SqlStore(path)
        store.submit([job()])
        store._engine.dispose()  # the connections, as after a while without use
        path.rename(away)
        with pytest.raises(StoreError, match="there is no job store"):
            store.list()
        assert not path.exists()
        away.rename(path)
        assert [one.name for one in store.list()] == ["pi"]
        store.close()

    def test_sqlite_keeps_what_it_acknowledged(self, tmp_path):
        store = SqlStore(tmp_path)
        with store._engine.connect() as connection:
            assert connection.scalar(text("PRAGMA journal_mode")) == "wal"
            assert connection.scalar(text("PRAGMA synchronous")) == 2  # FULL
        store.close()


class TestTables:
    def test_many_open_a_new_database_at_once(self, url):
        failures: list[BaseException] = []
        barrier = threading.Barrier(6)

        def opener(number: int) -> None:
            barrier.wait()
            try:
                store = open_store(url)
                store.submit([job(f"job-{number}")])
                store.close()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=opener, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        store = open_store(url)
        assert len(store.list()) == 6
        store.close()

    def test_another_schema_is_refused(self, url):
        open_store(url).close()
        with create_engine(locate(url)).begin() as connection:
            connection.execute(text("UPDATE pipefill_schema SET version_num = 'v9999'"))
        with pytest.raises(StoreError, match=f"has the schema v9999, and this PipeFill {VERSION}; expected"):
            open_store(url)


class TestWaiting:
    def test_a_locked_database_is_waited_for(self, tmp_path):
        store = SqlStore(tmp_path, patience_s=30)
        other = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.3, lambda: other.execute("ROLLBACK"))
        timer.start()
        store.submit([job()])
        timer.join()
        other.close()
        store.close()

    def test_who_makes_the_tables_is_waited_for_longer(self, tmp_path):
        other = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None, check_same_thread=False)
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.5, lambda: other.execute("ROLLBACK"))
        timer.start()
        SqlStore(tmp_path, patience_s=0.1).close()
        timer.join()
        other.close()

    def test_one_that_stays_locked_is_an_error_and_no_harm(self, tmp_path):
        store = SqlStore(tmp_path, patience_s=0.2)
        other = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"jobs\.db: database is locked"):
            store.submit([job()])
        assert store.list() == []  # readers need no lock
        other.execute("ROLLBACK")
        other.close()
        assert len(store.submit([job()])) == 1
        store.close()

    def test_a_full_disk_is_an_error_and_no_harm(self, tmp_path):
        store = SqlStore(tmp_path)
        with store._engine.connect() as connection:  # the pool hands out the same one again
            connection.execute(text("PRAGMA max_page_count = 1"))
        with pytest.raises(StoreError, match="database or disk is full"):
            store.submit([job(), NewJob("big", Work(args={"x": "x" * 1_000_000}))])
        assert store.list() == []
        with store._engine.connect() as connection:
            connection.execute(text("PRAGMA max_page_count = 100000"))
        assert len(store.submit([job()])) == 1
        store.close()


class TestPostgres:
    def test_a_restarted_server_is_found_again(self, postgres):
        store = SqlStore(postgres.new_database())
        [before] = store.submit([job()])
        postgres.stop()
        postgres.start()
        assert store.get(before.id) == before
        store.close()

    def test_a_server_that_comes_back_in_time_is_waited_for(self, postgres):
        store = SqlStore(postgres.new_database(), patience_s=60)
        postgres.stop()
        waiting = threading.Thread(target=store.submit, args=([job()],))
        waiting.start()
        time.sleep(0.3)
        postgres.start()
        waiting.join()
        assert len(store.list()) == 1
        store.close()

    def test_a_server_that_is_gone_is_an_error_and_no_harm(self, postgres):
        store = SqlStore(postgres.new_database(), patience_s=0.2)
        store.submit([job()])
        postgres.stop()
        try:
            with pytest.raises(StoreError, match="job store postgresql"):
                store.list()
        finally:
            postgres.start()
        assert len(store.list()) == 1
        store.close()

    def test_a_claim_passes_over_what_another_one_holds(self, postgres):
        import psycopg

        url = postgres.new_database()
        store = SqlStore(url)
        first, second = store.submit([job("first"), job("second")])
        with psycopg.connect(url.replace("+psycopg", "")) as other:
            other.execute("SELECT * FROM pipefill_jobs WHERE name = 'first' FOR UPDATE")
            claim = store.claim("agent", [first.id, second.id], 10)
            assert claim is not None
            assert claim.job.name == "second"
            assert store.claim("agent", [first.id], 10) is None
        assert store.claim("agent", [first.id], 10) is not None
        store.close()

    def test_leases_go_by_the_servers_clock(self, postgres, monkeypatch):
        url = postgres.new_database()
        monkeypatch.setattr(time, "time", lambda: 0.0)
        store = SqlStore(url)
        [queued] = store.submit([job()])
        claim = store.claim("agent", [queued.id], 3600)
        assert claim is not None
        assert claim.job.lease_until_s is not None
        assert claim.job.lease_until_s > 1e9
        assert store.recover() == 0
        store.close()
