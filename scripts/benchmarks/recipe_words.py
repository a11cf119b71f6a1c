"""A small corpus of sentences for BERT, which has no mock data: an indexed dataset and a word-piece tokenizer."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

# Documents (recipes keep a thousandth of them for tests), sentences in each, words in each of these.
DOCUMENTS, SENTENCES, WORDS = 3000, 4, 5
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write(folder: Path, vocabulary: int) -> None:
    """Write ``corpus.bin``, ``corpus.idx`` and ``tokenizer`` into the folder; the same each time."""
    with warnings.catch_warnings(action="ignore"):  # of Megatron's, that there is no Transformer Engine
        import torch
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
        from transformers import BertTokenizer

    words = {word: number for number, word in enumerate((*SPECIAL, *(f"w{number}" for number in range(vocabulary))))}
    (folder / "tokenizer").mkdir()
    vocab = folder / "tokenizer" / "vocab.txt"
    vocab.write_text("\n".join(words) + "\n", encoding="utf-8")
    BertTokenizer(vocab_file=str(vocab), vocab=words).save_pretrained(folder / "tokenizer")
    drawn = np.random.default_rng(1)
    builder = IndexedDatasetBuilder(str(folder / "corpus.bin"), dtype=np.int32)
    for _ in range(DOCUMENTS):
        for _ in range(SENTENCES):
            builder.add_item(torch.from_numpy(drawn.integers(len(SPECIAL), len(words), WORDS, dtype=np.int32)))
        builder.end_document()
    builder.finalize(str(folder / "corpus.idx"))
