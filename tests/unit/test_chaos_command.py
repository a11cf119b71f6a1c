"""What ``pipefill chaos`` refuses before it starts anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.fill.chaos import training
from megatron.fill.chaos.run import ChaosOptions, _keep, run
from megatron.fill.errors import ConfigError
from tests.e2e.training import ROOT


def options(**changes: object) -> ChaosOptions:
    return ChaosOptions(**({"faults": 1} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kinds": ("gremlins",)}, "--kinds names gremlins; expected some of"),
        ({"script": Path("nowhere.py")}, "no training script nowhere.py; expected --script PATH"),
        ({"keep": ROOT}, "is not empty; expected a new folder"),
        ({"kinds": ("cuda-illegal-access",)}, "only faults that cannot be injected here"),
    ],
)
def test_a_wrong_option_is_an_error_at_once(wrong, message, monkeypatch):
    monkeypatch.setattr("megatron.fill.chaos.disk._mount", lambda folder: "not in a test")
    monkeypatch.setattr("megatron.fill.chaos.network._leave", lambda: "not in a test")
    with pytest.raises(ConfigError, match=message):
        run(options(**wrong), print)


def test_the_script_is_found_beside_the_package_or_in_the_working_directory(tmp_path, monkeypatch):
    assert training.find_script(None) == ROOT / "pretrain_gpt.py"
    monkeypatch.setattr(training, "__file__", str(tmp_path / "site-packages" / "megatron" / "fill" / "chaos" / "t.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no training script .*; expected --script PATH of pretrain_gpt.py"):
        training.find_script(None)
    (tmp_path / "pretrain_gpt.py").touch()
    assert training.find_script(None) == tmp_path / "pretrain_gpt.py"


def test_what_attacks_left_in_the_run_folders_does_not_cost_the_result(tmp_path):
    source, target = tmp_path / "disk", tmp_path / "runs"
    said: list[str] = []
    (source / "run").mkdir(parents=True)
    os.mkfifo(source / "run" / "plan.json")
    (source / "run" / "zero").symlink_to("/dev/zero")
    with (source / "run" / "checkpoint.pt").open("wb") as file:
        file.truncate(1 << 30)
    _keep(source, target, said.append)
    assert said == []
    assert (target / "run" / "zero").is_symlink()
    assert (target / "run" / "plan.json").is_fifo()
    assert (target / "run" / "checkpoint.pt").stat().st_blocks < 1000
    _keep(tmp_path / "nowhere", target, said.append)
    assert said[0].startswith("not all of the run folders could be kept: ")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network of its own")
def test_a_network_of_its_own_has_an_abstract_socket_to_attack():
    find = (
        "from pathlib import Path; from megatron.fill.chaos.network import OwnNetwork; "
        "from megatron.fill.chaos.attacks.network import unix_names; "
        "own = OwnNetwork(); print(own.why_not, unix_names(Path('/nowhere'))); "
        "own.close(); print(unix_names(Path('/nowhere')))"
    )
    done = subprocess.run([sys.executable, "-c", find], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [" ['@pipefill-chaos']", "[]"]
