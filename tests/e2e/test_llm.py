"""A training's own checkpoints are evaluated in its bubbles, and the last one after them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.training import MODEL, REST_MS, ROOT, train, train_until, warm_python, write_jobs

# The iterations between checkpoints.  The job starts during the first of them: with fewer, its checkpoint would not be
# evaluated earlier, and the command would have many others left to evaluate.
EVERY = 40
CLI = ["-c", "from megatron.fill.cli import main; main()"]
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --group-query-attention "
    "--num-query-groups 2 --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 384"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A few files of Python's own, as bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    folder.chmod(0o755)
    prefix = folder / "text"
    library = sysconfig.get_path("stdlib")
    script = ["scripts/preprocess_text.py", "--append-eod", "--output-prefix", str(prefix), "--input"]
    subprocess.run(
        [sys.executable, *warm_python(), *script, f"{library}/a*.py"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    return f"{prefix}_text_document"


def evaluate(folder: Path) -> dict[str, Any]:
    """What the command says that evaluates the checkpoints which are left."""
    command = [sys.executable, *warm_python(), *CLI, "evaluate", "evaluate", "--store", str(folder / "run")]
    done = subprocess.run([*command, "--device", "cpu", "--json"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("flags", ["", LLAMA], ids=["gpt2", "llama"])
def test_a_checkpoint_is_evaluated_as_megatron_does_itself(tmp_path, corpus, flags):
    saved = tmp_path / "saved"
    args = {"checkpoints": str(saved), "prompts": ["def "], "new_tokens": 8}
    job = {"name": "evaluate", "task": "megatron.fill.wings.llm:EvaluateCheckpoints", "args": args}
    model = MODEL.replace("--mock-data", f"--data-path {corpus} --split 80,20,0").replace("size 255", "size 256")
    saving = f"--save {saved} --save-interval {EVERY} --eval-interval {EVERY} --eval-iters 3"
    trained = train_until(
        tmp_path,
        f"{write_jobs(tmp_path, job)} --fill-bind {tmp_path} {Path(corpus).parent} {saving} {flags}",
        {"evaluate": lambda job: job.progress.work_done >= 1},
        model=model,
    )
    lines = trained.path("evaluate", "evaluations.jsonl").read_text().splitlines()
    found = json.loads(lines[0])
    said = re.search(rf"validation loss at iteration {EVERY} \| lm loss value: ([0-9.E+-]+)", trained.output)
    assert said is not None
    assert found["iteration"] == EVERY
    assert found["loss"] == pytest.approx(float(said[1]), rel=1e-5)
    assert found["samples"][0]["prompt"] == "def "
    assert trained.jobs["evaluate"]["result"]["evaluated"] == len(lines)
    assert list(trained.path("evaluate", "tensorboard").glob("events*"))
    # What the bubbles have left gets the same by the command: the last checkpoint always, and here the first one too.
    # On a busy machine there are many between them, and nothing else is to be seen in those.
    saves = sorted(saved.glob("iter_*"))
    assert int(saves[-1].name[5:]) not in [json.loads(line)["iteration"] for line in lines]
    for between in saves[1:-1]:
        shutil.rmtree(between)
    file = trained.path("evaluate", "evaluations.jsonl")
    owner = file.stat().st_uid
    file.write_text("")
    done = evaluate(tmp_path)
    after = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["iteration"] for line in after] == [int(saves[at].name[5:]) for at in (0, -1)]
    assert after[0]["loss"] == pytest.approx(float(said[1]), rel=1e-5)
    assert after[0]["samples"] == found["samples"]
    assert done["evaluated"] == after
    assert file.stat().st_uid == owner


def test_the_loss_of_what_is_saved_at_the_very_end_is_megatrons(tmp_path, corpus):
    saved = tmp_path / "saved"
    job = {
        "name": "evaluate",
        "task": "megatron.fill.wings.llm:EvaluateCheckpoints",
        "args": {"checkpoints": str(saved)},
    }
    model = MODEL.replace("--mock-data", f"--data-path {corpus} --split 80,20,0").replace("size 255", "size 256")
    model = model.replace("--eval-iters 0 --eval-interval 100000", "--eval-iters 3 --eval-interval 20")
    trained = train(
        tmp_path,
        f"{write_jobs(tmp_path, job)} --fill-bind {tmp_path} {Path(corpus).parent} --save {saved} --save-interval 10",
        iterations=20,
        rest_ms=REST_MS,
        model=model,
    )
    before = trained.jobs["evaluate"]
    said = evaluate(tmp_path)
    assert before["state"] == "QUEUED"
    found = [json.loads(line) for line in Path(said["evaluations"]).read_text().splitlines()]
    assert [line["iteration"] for line in found] == [10, 20]
    assert said["evaluated"] == found[before["result"].get("evaluated", 0) :]
    megatrons = re.search(r"validation loss at iteration 20 \| lm loss value: ([0-9.E+-]+)", trained.output)
    assert megatrons is not None
    assert found[-1]["loss"] == pytest.approx(float(megatrons[1]), rel=1e-5)
