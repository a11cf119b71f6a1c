"""A jobs file's errors name the file, the job, the field, the value and what was expected."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import pytest

from megatron.fill.config import FillSettings
from megatron.fill.errors import ConfigError
from megatron.fill.given.jobs import load_jobs
from megatron.fill.given.quantities import parse_bytes
from megatron.fill.types import Prices
from tests.support.flags import flags


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "jobs.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_whole_file(tmp_path):
    jobs = load_jobs(
        write(
            tmp_path,
            """
version: 1
jobs:
  - name: digits
    task: examples.tasks.digits:DigitsTraining
    args: {batch_size: 32, day: 2026-01-02, rate: 1e-4}
    memory: 1.5 GiB
    priority: 2
    count: 2
  - {name: zip, command: "gzip -k 'a b.txt'"}
  - {name: list, command: [sleep, "1"]}
""",
        )
    )
    assert [job.name for job in jobs] == ["digits-0", "digits-1", "zip", "list"]
    assert jobs[0].memory == int(1.5 * 2**30)
    assert jobs[0].args == {"batch_size": 32, "day": "2026-01-02", "rate": 0.0001}
    assert jobs[2].command == ("gzip", "-k", "a b.txt")
    assert jobs[2].what == "gzip -k 'a b.txt'"
    assert jobs[3].command == ("sleep", "1")


def test_deadlines_are_from_now_or_points_in_time(tmp_path):
    now_s = time.time()
    jobs = "{name: a, task: m:C, deadline: 1.5h}, {name: b, task: m:C, deadline: 2030-01-31T18:00:00, user: ada}"
    relative, absolute = load_jobs(write(tmp_path, f"jobs: [{jobs}]"))
    assert relative.deadline == pytest.approx(now_s + 5400, abs=60)
    assert absolute.deadline == datetime(2030, 1, 31, 18).timestamp()
    assert (relative.user, absolute.user) == ("", "ada")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("jobs:\n  - {name: a, task: m:C, speed: 9}", "job 'a': unknown field speed; expected one of name, task"),
        ("jobs:\n  - {name: a, task: m:C}\nqueue: 1", "unknown field queue; expected one of jobs"),
        ("jobs:\n  - {name: a, task: m:C}\nversion: 2", "version is 2: expected 1"),
        ("jobs:\n  - {name: a}", "job 'a': expected exactly one of task and command"),
        ("jobs:\n  - {name: a, task: m:C, command: ls}", "job 'a': expected exactly one of task and command"),
        ("jobs:\n  - {name: a, command: ls, args: {x: 1}}", "job 'a': args belong to a task"),
        ("jobs:\n  - {task: m:C}", "line 2: job 1: name is missing"),
        ("jobs:\n  - {name: ../up, task: m:C}", "job '../up': name is '../up': expected 1 to 80 letters, digits"),
        ("jobs:\n  - {name: a, task: noclass}", "job 'a': task is 'noclass': expected module:Class"),
        (
            "jobs:\n  - {name: a, task: m:C, count: 0}",
            "job 'a': count is 0: expected greater than or equal to 1",
        ),
        ("jobs:\n  - {name: a, task: m:C, count: many}", "job 'a': count is 'many': expected a valid integer"),
        ("jobs:\n  - {name: a, task: m:C, memory: lots}", "job 'a': memory is 'lots': expected a size above 0"),
        ("jobs:\n  - {name: a, task: m:C, memory: -1}", "job 'a': memory is -1: expected a size above 0"),
        ("jobs:\n  - {name: a, task: m:C, deadline: soon}", "job 'a': deadline is 'soon': expected such as 90s, 30m"),
        ("jobs:\n  - {name: a, task: m:C, args: [1]}", "job 'a': args is [1]: expected a mapping"),
        ("jobs:\n  - {name: a, command: []}", "job 'a': command is []: expected a program"),
        ("jobs:\n  - {name: a, task: m:C}\n  - {name: a, task: m:C}", "line 1: jobs: jobs 1 and 2 are both named 'a'"),
        ("jobs:\n  - just text", "job 1"),
        ("jobs: []", "jobs is []"),
        ("- a", "expected a mapping with a list under 'jobs'"),
        ("", "expected a mapping with a list under 'jobs'"),
        ("jobs: [", "is not YAML"),
    ],
)
def test_errors_say_where_and_what(tmp_path, text, expected):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_jobs(path)
    assert expected in str(error.value)
    assert str(error.value).startswith(str(path))


def test_every_problem_is_reported_at_once(tmp_path):
    with pytest.raises(ConfigError) as error:
        load_jobs(write(tmp_path, "jobs:\n  - {name: a, task: x}\n  - {name: b, task: m:C, count: 0}"))
    assert len(str(error.value).splitlines()) == 2


def test_a_missing_file_and_a_binary_one(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file"):
        load_jobs(tmp_path / "nowhere.yaml")
    path = tmp_path / "jobs.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_jobs(path)


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("2GiB", 2**31), ("512 mb", 512 * 10**6), (4096, 4096)])
def test_sizes(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "2 parsecs", "-3MB", True, "0"])
def test_wrong_sizes(text):
    with pytest.raises(ValueError, match="expected a size above 0"):
        parse_bytes(text)


def test_instances_know_which_they_are(tmp_path):
    path = write(tmp_path, "jobs: [{name: a, task: m:C, count: 2}, {name: b, command: ls}]")
    settings = FillSettings.from_args(flags(jobs=str(path)))
    assert [(job.name, job.to_submit([], "").work.array, job.count) for job in settings.jobs] == [
        ("a-0", (0, 2), 1),
        ("a-1", (1, 2), 1),
        ("b", None, 1),
    ]


def test_a_job_is_after_all_instances(tmp_path):
    text = """
