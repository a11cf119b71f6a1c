"""What the composition root refuses before a training starts."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron.fill.app.launch import Launch, _check_store
from megatron.fill.config import FillSettings
from megatron.fill.errors import ConfigError, StoreError


def flags(**changed: object) -> Namespace:
    values = {f"fill_{name}": field.default for name, field in FillSettings.model_fields.items()}
    changed = {f"fill_{name}": value for name, value in changed.items()}
    return Namespace(**values | {"fill_jobs": None, "bf16": False, "fp16": False} | changed)


@pytest.mark.parametrize("variable", ["GROUP_WORLD_SIZE", "SLURM_NNODES"])
def test_several_nodes_cannot_share_a_file(monkeypatch, variable):
    _check_store("runs/first")
    monkeypatch.setenv(variable, "2")
    with pytest.raises(
        ConfigError, match="2 nodes cannot share the job store runs/first; expected --fill-store postgres"
    ):
        _check_store("runs/first")
    _check_store("postgresql+psycopg://ada@db/pipefill")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"store": "mysql://ada:secret@db/x"}, r"mysql://ada:\*\*\*@db/x"),
        ({"policy": "fastest"}, "policy 'fastest'"),
        ({"policy": "0*fifo"}, "expected a number above 0"),
        ({"offload_optimizer": True}, "expected --bf16 or --fp16"),
        ({"store": "jobs.db", "profile_only": True}, "expected no --fill-store with it"),
        ({"lease_seconds": 0.0}, "--fill-lease-seconds is 0.0"),
        ({"max_slowdown": -1.0}, "--fill-max-slowdown is -1.0"),
        ({"sm_percentage": 101}, "--fill-sm-percentage is 101"),
        ({"max_processes": 1}, "--fill-max-processes is 1"),
        ({"store": "jobs.db", "user": "no-such-user"}, "--fill-user is 'no-such-user': there is no such user"),
        ({"store": "jobs.db", "mps_pipe": "/tmp/mps"}, "expected --fill-sharing mps with it"),
        ({"checkpoint_seconds": 0.0}, "--fill-checkpoint-seconds is 0.0"),
    ],
)
def test_wrong_flags_are_refused(changed, message):
    with pytest.raises((ConfigError, StoreError), match=message):
        Launch().on_parse(flags(**changed))


def test_the_store_is_the_flag_the_environment_or_the_run_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("PIPEFILL_STORE", raising=False)
    run = Launch()
    run.settings = FillSettings()
    assert run._store(tmp_path) == str(tmp_path)
    monkeypatch.setenv("PIPEFILL_STORE", "shared.db")
    assert run._store(tmp_path) == "shared.db"
    run.settings = FillSettings(store="flag.db")
    assert run._store(tmp_path) == "flag.db"
