"""Models and plans in files, models that are traced, pictures, and the commands ``pipefill graph``."""

from __future__ import annotations

import ast
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fill import cli
from megatron.fill.errors import ConfigError, GraphError
from megatron.fill.wings.graph.cost import Cluster
from megatron.fill.wings.graph.draw import _places, draw_plan
from megatron.fill.wings.graph.export import coarsen, export_model
from megatron.fill.wings.graph.files import load_model, load_plan, plan_text
from megatron.fill.wings.graph.model import ModelGraph, Operator
from megatron.fill.wings.graph.search import micro_batches, plan_graph
from megatron.fill.wings.graph.tree import decompose
from megatron.fill.wings.graph.zoo import mmt
from megatron.fill.wings.mainjob.hardware import GPUS, NETWORKS

ROOT = Path(__file__).resolve().parents[3]
TOWERS = """
name: towers
operators:
  - {name: vision, forward_flops: 2e9, parameters: 1000000, output_bytes: 1MiB, kept_bytes: 3 MB}
  - {name: audio, forward_s: 1e-3, output_bytes: 4096}
  - {name: join, inputs: [vision, audio], forward_flops: 1e9}
"""
MODULE = """
import torch

class Towers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(3)])
        self.right = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(2)])
        self.head = torch.nn.Linear(48, 4)

    def forward(self, x, y):
        return self.head(torch.cat([self.left(x), self.right(y)], 1)).sum()

def towers():
    return Towers(), (torch.zeros(2, 32), torch.zeros(2, 16))

def nothing():
    return None

def uneven():
    return Towers(), (torch.zeros(2, 32), torch.zeros(3, 16))

def data():
    class Odd(torch.nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x
    return Odd(), (torch.zeros(2, 2),)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "towers.yaml").write_text(TOWERS)
    return tmp_path


def pipefill(capsys, monkeypatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["pipefill", "graph", *arguments])
    try:
        cli.main()
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def test_a_model_of_a_yaml_file():
    graph = load_model(Path("towers.yaml"))
    vision, audio, join = graph.operators
    assert (vision.output_bytes, vision.kept, vision.parameters) == (2**20, 3e6, 1_000_000)
    assert (audio.forward_s, audio.kept, audio.backward_s) == (1e-3, 4096, None)
    assert join.inputs == ("vision", "audio")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("name: towers", "title: towers", "towers.yaml: name is missing"),
        (
            "parameters: 1000000",
            "parameters: -1",
            "line 4: operators.0.parameters is -1: expected greater than or equal",
        ),
        ("kept_bytes: 3 MB", "kept_bytes: 3 apples", "line 4: operators.0.kept_bytes is '3 apples': expected a size"),
        ("forward_s: 1e-3", "forward_s: true", "line 5: operators.1.forward_s is True: expected a number"),
        ("forward_s: 1e-3", "forwards: 1", "line 5: unknown field operators.1.forwards; expected one of name, inputs"),
        (
            "[vision, audio]",
            "[vision, video]",
            "towers.yaml: towers: operator join takes video, which is not an operator",
        ),
        ("{name: audio,", "{name: audio, inputs: [join],", "towers.yaml: towers: has the cycle"),
        (
            "forward_s: 1e-3",
            "forward_s: 1e300",
            "operator audio: forward_s is 1e+300; expected a number from 0 to 1e+24",
        ),
        ("name: vision", "name: a b", "towers.yaml: operator 'a b': expected a name without spaces and colons"),
    ],
)
def test_a_wrong_model_is_refused_with_its_place(old, new, reason):
    Path("towers.yaml").write_text(TOWERS.replace(old, new))
    with pytest.raises((ConfigError, GraphError)) as error:
        load_model(Path("towers.yaml"))
    assert reason in str(error.value)


def plan_of(devices: int = 4, network: str = "p3.16xlarge"):
    cluster = Cluster(devices=devices, gpu=GPUS["v100-16gb"], network=NETWORKS.get(network))
    return plan_graph(mmt(2, 3), cluster, 16, micro_batches(16))


def test_a_plan_is_read_back_from_json(tmp_path):
    for network in ("p3.16xlarge", "none"):
        plan = plan_of(network=network).plan
        (tmp_path / "plan.json").write_text(plan_text(plan))
        assert load_plan(tmp_path / "plan.json") == plan


def test_a_wrong_plan_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    data = json.loads(plan_text(plan_of().plan))
    path.write_text(json.dumps(data | {"batch": 0}))
    with pytest.raises(ConfigError, match=r"plan.json: batch is 0: expected greater than or equal to 1"):
        load_plan(path)
    first, *rest = data["stages"]
    path.write_text(json.dumps(data | {"stages": [first | {"operators": first["operators"][:1]}, *rest]}))
    with pytest.raises(GraphError, match=r"plan.json: C1: .* in no stage; the plan is\n"):
        load_plan(path)


def test_a_module_is_traced(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    (tmp_path / "traced_towers.py").write_text(MODULE)
    graph = export_model("traced_towers:towers")
    assert sum(its.parameters for its in graph.operators) == 3 * 33 * 32 + 2 * 17 * 16 + 49 * 4
    flops = 2.0 * (3 * 32 * 32 + 2 * 16 * 16 + 48 * 4)
    assert sum(its.forward_flops for its in graph.operators) == flops
    (block, *_), lined = decompose(graph)
    assert not isinstance(block, int)
    assert len(block) == 2
    assert not lined
    assert any(its.name.startswith("left.2/") for its in graph.operators)
    for function, reason in (
        ("nothing", "returned something of type NoneType; expected a function"),
        ("uneven", r"the inputs have first dimensions [2, 3]; expected the same"),
        ("data", "torch.export failed"),
        ("missing", "has no attribute 'missing'; expected a function"),
    ):
        with pytest.raises(GraphError, match=re.escape(reason)):
            export_model(f"traced_towers:{function}")


def test_small_neighbours_are_put_together():
    names = [f"op{at}" for at in range(6)]
    graph = ModelGraph(
        "m",
        tuple(
            Operator(
                name=name, inputs=tuple(names[:at][-1:]), forward_flops=100.0 if at in (2, 4) else 1.0, output_bytes=1.0
            )
            for at, name in enumerate(names)
        ),
    )
    coarse = coarsen(graph, 1 / 16)
    assert [its.name for its in coarse.operators] == ["op0", "op2", "op3", "op4", "op5"]
    assert coarse.operators[0].moved_bytes == 2.0  # what op0 writes and op1 reads
    assert sum(its.forward_flops for its in coarse.operators) == 204
    assert sum(its.kept for its in coarse.operators) == 6


def test_stages_are_drawn_side_by_side(tmp_path):
    found = plan_of()
    places = _places(found.plan)
    assert len(set(places)) == len(places)
    for source, target in found.plan.edges:
        assert places[source][0] < places[target][0]
    draw_plan(tmp_path / "plan.png", found.timeline)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_plan_and_show(capsys, monkeypatch, tmp_path):
    arguments = ("plan", "mmt", "--devices", "4", "--batch", "16", "--network", "p3.16xlarge")
    status, out, err = pipefill(capsys, monkeypatch, *arguments, "--json", "p.json", "--png", "p.png", "--compare")
    assert (status, err) == (0, "")
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "OPERATORS" in out
    assert re.search(r"^sequential +\S+ m?s", out, re.MULTILINE)
    assert re.search(r"^atomic +\S+ m?s", out, re.MULTILINE)
    assert Path("p.png").exists()
    table = out.partition("\n\nPLANNER")[0]
    assert pipefill(capsys, monkeypatch, "show", "p.json")[1].strip() == table.strip()
    status, text, _ = pipefill(capsys, monkeypatch, "show", "p.json", "--text")
    assert text.startswith("graph plan of mmt: 16 samples, ")
    Path("p.txt").write_text(text)
    by_hand = ("show", "p.txt", "--model", "mmt", "--devices", "4", "--network", "p3.16xlarge")
    assert pipefill(capsys, monkeypatch, *by_hand)[1].strip() == table.strip()
    first = re.sub(r"in flight (\d+): \S+ ", r"in flight \1: ", text, count=1)
    Path("p.txt").write_text(first)
    status, _, err = pipefill(capsys, monkeypatch, *by_hand)
    assert status == 2
    assert "p.txt: C1: " in err


def test_the_example_is_planned_for_as_many_ranks_as_it_is_started_with(capsys, monkeypatch):
    example = ROOT / "examples" / "graph" / "train_two_towers.py"
    said = (ast.get_docstring(ast.parse(example.read_text(encoding="utf-8"))) or "").replace("\\\n", " ")
    found = re.search(r"pipefill graph (plan .*?)--json .*RANKS=(\d+) ", said, re.DOTALL)
    assert found is not None
    planned, ranks = found.groups()
    _, out, _ = pipefill(capsys, monkeypatch, *planned.replace("examples/", f"{ROOT}/examples/").split())
    assert f"\n{ranks} stages on {ranks} of {ranks} devices" in out
    assert re.search(r", \d{3},\d{3} samples/s\n", out)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("plan", "Missing argument 'MODEL'"),
        ("plan mmt", "Missing option '--devices'"),
        ("plan mmt --devices 0", "'--devices': expected greater than or equal to 1"),
        ("plan bogus --devices 2", "MODEL is 'bogus': expected one of mmt, dlrm, candle, two-tower, a .yaml file"),
        ("plan none.yaml --devices 2", "none.yaml: cannot be read: No such file"),
        ("plan no_such:thing --devices 2", "no_such:thing: ModuleNotFoundError"),
        ("plan mmt --devices 2 --gpu abacus", "--gpu is 'abacus': expected one of v100-16gb"),
        ("plan mmt --devices 2 --network string", "--network is 'string': expected one of p3.16xlarge"),
        ("plan mmt --devices 2 --memory lots", "--memory is 'lots': expected a size"),
        ("plan mmt --devices 2 --memory 1GiB", "mmt: 2 devices are too few"),
        ("plan mmt --devices 2 --batch 6 --micro-batches 4", "6 samples in 4 micro-batches; expected a divisor of 6"),
        ("plan mmt --devices 2 --json .", "--json .: cannot be written"),
        ("show towers.yaml", "towers.yaml: is not JSON"),
        ("show towers.yaml --model mmt", "expected --model and --devices"),
        ("show towers.yaml --model mmt --devices 2", "towers.yaml: line 1 is 'name: towers'"),
    ],
)
def test_wrong_calls(capsys, monkeypatch, arguments, reason):
    status, _, err = pipefill(capsys, monkeypatch, *arguments.split())
    assert status == 2
    assert reason in err


def test_one_data_parallel_stage_is_proposed_where_it_is_faster(capsys, monkeypatch):
    proposal = "one data-parallel stage on 8 devices"
    _, output, _ = pipefill(capsys, monkeypatch, "plan", "two-tower", "--devices", "8", "--batch", "8")
    assert proposal in output
    assert max(map(len, output.splitlines())) <= 80
    assert proposal not in pipefill(capsys, monkeypatch, "plan", "mmt", "--devices", "8", "--batch", "8")[1]


def test_what_is_not_series_parallel_is_said(capsys, monkeypatch):
    operators = [("a", "[]"), ("b", "[]"), ("c", "[a]"), ("d", "[a, b]")]
    rows = "".join(f"  - {{name: {name}, inputs: {inputs}, forward_s: 1}}\n" for name, inputs in operators)
    Path("n.yaml").write_text(f"name: n\noperators:\n{rows}")
    status, out, _ = pipefill(capsys, monkeypatch, "plan", "n.yaml", "--devices", "2", "--batch", "4")
    assert status == 0
    assert out.startswith("not series-parallel, so taken one after another: a c b d\n")


def test_memory_of_a_given_size_counts():
    cluster = Cluster(devices=4, gpu=GPUS["v100-16gb"], network=None)
    assert replace(cluster, memory_bytes=5).device_bytes == 5
    assert cluster.device_bytes == 16 * 2**30
