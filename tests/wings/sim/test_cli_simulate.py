"""``pipefill simulate``: tables, files, and what it says of wrong configurations."""

from __future__ import annotations

import copy
import csv
import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from megatron.fill.errors import ConfigError
from megatron.fill.pipeline.schedules import make_schedule
from megatron.fill.pipeline.torch_csv import dump_csv
from megatron.fill.wings.sim import commands as command

ROOT = Path(__file__).resolve().parents[3]
CONFIG: dict[str, Any] = {
    "duration": "2h",
    "price_per_gpu_hour": 2.0,
    "main_jobs": [
        {
            "name": "llm",
            "model": {"layers": 8, "hidden": 4096, "heads": 32, "sequence": 2048, "vocabulary": 0},
            "gpu": "a100-80gb",
            "network": "dgx-a100",
            "parallel": {"pp": 2, "dp": 2, "microbatch": 4, "global_batch": 32, "recompute": "full"},
            "stragglers": {},
        }
    ],
    "fill": {
        "kinds": ["bert-base-inference", "bert-base-training"],
        "generate": {"jobs": 12, "median_s": 300, "deadline_share": 0.5},
    },
}


def broken(score: float = 0.0) -> Any:
    def policy(job: object, state: object, device: object) -> float:
        if score != score:
            return score
        raise RuntimeError("no idea")

    return policy


