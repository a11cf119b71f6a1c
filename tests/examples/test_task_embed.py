from __future__ import annotations

import numpy as np
import pytest

from examples.tasks.embed import EmbedTexts, model_folder
from tests.support.drive import begin, drive, finish

pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra models")
WORDS = ["pipeline", "model", "leaves", "idle", "time", "which", "other", "work", "can", "use"]


@pytest.fixture
def folder(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number, length in enumerate([3, 500, 100, 40, 60, 5, 20]):
        words = [WORDS[(number + i * i) % len(WORDS)] for i in range(length)]
        (texts / f"{number:02d}.txt").write_text(" ".join(words), encoding="utf-8")
    (texts / "empty.txt").write_bytes(b"")
    (texts / "latin1.txt").write_bytes("Größe und Maß".encode("latin-1"))
    return texts


def read(path):
    rows = pq.read_table(path).to_pydict()
    return dict(zip(rows["path"], np.array(rows["embedding"], dtype=np.float32), strict=True))


def test_it_is_what_sentence_transformers_computes(tmp_path, folder):
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs the extra models")
    task = drive(EmbedTexts, tmp_path / "job", folder=str(folder), batch_sizes=[2], pieces=6)
    assert task.split == "torch.export, 6 pieces"
    got = read(tmp_path / "job" / "embeddings.parquet")
    names = sorted(path.name for path in folder.glob("*.txt"))
    assert sorted(got) == names
    texts = [(folder / name).read_bytes().decode("utf-8", errors="replace") for name in names]
    expected = sentence_transformers.SentenceTransformer(str(model_folder()), device="cpu").encode(texts)
    for name, vector in zip(names, expected, strict=True):  # padding and batches differ, so not bit for bit
        np.testing.assert_allclose(got[name], vector, atol=1e-5)


def test_interrupted_and_resumed_is_uninterrupted(tmp_path, folder):
    for path in folder.glob("*.txt"):
        if len(path.read_bytes()) > 400:  # the model is split for each length, at each beginning
            path.unlink()
    args = {"folder": str(folder), "batch_sizes": [1], "pieces": 3, "part_rows": 4}
    drive(EmbedTexts, tmp_path / "whole", **args)
    state = None
    begun = 0
    while True:
        machine = begin(EmbedTexts, tmp_path / "parts", state, **args)
        begun += 1
        try:
            for _ in range(5):
                machine.run_next_step()
        except StopIteration:
            break
        state = machine.state_dict()
    assert begun >= 3
    whole, parts = read(tmp_path / "whole/embeddings.parquet"), read(tmp_path / "parts/embeddings.parquet")
    assert list(whole) == list(parts)
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)
    assert finish(machine) == []


@pytest.mark.parametrize("name", ["nowhere", ""])
def test_no_folder(tmp_path, name):
    with pytest.raises(ValueError, match=r"folder is .*: expected a folder of"):
        begin(EmbedTexts, tmp_path, folder=name)


def test_no_text(tmp_path):
    with pytest.raises(ValueError, match=r"holds no \*.txt file"):
        begin(EmbedTexts, tmp_path, folder=str(tmp_path))