jobs:
  - {name: best, command: ls, after: [seed, fetch-1, fetch-1, elsewhere], timeout: 2h, retries: 3}
  - {name: seed, task: m:C, count: 3, after: fetch}
  - {name: fetch, command: ls, count: 2}
"""
    best, *seeds = load_jobs(write(tmp_path, text))[:4]
    assert best.after == ("seed-0", "seed-1", "seed-2", "fetch-1", "elsewhere")
    assert (best.timeout, best.retries) == (7200, 3)
    assert [seed.after for seed in seeds] == [("fetch-0", "fetch-1")] * 3


def test_jobs_that_wait_for_each_other_are_refused(tmp_path):
    ring = "jobs: [{name: a, command: ls, after: b}, {name: b, command: ls, after: c-1}, "
    with pytest.raises(ConfigError, match=r"none of these could ever begin: . after . after . after ."):
        load_jobs(write(tmp_path, ring + "{name: c, command: ls, count: 2, after: [a]}]"))
    many = "jobs: [{name: a, command: ls, count: 2000}, {name: b, command: ls, count: 2000, after: a}]"
    with pytest.raises(ConfigError, match="its jobs wait for others 4000000 times; expected at most 1000000 times"):
        load_jobs(write(tmp_path, many))


def test_of_a_file_full_of_mistakes_the_first_are_told(tmp_path):
    with pytest.raises(ConfigError) as error:
        load_jobs(write(tmp_path, "jobs:\n" + "  - {name: a, task: x}\n" * 100))
    lines = str(error.value).splitlines()
    assert len(lines) == 20
    assert lines[-1].endswith("line 21: job 'a': task is 'x': expected module:Class (and 80 more such problems)")


def test_settings_from_flags():
    assert not FillSettings.from_args(flags()).active
    assert FillSettings.from_args(flags(profile_only=True)).active


def test_settings_from_files_and_from_the_command_line_of_which_later_ones_win(tmp_path):
    site = tmp_path / "site.yaml"
    site.write_text("# our cluster\nuser: nobody\nallow: [ours.*, command]\nprice: {main: 30, side: 0.5}\n")
    nothing = tmp_path / "nothing.yaml"
    nothing.write_text("# nothing yet\n")
    args = flags()
    args.fill_settings = [str(site), str(nothing), "{user: ada, grace_ms: 5}"]
    found = FillSettings.from_args(args)
    assert (found.user, found.allow, found.price) == ("ada", ("ours.*", "command"), Prices(30, 0.5))
    assert (found.grace_ms, found.network) == (5.0, False)
    site.write_text("user: nobody\nmax_files: 3\n")
    with pytest.raises(ConfigError, match=r"site.yaml, line 2: max_files is 3: expected greater than or equal to 64"):
        FillSettings.from_args(args)
    site.write_text("user: nobody\npaired_blocks: 3\n")
    with pytest.raises(ConfigError, match=r"site.yaml, line 2: paired_blocks is a flag; expected --fill-paired-blocks"):
        FillSettings.from_args(args)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"paired_blocks": -1}, "--fill-paired-blocks is -1"),
        ({"warmup_iterations": 0}, "--fill-settings: warmup_iterations is 0"),
        ({"grace_ms": 0.0}, "--fill-settings: grace_ms is 0.0"),
        ({"profile_only": True, "jobs": "x.yaml"}, "expected no --fill-jobs with it"),
    ],
)
def test_wrong_flags(changed, expected):
    with pytest.raises(ConfigError, match=expected):
        FillSettings.from_args(flags(**changed))


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{BOMB}jobs: *a9", "has more than 1000000 values, its aliases followed"),
        ("jobs: " + "[" * 100_000, "line 1: is nested deeper than 32 levels"),
        ("jobs: " + "[" * 100 + "]" * 100, "is nested deeper than 32 levels"),
        ("jobs: [{name: x, task: 'a:b', args: {n: " + "9" * 100_000 + "}}]", "line 1: a number of 100000 digits"),
        ("jobs: [{name: x, task: 'a:b', deadline: 2026-13-45}]", "deadline is '2026-13-45': expected such as 90s"),
        ("jobs: &me [*me]", r"\*me refers to nothing above it, or to itself"),
    ],
)
def test_a_file_made_to_break_its_reader_is_refused(tmp_path, text, message):
    path = tmp_path / "jobs.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_jobs(path)
