"""``scripts/preprocess_text.py``: what it writes is what Megatron reads, and wrong inputs are said in one line."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "preprocess_text.py"


@pytest.fixture(scope="module")
def preprocess() -> ModuleType:
    spec = importlib.util.spec_from_file_location("preprocess_text", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.py").write_text("print('a')\n", encoding="utf-8")
    (folder / "inner" / "b.txt").write_text("Grüße, 世界", encoding="utf-8")
    (folder / "c.md").write_text("# c", encoding="utf-8")
    return folder


def documents(prefix: Path) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(f"{prefix}_text_document")
    assert list(dataset.document_indices) == list(range(len(dataset) + 1))
    return [dataset[index].tolist() for index in range(len(dataset))]


def test_bytes_round_trip_through_megatrons_dataset(
    preprocess: ModuleType, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tmp_path / "data"
    preprocess.main(["--input", str(texts), "--suffix", ".py,.txt", "--output-prefix", str(prefix), "--append-eod"])
    expected = [b"print('a')\n", "Grüße, 世界".encode()]
    assert documents(prefix) == [[*text, 255] for text in expected]
    size = sum(map(len, expected))
    out = capsys.readouterr().out
    assert f"2 documents, {size + 2} tokens, {size} bytes" in out
    assert f"--data-path {prefix}_text_document --tokenizer-type NullTokenizer --vocab-size 256" in out


def test_megatrons_tokenizer_flags_are_taken(preprocess: ModuleType, texts: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "70000", "--append-eod"]
    preprocess.main(["--input", str(texts / "c.md"), "--output-prefix", str(prefix), *flags])
    assert documents(prefix) == [[*b"# c", 69999]]


def test_undecodable_and_empty_files_are_skipped_and_counted(
    preprocess: ModuleType, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (texts / "picture.md").write_bytes(b"\xff\xfe\x00")
    (texts / "empty.md").touch()
    preprocess.main(["--input", str(texts), "--suffix", ".md", "--output-prefix", str(tmp_path / "data")])
    assert documents(tmp_path / "data") == [list(b"# c")]
    assert "1 files that are not UTF-8, 1 empty files" in capsys.readouterr().out


def test_files_are_found_once_in_order(preprocess: ModuleType, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(texts)
    found = preprocess.find_files(["c.md", ".", "**/*.txt", "a.py"], ".py,.txt")
    assert [file.name for file in found] == ["c.md", "a.py", "b.txt"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--input {t}/none --output-prefix {t}/d", "{t}/none: no such file or folder"),
        ("--input {t} --suffix .c,.h --output-prefix {t}/d", "--input {t}: no files with a name ending in .c or .h"),
        ("--input {t}/*.c --output-prefix {t}/d", "--input {t}/*.c: no files"),
        ("--input {t} --output-prefix {t}/none/d", "--output-prefix {t}/none/d: there is no folder {t}/none"),
        ("--input {t}/bad --output-prefix {t}/d", "no text: 1 files are not UTF-8, 0 are empty"),
        ("--input {t} --output-prefix {t}/d --vocab-size 9", "--vocab-size 9: bytes need at least 256"),
        ("--input {t} --output-prefix {t}/d --tokenizer-type HuggingFaceTokenizer", "HuggingFaceTokenizer: "),
        ("--input {t} --output-prefix {t}/d --unknown", "unrecognized arguments: --unknown"),
        ("--input {t}", "the following arguments are required: --output-prefix"),
    ],
)
def test_a_wrong_input_is_one_line_and_exit_2(
    preprocess: ModuleType, texts: Path, capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    (texts / "bad").write_bytes(b"\xff")
    before = sorted(texts.rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        preprocess.main(arguments.format(t=texts).split())
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert said.format(t=texts) in err
    assert err.count("\n") == 1
    assert sorted(texts.rglob("*")) == before


def test_the_default_tokenizer_is_one_that_training_takes(preprocess: ModuleType) -> None:
    args = Namespace(tokenizer_type=None, vocab_size=None, null_tokenizer_eod_id=None, null_tokenizer_pad_id=-1)
    tokenizer = preprocess.build_tokenizer(args)
    assert (args.tokenizer_type, tokenizer.vocab_size, tokenizer.eod) == ("NullTokenizer", 256, 255)


def test_the_command_fails_at_once_on_a_wrong_path(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--input", "none", "--output-prefix", str(tmp_path / "d")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (2, "preprocess_text.py: --input none: no such file or folder\n")
