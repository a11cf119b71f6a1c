"""What srun says in its variables, as what torchrun would set."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.fill.rank.srun import INTERRUPTED, rank_variables, tasks_per_node
from tests.support.waiting import until

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "3,1,2",
}


@pytest.mark.parametrize(
    ("text", "counts"), [("2", [2]), ("2(x3)", [2, 2, 2]), ("4(x2),1,8(x2)", [4, 4, 1, 8, 8]), ("16(x1)", [16])]
)
def test_the_short_form_of_tasks_per_node_is_read(text, counts):
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "two", "2(x)", "2x3", "2,,1"])
def test_another_form_is_refused(text):
    with pytest.raises(ValueError, match=r"SLURM_STEP_TASKS_PER_NODE is .* expected something like"):
        tasks_per_node(text)


def test_a_rank_on_nodes_that_differ_knows_its_own():
    assert rank_variables(SLURM) == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
    }


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return subprocess.run(
        [sys.executable, "-m", "megatron.fill.rank.srun", *arguments],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_outside_of_srun_one_line_says_so():
    done = run("script.py")
    assert done.returncode == 1
    assert done.stderr == ("megatron.fill.rank.srun: SLURM_NODEID is not set; expected to be started by srun\n")


def test_without_a_script_it_says_how_it_is_called():
    assert run().stderr == "usage: srun ... python -m megatron.fill.rank.srun SCRIPT ARGS...\n"


@pytest.mark.parametrize(
    ("body", "code"), [("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_rank_s_end_is_the_task_s(body, code, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(body)
    marker = tmp_path / "marker"
    assert run(str(script), **SLURM, **{INTERRUPTED: str(marker)}).returncode == code
    assert not marker.exists()


def test_only_an_orderly_end_after_a_signal_is_an_interruption(tmp_path):
    script, marker = tmp_path / "script.py", tmp_path / "marker"
    script.write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGUSR2, lambda *_: os._exit(0))\n"
        f"open({str(tmp_path / 'ready')!r}, 'w').close()\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron.fill.rank.srun", str(script)],
        env=dict(os.environ) | SLURM | {INTERRUPTED: str(marker)},
    )
    until(lambda: (tmp_path / "ready").exists() or process.poll() is not None)
    process.send_signal(signal.SIGUSR2)
    assert process.wait(120) == 0
    assert Path(marker).read_text() == "SIGUSR2\n"
