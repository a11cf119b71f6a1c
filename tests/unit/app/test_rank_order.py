"""``--fill-rank-order``: what the file may say, and what becomes of a process's rank."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron.fill.app.launch import Launch
from megatron.fill.app.placing import take_rank
from megatron.fill.errors import ConfigError
from megatron.fill.given.rankorder import load_rank_order
from tests.unit.app.test_app import flags

VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    *("TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT"),
)


def started_as(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what is set by the code is taken back too
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def order(tmp_path: Path) -> Path:
    path = tmp_path / "order.json"
    path.write_text('{"order": [2, 0, 3, 1]}', encoding="utf-8")
    return path


def test_the_order_is_read(order):
    assert load_rank_order(order, 4) == (2, 0, 3, 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1, 0], r'found \[1, 0\]: expected {"order": \[...\]} with each rank from 0 to 3 once'),
        ({"order": [0, 1, 2, 3], "seed": 1}, "'seed': 1}: expected"),
        ({"order": "0123"}, "order is '0123': expected a list of ranks"),
        ({"order": [0, 1, 2, True]}, r"True\]: expected a list of ranks"),
        ({"order": [0, 1, 2]}, "order has 3 ranks, but 4 were started: expected"),
        ({"order": [0, 1, 1, 3]}, "order has rank 1 more than once: expected"),
        ({"order": [0, 1, 2, 4]}, "order has rank 4: expected"),
        ({"order": [0, 1, 2, -1]}, "order has rank -1: expected"),
    ],
)
def test_wrong_orders_are_refused(tmp_path, data, message):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as error:
        load_rank_order(path, 4)
    assert str(error.value).startswith(str(path))


def test_a_process_takes_its_rank_and_stays_where_it_is(monkeypatch, order):
    own = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    started_as(monkeypatch, RANK="3", WORLD_SIZE="4", **own)
    args, launch = flags(rank_order=str(order)), Launch()
    launch.on_parse(args)
    assert (args.rank, os.environ["RANK"]) == (2, "2")
    assert {name: os.environ[name] for name in own} == own
    launch.on_parse(args)  # of a script that parses its flags twice
    assert args.rank == 2


def test_a_launcher_that_names_no_places_is_helped(monkeypatch):
    started_as(monkeypatch, RANK="3", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2", TORCHELASTIC_USE_AGENT_STORE="True")
    assert take_rank((3, 2, 1, 0))[0] == 0
    assert (os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"]) == ("1", "1")
    started_as(monkeypatch, RANK="3", WORLD_SIZE="4", SLURM_LOCALID="0", TORCHELASTIC_USE_AGENT_STORE="True")
    take_rank((3, 2, 1, 0))
    assert os.environ["LOCAL_RANK"] == "0"


def test_a_wrong_order_changes_no_rank(monkeypatch, order):
    started_as(monkeypatch, RANK="1", WORLD_SIZE="3")
    with pytest.raises(ConfigError, match="order has 4 ranks, but 3 were started"):
        Launch().on_parse(flags(rank_order=str(order)))
    assert os.environ["RANK"] == "1"


def test_the_first_process_serves_the_store_whatever_its_rank(monkeypatch):
    """Rank 0 would, but the others look for it at MASTER_ADDR, which may be another machine."""
    started: list[tuple] = []
    monkeypatch.setattr("torch.distributed.TCPStore", lambda *args, **_: started.append(args))
    for physical in (0, 1, 2):
        started_as(monkeypatch, RANK=str(physical), WORLD_SIZE="3", MASTER_ADDR="node0", MASTER_PORT="29500")
        take_rank((2, 0, 1))
        assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert started == [("node0", 29500)]
