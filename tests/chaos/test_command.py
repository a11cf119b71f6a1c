"""Wrong options, which are refused before anything is started, and the folders that a run keeps."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.fill.errors import ConfigError
from tests.chaos.__main__ import main
from tests.chaos.campaign import Campaign
from tests.chaos.checkout import ROOT
from tests.chaos.run import ChaosOptions, _keep, run


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
    monkeypatch.setattr("tests.chaos.disk._mount", lambda folder: "not in a test")
    monkeypatch.setattr("tests.chaos.network._leave", lambda: "not in a test")
    with pytest.raises(ConfigError, match=message):
        run(options(**wrong), print)


CALLS = """
--faults 0 => argument --faults/-n: '0': expected a whole number of at least 1
--faults many => argument --faults/-n: 'many': expected a whole number of at least 1
-n -5 => argument --faults/-n: '-5': expected a whole number of at least 1
--iterations 10 => argument --iterations: '10': expected a whole number of at least 150
--seed x => argument --seed: invalid int value: 'x'
--kinds gremlins => --kinds names gremlins; expected some of
--kinds '' => --kinds names ''; expected some of
--controls --kinds hang => --kinds names no attack of a job; expected some of
--script none.py => no training script none.py; expected --script PATH of pretrain_gpt.py
--json folder => --json folder: cannot be written: Is a directory
--json /proc/c.json => --json /proc/c.json: cannot be written
--keep /proc/chaos => expected a new folder that can be written
--keep /proc => --keep /proc is not empty; expected a new folder
--keep file => --keep file: File exists; expected a new folder
--fault 5 => unrecognized arguments: --fault 5
"""


@pytest.mark.parametrize("line", CALLS.strip().splitlines(), ids=lambda line: line.partition(" => ")[0])
def test_a_wrong_call_is_answered_by_a_line_and_starts_nothing(line, tmp_path, monkeypatch, capsys):
    call, _, expected = line.partition(" => ")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Campaign, "run", lambda *_: pytest.fail("it began"))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(call))
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert expected in err.splitlines()[-1]
    assert sorted(tmp_path.iterdir()) == before, "something was made"


def test_the_command_is_found_from_another_folder(tmp_path):
    called = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--help"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert called.stdout.startswith("usage: python -m tests.chaos ")


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
        "from pathlib import Path; from tests.chaos.network import OwnNetwork; "
        "from tests.chaos.attacks.network import unix_names; "
        "own = OwnNetwork(); print(own.why_not, unix_names(Path('/nowhere'))); "
        "own.close(); print(unix_names(Path('/nowhere')))"
    )
    done = subprocess.run([sys.executable, "-c", find], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [" ['@pipefill-chaos']", "[]"]
