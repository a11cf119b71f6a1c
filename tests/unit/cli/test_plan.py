"""``pipefill plan``: a table, JSON and a picture of how jobs fit measured bubbles."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from megatron.fill.cli import plan as command
from megatron.fill.errors import ConfigError
from megatron.fill.pipeline.costs import PipelineCosts
from megatron.fill.pipeline.schedules import make_schedule
from megatron.fill.pipeline.timeline import simulate
from megatron.fill.pipeline.torch_csv import dump_csv, load_csv
from megatron.fill.planner.held import MARGIN_BYTES
from megatron.fill.planner.plan import ExecutionPlan
from megatron.fill.profiles import Configuration, JobProfile, NodeProfile, Offload

MS = 1_000_000
PROFILES = {
    "train": [
        JobProfile(Configuration(2), (NodeProfile("forward", 30 * MS, 50), NodeProfile("backward", 60 * MS, 50)), 2),
        JobProfile(
            Configuration(4, True, Offload.OPTIMIZER),
            (NodeProfile("forward", 40 * MS, 50), NodeProfile("backward", 80 * MS, 50)),
            4,
        ),
    ],
    "embed": [JobProfile(Configuration(1), (NodeProfile("forward", 1 * MS, 40),), 1)],
    "huge": [JobProfile(Configuration(1), (NodeProfile("forward", 500 * MS, 10),), 1)],
}


_LARGE = JobProfile(Configuration(8), (NodeProfile("forward", 40 * MS, 40),), 80)
_EMBED = PROFILES["embed"][0].to_dict()


def app() -> typer.Typer:
    application = typer.Typer()
    application.command("plan")(command.plan)
    return application


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A jobs file with three instances of ``train``, two ranks' bubbles, and profiles."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PIPEFILL_STORE", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    jobs = [{"name": name, "command": name, "count": 3 if name == "train" else 1} for name in (*PROFILES, "new")]
    (tmp_path / "jobs.yaml").write_text(json.dumps({"jobs": jobs}))
    ranks = [
        {
            "rank": rank,
            "iteration_ms": 400.0,
            "training": [{"kind": "drain", "p10_ms": length, "free_bytes": 100 + MARGIN_BYTES} for length in lengths],
        }
        for rank, lengths in ((0, [50.5, 90.5]), (2, [88.5]))
    ]
    (tmp_path / "bubbles.json").write_text(json.dumps({"ranks": ranks}))
    profiles = {name: [profile.to_dict() for profile in its] for name, its in PROFILES.items()}
    (tmp_path / "profiles.json").write_text(json.dumps(profiles))
    return tmp_path


def run(*arguments: str, code: int = 0) -> str:
    measured = [] if "--schedule" in arguments else ["--bubbles", "bubbles.json"]
    given = ["jobs.yaml", *measured, *arguments]
    result = CliRunner().invoke(app(), given, standalone_mode=False)
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exception is None
    assert result.return_value in (None, code)
    assert (result.return_value or 0) == code
    return result.stdout


def test_the_table_fits_80_columns(files):
    output = run("--profiles", "profiles.json")
    table = output[: output.index("rank 0: huge")].splitlines()
    assert all(len(line) <= 80 for line in table)
    first = next(line for line in table if "train-0" in line)
    # 40 ms fit the 50.5 ms, 80 ms the 90.5: an iteration of 4 in each cycle of 400 ms
    assert first.split() == ["0", "train-0", "b4", "1", "a", "cycle", "4", "85.1%", "97.9%", "10"]
    second = next(line for line in table if "train-0" in line and line.split()[0] == "2")
    assert second.split() == ["2", "train-0", "b4", "1", "in", "2", "2", "67.8%", "98.3%", "5"]
    assert "train-1" not in output
    assert "rank 2: huge: node 'forward' of b1 (500.000 ms, 10 bytes) is 411.800 ms too long for bubble 0" in output
    assert "Without a profile: new; first run: pipefill profile jobs.yaml --output profiles.json" in output


def test_the_second_instance_is_named_as_the_tail_job(files):
    (files / "jobs.yaml").write_text("jobs: [{name: embed, command: embed}, {name: train, command: train, count: 3}]")
    (files / "profiles.json").write_text(json.dumps({"train": [_LARGE.to_dict(), _EMBED]}))
    rows = json.loads(run("--profiles", "profiles.json", "--json"))["plans"]
    assert [(row["job"], row["tail"]) for row in rows] == [("train-0", "train-1")] * 2


def test_json_holds_the_plans(files):
    data = json.loads(run("--profiles", "profiles.json", "--rank", "2", "--json"))
    assert data["without_profile"] == ["new"]
    train, embed, huge = data["plans"]
    assert (train["job"], train["rank"], train["tail"]) == ("train-0", 2, "embed")
    assert train["work_per_s"] == pytest.approx(train["work_per_cycle"] / 0.4) == pytest.approx(5)
    plan = ExecutionPlan.from_dict(train["plan"])
    assert plan.configuration == Configuration(4, True, Offload.OPTIMIZER)
    assert plan.counts == ((1,), (1,))
    assert ExecutionPlan.from_dict(train["tail_plan"]).counts == ((47, 7),)
    assert train["packed_with_tail"] == pytest.approx((120 + 54) / 177)
    assert embed["tail"] is None
    assert "too long" in huge["error"]


def test_a_schedules_bubbles_take_the_place_of_measured_ones(files):
    dump_csv(files / "own.csv", make_schedule("zb-v", 2, 4, 2))
    given = [
        "--profiles",
        "profiles.json",
        "--schedule",
        "own.csv",
        "--times",
        "30,30,30",
        "--transfer",
        "10",
        "--json",
    ]
    plans = json.loads(run(*given))["plans"]
    its = load_csv(files / "own.csv")
    timeline = simulate(its, PipelineCosts.uniform(2, 15 * MS, 30 * MS, 15 * MS, 2, 10 * MS))
    expected = {rank: sum(wait.duration_ns for wait in row) for rank, row in enumerate(timeline.waits)}
    for row in plans:
        if row["job"] == "embed":  # steps of 1 ms fill nearly all of it
            assert row["work_per_cycle"] == pytest.approx(expected[row["rank"]] / MS, rel=0.15)
    assert {row["rank"] for row in plans} == {0, 1}


def test_a_picture_is_drawn(files):
    run("--profiles", "profiles.json", "--png", "plan.png")
    assert (files / "plan.png").read_bytes().startswith(b"\x89PNG")
    run("--profiles", "profiles.json", "--png", "made/plan.png")
    assert (files / "made" / "plan.png").exists()
    with pytest.raises(ConfigError, match=r"jobs.yaml/plan.png: cannot be written: File exists"):
        run("--profiles", "profiles.json", "--png", "jobs.yaml/plan.png")
    (files / "link").symlink_to("/dev/null")
    with pytest.raises(ConfigError, match="link: is a device, a pipe or a link of /dev; expected a file"):
        run("--profiles", "profiles.json", "--png", "link")
    with pytest.raises(ConfigError, match=r"--png is plan\.pdf: expected a name that ends in \.png"):
        run("--profiles", "profiles.json", "--png", "plan.pdf")


def test_profiles_come_from_the_store_where_no_file_is_given(files, monkeypatch):
    asked = []

    def stored(specs, store):
        asked.append(([spec.name for spec in specs], store))
        return {"embed": PROFILES["embed"]}

    monkeypatch.setattr(command, "stored_profiles", stored)
    output = run("--store", "jobs.db")
    assert asked == [(["train-0", "embed", "huge", "new"], "jobs.db")]
    assert "Without a profile: train-0, huge, new" in output
    with pytest.raises(ConfigError, match="no profiles given"):
        run()


def test_it_fails_if_no_job_fits_any_rank(files):
    (files / "profiles.json").write_text(json.dumps({"huge": [PROFILES["huge"][0].to_dict()]}))
    output = run("--profiles", "profiles.json", "--png", "plan.png", code=1)
    assert "rank 0: huge: node 'forward'" in output
    assert not (files / "plan.png").exists()


@pytest.mark.parametrize(
    ("file", "text", "arguments", "message"),
    [
        ("bubbles.json", '{"ranks": []}', [], "ranks is empty"),
        ("bubbles.json", "[]", [], r"bubbles.json: found \[\]: expected a mapping"),
        ("jobs.yaml", "jobs: []", [], "jobs.yaml: jobs is"),
        ("profiles.json", "[]", [], "profiles.json: found a list; expected a list of profiles per job name"),
        ("profiles.json", "{", [], "profiles.json: is not JSON"),
        ("profiles.json", '{"train": [{}]}', [], "job 'train': not the profile of a job: KeyError"),
        ("profiles.json", '{"train": 3}', [], "job 'train': found 3, which is no list of profiles; expected a list"),
        ("profiles.json", json.dumps({"train": [_EMBED] * 2}), [], "two of its profiles are of b1; .* one of each"),
        ("unused", "", ["--rank", "1"], "--rank is 1: expected one of 0, 2"),
        ("unused", "", ["--transfer", "1"], "--transfer is 1.0: expected none with --bubbles"),
        ("unused", "", ["--schedule", "own.csv", "--bubbles", "bubbles.json"], "expected the bubbles of a training"),
        ("own.csv", "0F0,0B0", ["--schedule", "own.csv"], "--schedule own.csv without --times: expected both"),
    ],
)
def test_bad_input_is_named_in_one_line(files, file, text, arguments, message):
    (files / file).write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        run("--profiles", "profiles.json", *arguments)
    assert "\n" not in str(caught.value)
