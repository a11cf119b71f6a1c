"""``pipefill network`` in real ranks, over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.fill.wings.configure.network import Network
from scripts.benchmarks.one_gpu import free_port
from tests.e2e.launch import WARM, Warm
from tests.e2e.training import HERE, ROOT

PIPEFILL = ("-c", "from megatron.fill.cli import main; main()", "network")


def start(*arguments: str, ranks: int = 3) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(HERE / "launch.py"), str(ranks), *PIPEFILL, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("network")
    files = ["--output", str(folder / "n.json"), "--png", str(folder / "n.png"), "--csv", str(folder / "n.csv")]
    process = start(*files, "--sizes", "8,64KiB,64MiB", "--repeats", "2")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return folder, output


def test_every_ordered_pair_is_measured(measured):
    folder, output = measured
    network = Network.load(folder / "n.json")  # which refuses pairs without figures
    assert [place.local_rank for place in network.ranks] == [0, 1, 2]
    assert network.backend == "gloo"
    assert "measuring 3 ranks on 1 host over gloo: 3 rounds, 2 times" in output
    assert "within a host  6" in output
    assert "all-reduce over" in output
    assert (folder / "n.png").stat().st_size > 1000
    lines = (folder / "n.csv").read_text(encoding="utf-8").splitlines()[1:]
    assert [line.split(",")[0] for line in lines] == ["p2p"] * 18 + ["all-reduce"] * 3
    assert {line.split(",")[4] for line in lines} == {"6"}  # times: three messages in each of two repeats


def test_two_files_are_compared_without_ranks(measured):
    path = str(measured[0] / "n.json")
    ended = subprocess.run(
        [sys.executable, *PIPEFILL, path, "--compare", path],
        cwd=ROOT, check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "0 of 6 links have changed by more than 10% beyond their spread" in ended.stdout
    assert "Measure again in 30 days" in ended.stdout


# The rank that is to die does so when it is asked for the tenth time.
DIES = """
import os, signal
from megatron.fill.cli import main
from megatron.fill.wings.configure.measure import _Wire

answer, asked = _Wire.answer, []

def answer_or_die(*arguments):
    asked.append(1)
    if len(asked) == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    answer(*arguments)

if os.environ["RANK"] == "1":
    _Wire.answer = answer_or_die
main()
"""


def test_a_rank_that_dies_ends_all_and_nothing_is_written(tmp_path):
    arguments = ["-c", DIES, "network", "--output", str(tmp_path / "n.json"), "--timeout", "100"]
    with free_port() as port, (tmp_path / "log").open("w+", encoding="utf-8") as log:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}
        ranks = [
            Warm(arguments, os.environ | shared | {"RANK": str(rank)}, os.environ[WARM], (log.fileno(), log.fileno()))
            for rank in range(3)
        ]
        codes = [rank.wait() for rank in ranks]
        log.seek(0)
        said = log.read()
    assert codes == [2, -9, 2], said
    assert said.count("cannot go on measuring: ") == said.count("; nothing is written") == 2
    assert "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
