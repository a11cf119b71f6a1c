"""Controls: without the layers that stop it an attack succeeds in a world of its own; behind them it is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.chaos.attacks.base import Attack, Ground, NoTargetError, Refused
from tests.chaos.checkout import ROOT
from tests.chaos.controls import walls
from tests.chaos.controls.control import Control
from tests.chaos.controls.engine import run_controls
from tests.chaos.controls.table import ATTACKS, CONTROLS
from tests.chaos.controls.walls import KERNEL, Wall
from tests.chaos.kind import Source, attack

# Of every family some that are over at once; `python -m tests.chaos --controls` runs them all.
QUICK = (
    *("prlimit-rank", "ptrace-rank", "pidfd-getfd", "signal-agents", "stop-agents", "signal-rank", "kill-everybody"),
    *("nice-rank", "autogroup-rank", "powers", "unshare", "setns-rank", "proc-sys", "lift-limits", "mknod"),
    *("plan-fifo", "checkpoint-bomb", "store-read", "delete-run", "folder-lock", "control-write", "baton-ones"),
    *("word-brackets", "work-nan", "lock-memory", "rank-ports", "terminal-stop", "own-autogroup", "own-oom-score-adj"),
    *("flock-others", "read-output", "requeue-control", "wake-op-gate", "memory-pipes", "own-session", "env-path"),
)
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a world of a control's own")


def test_every_attack_names_its_walls_and_has_a_control():
    assert set(CONTROLS) == set(ATTACKS)
    assert [name for name, control in CONTROLS.items() if not control.walls] == []


def test_what_must_be_refused_is_refused_by_the_kernel():
    refused = {name for name, one in ATTACKS.items() if one.kind.refused and one.kind.source is Source.ATTACK}
    assert {name for name in refused if not set(CONTROLS[name].walls) & set(KERNEL)} == set()


IN_A_PROCESS = """
import json, sys
from tests.chaos.controls.engine import run_controls
from tests.chaos.controls.table import ATTACKS, CONTROLS
found = run_controls({name: ATTACKS[name] for name in sys.argv[1:]}, CONTROLS)
print(json.dumps([[one.kind, one.wrong, one.behind is not None] for one in found]))
"""


@root
def test_quick_controls_succeed():
    # In a process of their own: pages that this one maps for other tests would be mapped in the attackers too.
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS, *QUICK],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {kind: wrong for kind, wrong, _ in found if wrong} == {}
    assert [kind for kind, *_ in found] == list(QUICK)
    refused = {name for name in QUICK if ATTACKS[name].kind.refused and set(CONTROLS[name].walls) <= set(KERNEL)}
    assert {kind for kind, _, behind in found if behind} == refused


def _get_nowhere(ground: Ground) -> str:
    raise NoTargetError("nobody is there")


def _fail(ground: Ground) -> str:
    raise Refused("for no wall's sake")


@root
@pytest.mark.parametrize(
    ("commit", "control", "wrong"),
    [
        (_get_nowhere, Control((Wall.CALLS,)), "it should have been done: no target nobody is there"),
        (_fail, Control((Wall.CALLS,)), "it should have been done: refused for no wall's sake"),
        (lambda ground: "", Control((Wall.CALLS,)), "behind all walls it should have been refused: done"),
        (lambda ground: "", Control((Wall.CALLS,), proof=lambda world: ""), "nothing is seen of it"),
        (lambda ground: "", Control((Wall.CALLS,), impossible="there is no device"), "there is no device"),
    ],
)
def test_an_attack_that_cannot_succeed_or_is_not_stopped_does_not_count(commit, control, wrong):
    made_up = Attack(attack("made-up", "", refused=True), commit)
    (found,) = run_controls({"made-up": made_up}, {"made-up": control})
    assert wrong in found.wrong


@root
def test_nothing_of_a_world_is_the_machines():
    def look(ground: Ground) -> str:
        return " ".join(os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net", "ipc", "mnt", "uts"))

    (found,) = run_controls({"look": Attack(attack("look", ""), look)}, {"look": Control(KERNEL)})
    here = {os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net", "ipc", "mnt", "uts")}
    assert found.without is not None
    assert found.without.word == "done"
    assert here.isdisjoint(found.without.detail.split())


def test_a_step_into_the_cage_that_has_another_name_by_now_is_an_error(monkeypatch):
    monkeypatch.setattr(walls, "_STEPS", {Wall.CALLS: ((walls.enter, "load_a_filter", lambda: ""),)})
    with pytest.raises(AttributeError, match="load_a_filter"):
        walls.leave_out([Wall.CALLS])


def test_the_steps_of_all_walls_are_there():
    for steps in walls._STEPS.values():
        for module, name, _ in steps:
            assert callable(getattr(module, name))
