"""The models of bench_llm.py: byte-level, trained by this project on the sources of Python's standard library."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
CONTEXT = 256
HELD_OUT = 12  # one source file of so many is not trained on
_COMMON = (
    f"--num-attention-heads 4 --seq-length {CONTEXT} --max-position-embeddings {CONTEXT} --micro-batch-size 4 "
    "--global-batch-size 8 --lr-warmup-iters 20 --lr-decay-style cosine --clip-grad 1.0 --tokenizer-type NullTokenizer "
    "--vocab-size 256 --split 100,0,0 --eval-iters 0 --eval-interval 100000 --log-interval 50"
)
_MODELS = {
    # Deep and narrow: a pass of it takes about five of the draft's, where real ones take a hundred.
    "target": (
        2,
        1000,
        "--pipeline-model-parallel-size 2 --num-layers 12 --hidden-size 120 --init-method-std 0.05 "
        "--lr 2e-3 --min-lr 2e-4",
    ),
    "draft": (1, 1500, "--num-layers 1 --hidden-size 64 --init-method-std 0.1 --lr 5e-3 --min-lr 5e-4"),
}


def sources() -> tuple[list[str], list[str]]:
    """The files to train on, and those that are held out."""
    files = sorted(glob.glob(f"{sysconfig.get_path('stdlib')}/*.py"))
    return [f for at, f in enumerate(files) if at % HELD_OUT], files[::HELD_OUT]


def write_corpus(folder: Path) -> Path:
    """What is trained on, unless it is there; what Megatron's ``--data-path`` takes."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus"
    if not Path(f"{corpus}_text_document.idx").exists():
        script = [sys.executable, "scripts/preprocess_text.py", "--append-eod", "--output-prefix", str(corpus)]
        subprocess.run([*script, "--input", *sources()[0]], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return Path(f"{corpus}_text_document")


def train(folder: Path) -> None:
    """Train what is not there yet."""
    folder, corpus = folder.resolve(), write_corpus(folder)
    for name, (ranks, iterations, flags) in _MODELS.items():
        where = folder / name
        if (where / "latest_checkpointed_iteration.txt").exists():
            continue
        print(f"training {name}: the log is {where}.log", flush=True)
        arguments = [*flags.split(), *_COMMON.split(), "--data-path", str(corpus)]
        save = ["--train-iters", str(iterations), "--save", str(where), "--save-interval", str(iterations)]
        with open(f"{where}.log", "w", encoding="utf-8") as log:
            subprocess.run(
                ["scripts/train_local.sh", *arguments, *save],
                cwd=ROOT,
                check=True,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"RANKS": str(ranks), "PIPEFILL_CPU_BACKEND": "1"},
            )


def prompts(count: int, least: int = 8, most: int = 96, held_out: bool = True) -> list[str]:
    """Pieces of files, of lengths from ``least`` to ``most`` characters, always the same ones."""
    text = "".join(Path(file).read_text(encoding="utf-8", errors="ignore") for file in sources()[held_out])
    text = "".join(character for character in text if ord(character) < 128)
    step = (len(text) - most) // count
    return [text[at * step : at * step + least + at * 7919 % (most - least)] for at in range(count)]


def write_requests(path: Path, texts: Sequence[str], **body: Any) -> Path:
    """A file of requests, one for each text; a function among the values is asked for each request's own."""
    with path.open("w", encoding="utf-8") as file:
        for at, text in enumerate(texts):
            own = {name: value(at) if callable(value) else value for name, value in body.items()}
            line = {"custom_id": f"r{at}", "method": "POST", "url": "/v1/completions", "body": {"prompt": text, **own}}
            file.write(json.dumps(line) + "\n")
    return path