raises, nan = broken(), broken(float("nan"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def changed(path: str, value: object) -> dict[str, Any]:
    """The configuration with one field changed, or left out if the value is ``...``."""
    data = copy.deepcopy(CONFIG)
    *places, last = path.split("/")
    place: Any = data
    for name in places:
        place = place[int(name)] if isinstance(place, list) else place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return data


def run(data: dict[str, Any] | None, *arguments: str) -> str:
    given = list(arguments)
    if data is not None:
        Path("c.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
        given = ["c.yaml", *given]
    app = typer.Typer()
    app.command("simulate")(command.simulate)
    done = CliRunner().invoke(app, given)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def problem(data: dict[str, Any] | None, *arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        run(data, *arguments)
    return str(caught.value)


def test_one_simulation_in_full():
    output = run(CONFIG)
    assert max(map(len, output.splitlines())) <= 80
    assert "2 h of 4 devices, 12 fill jobs, policy priority" in output
    for text in ("llm/stage 0", "llm/stage 1", "bert-base-training", "Deadlines met", "a day"):
        assert text in output


def bubbles(*arguments: str) -> float:
    (found,) = json.loads(run(CONFIG, "--json", *arguments))
    return found["total"]["bubble"]


def test_a_schedule_from_a_file_is_simulated_as_the_same_by_name(folder):
    for name in ("gpipe", "zb-h1"):
        dump_csv(folder / "own.csv", make_schedule(name, 2, 4))
        (folder / name).mkdir()
        (folder / "own.csv").rename(folder / name / "own.csv")
        assert bubbles("--schedule", f"{name}/own.csv") == bubbles("--sweep", f"schedule={name}")
    assert bubbles("--schedule", "zb-h1/own.csv") < bubbles()


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_stages_in_a_v_are_simulated(folder, name):
    deeper = changed("main_jobs/0/parallel/chunks", 2)
    dump_csv(folder / "v.csv", make_schedule(name, 2, 4, 2))
    v, by_name, interleaved = (
        json.loads(run(deeper, "--json", *given))[0]["total"]
        for given in (("--schedule", "v.csv"), ("--sweep", f"schedule={name}"), ("--sweep", "schedule=interleaved"))
    )
    assert v == by_name
    assert v["bubble"] < interleaved["bubble"]


def test_a_wrong_file_of_a_schedule_is_one_line(folder):
    dump_csv(folder / "deep.csv", make_schedule("1f1b", 4, 4))
    dump_csv(folder / "v.csv", make_schedule("zb-v", 2, 4, 2))
    assert problem(CONFIG, "--schedule", "deep.csv").endswith("it has 4 ranks: expected 2, as the training has")
    assert problem(CONFIG, "--schedule", "v.csv").endswith("it has 2 stages per rank: expected 1, as the training has")
    assert "none.csv" in problem(CONFIG, "--schedule", "none.csv")


def test_json_csv_and_picture_agree():
    data = json.loads(run(CONFIG, "--json", "--csv", "out/a.csv", "--png", "out/a.png"))
    (one,) = data
    (row,) = csv.DictReader(Path("out/a.csv").read_text().splitlines())
    assert float(row["gpus_worth"]) == one["total"]["gpus_worth"] > 0
    assert float(row["saved_per_day"]) == pytest.approx(48 * one["total"]["gpus_worth"])
    assert sum(one["jobs"].values()) == 12
    assert Path("out/a.png").read_bytes().startswith(b"\x89PNG")


def test_sweeps_and_policies_make_a_table():
    output = run(CONFIG, "--sweep", "dp=1,2", "--policy", "sjf", "--policy", "fifo", "--processes", "1")
    assert max(map(len, output.splitlines())) <= 80
    rows = [line.split()[:2] for line in output.splitlines()[2:]]
    assert rows == [["1", "sjf"], ["1", "fifo"], ["2", "sjf"], ["2", "fifo"]]


def test_a_larger_share_of_bubbles_gives_more_to_fill():
    few, many = (
        json.loads(run(CONFIG | {"fill": {"kinds": ["bert-base-inference"], "saturate": True}}, "--json", *extra))[0]
        for extra in ((), ("--sweep", "global_batch=8"))
    )
    assert many["total"]["bubble"] > few["total"]["bubble"]
    assert many["total"]["gpus_worth"] > few["total"]["gpus_worth"]


def test_a_straggler_makes_more_bubbles_elsewhere():
    even, slow = (
        json.loads(run(CONFIG, "--json", *extra))[0] for extra in ((), ("--sweep", "main_jobs.0.stragglers.1=1.5"))
    )
    assert slow["groups"][0]["bubble"] > even["groups"][0]["bubble"] + 0.1
    assert slow["groups"][1]["bubble"] < slow["groups"][0]["bubble"]


def run_of_two_ranks(**more: object) -> None:
    """Write the report of a run whose mean bubble is longer than its median one."""
    bubble = {
        **{"index": 0, "kind": "drain", "mean_ms": 100.0, "median_ms": 60.0, "p10_ms": 90.0, "p90_ms": 110.0},
        **{"offset_ms": 0.0, "share": 0.25, "free_bytes": 10**9, "count": 9},
    }
    rank = {"stage": 0, "iteration_ms": 400.0, "training": [bubble], "evaluation": []}
    job = {
        **{"name": "embed", "state": "QUEUED", "reason": "", "work_done": 1000.0, "unit": "texts", "what": "m:C"},
        **{"rank": 0, "steps": 500, "harvested_s": 5.0, "rate": 200.0, "total_work": None, "result": {}},
        **{"directory": "d", "side_throughput": None, "attempts": []},
    }
    report = {"cycle": [rank | {"rank": number} for number in range(2)], "jobs": [job]}
    Path("report.json").write_text(json.dumps(report | more))


def test_a_real_runs_report_scaled_up():
    run_of_two_ranks()
    (one,) = json.loads(run(None, "--from", "report.json", "--gpus", "1000", "--json"))
    assert one["total"]["devices"] == 1000
    assert one["total"]["bubble"] == pytest.approx(0.25)
    # Nine steps of 10 ms in 99.7 ms, 2 texts each, at 200 texts a second: 0.09 s of 0.4.
    assert one["total"]["gpus_worth"] == pytest.approx(1000 * 0.09 / 0.4, rel=1e-3)
    assert "expected a multiple" in problem(None, "--from", "report.json", "--gpus", "3")


def test_a_real_run_is_harvested_as_it_was():
    """The time without a job is left out: in the simulation there always is one."""
    run_of_two_ranks(total={"bubble_share": 0.4, "time_use_ns": {"steps": 9, "runtime": 81, "no_job": 900}})
    (one,) = json.loads(run(None, "--from", "report.json", "--json"))
    assert one["total"]["fill"] / one["total"]["bubble"] == pytest.approx(0.1, rel=1e-3)
    said = " ".join(run(None, "--from", "report.json").split())
    assert " ".join(run(None, "--from", ".").split()) == said  # the run folder
    assert "harvested as in the run: 10.0%, where the planner's estimate is 90.0%" in said
    assert "Bubbles are 40.0% of all of the run's iterations; of the usual ones, which are repeated here, 25.0%" in said


def test_a_run_without_jobs_is_no_run_to_scale_up():
    run_of_two_ranks()
    ranks = json.loads(Path("report.json").read_text())["cycle"]
    Path("report.json").rename("b.json")
    Path("b.json").write_text(json.dumps({"ranks": ranks}))
    assert problem(None, "--from", ".").endswith(
        "report.json: cannot be read: it is not there; expected the folder of a run with jobs, or its report.json; "
        "other runs' bubbles.json is for CONFIG.yaml"
    )
    assert problem(None, "--from", "b.json").endswith("jobs is missing; expected a report.json of a run with jobs")


def test_a_report_without_harvest_says_what_is_assumed():
    run_of_two_ranks()
    assert "assumed: all work of a plan is done" in run(None, "--from", "report.json")


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("main_jobs/0/parallel/pp", 3, ["c.yaml, line 4", "main_jobs.0", "divisor of the model's 8 layers"]),
        ("main_jobs/0/parallel/pp", 16, ["main_jobs.0", "8 layers"]),
        ("main_jobs/0/parallel/global_batch", 30, ["main_jobs.0.parallel", "global_batch is 30"]),
        ("main_jobs/0/parallel/global_batch", 800_000, ["main_jobs.0", "400,000 passes", "at most 200,000"]),
        ("main_jobs/0/gpu", "v100-16gb", ["main_jobs.0", "stage 0 needs", "16.00 GiB of v100-16gb"]),
        ("main_jobs/0/gpu", "v101", ["c.yaml, line 11", "main_jobs.0.gpu is 'v101'", "v100-16gb"]),
        ("main_jobs/0/parallel/stages", 2, ["c.yaml, line 19", "unknown field main_jobs.0.parallel.stages"]),
        ("main_jobs/0/model/layers", ..., ["main_jobs.0.model.layers is missing"]),
        ("main_jobs/0/model/hidden", -4, ["main_jobs.0.model", "hidden is -4"]),
        ("main_jobs/0/network", ..., ["main_jobs.0", "network is missing"]),
        ("main_jobs/0/stragglers", {2: 1.5}, ["main_jobs.0", "stragglers has 2: 1.5", "below 2"]),
        ("main_jobs/0/end", "0s", ["main_jobs.0", "end is 0 s"]),
        ("main_jobs", [], ["main_jobs is []: expected at least one"]),
        ("duration", "2 weeks", ["c.yaml, line 1", "duration is '2 weeks'", "2h"]),
        ("duration", 0, ["duration is 0"]),
        ("fill/generate", ..., ["fill", "exactly one of trace, jobs, store, generate, saturate"]),
        ("fill/saturate", True, ["fill", "generate and saturate"]),
        ("fill/generate/jobs", -3, ["fill.generate", "-3"]),
        ("fill/kinds", ["bert"], ["'bert'", "bert-base-inference"]),
        ("fill/profiles", "missing.json", ["missing.json", "cannot be read"]),
        ("runtime", {"harvest": 1.5}, ["runtime.harvest is 1.5"]),
        ("failures", {"mtbf": "-3d"}, ["failures.mtbf is '-3d'"]),
        ("policies", ["best"], ["best", "fifo"]),
        ("policies", ["tests.wings.sim.test_cli_simulate:raises"], ["raises", "no idea"]),
        ("policies", ["tests.wings.sim.test_cli_simulate:nan"], ["nan", "expected a number"]),
    ],
)
def test_a_wrong_configuration_says_where_and_what_was_expected(path, value, expected):
    message = problem(changed(path, value), "--csv", "a.csv", "--png", "a.png")
    for text in expected:
        assert text in message
    assert sorted(entry.name for entry in Path.cwd().iterdir()) == ["c.yaml"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], ["t.csv"]),
        (["arrival,kind,size"], ["t.csv", "no jobs"]),
        (["arrival,size", "0,5"], ["t.csv", "kind"]),
        (["arrival,kind,size", "0,bert-base-inference,-5"], ["t.csv", "line 2", "size", "-5"]),
        (["arrival,kind,size", "0,bert-base-inference,5", ",bert-base-inference,5"], ["line 3", "arrival"]),
        (["arrival,kind,size", "0,gpt,5"], ["line 2", "gpt", "bert-base-inference"]),
    ],
)
def test_a_wrong_trace_says_the_line(lines, expected):
    Path("t.csv").write_text("".join(f"{line}\n" for line in lines))
    message = problem(CONFIG | {"fill": {"trace": "t.csv"}}, "--csv", "a.csv")
    for text in expected:
        assert text in message
    assert not Path("a.csv").exists()


def test_an_impossible_value_of_a_sweep_is_named_and_nothing_runs():
    message = problem(CONFIG, "--sweep", "pp=2,3", "--csv", "a.csv")
    assert "(with pp=3)" in message
    assert not Path("a.csv").exists()


def test_what_is_no_configuration():
    Path("c.yaml").write_text("[1, 2]")
    assert "found [1, 2]" in problem(None, "c.yaml")
    Path("c.yaml").write_text("a: [")
    assert "is not YAML" in problem(None, "c.yaml")
    assert "cannot be read" in problem(None, "missing.yaml")
    assert "expected a CONFIG file" in problem(None)
    assert "expected a CONFIG file" in problem(CONFIG, "--gpus", "8")


def test_a_picture_that_cannot_be_written(folder):
    (folder / "file").write_text("")
    assert "cannot be written" in problem(CONFIG, "--png", "file/a.png")


def test_the_example_is_valid():
    from megatron.fill.wings.sim.run import load, plan_runs

    source, data = load(ROOT / "examples" / "simulate.yaml")
    assert len(plan_runs(source, data, [], (), None)) == 2
