"""What Megatron-LM's BERT recipes need besides its script: a small corpus, as there is no mock data for it.

python -m pipefill_patches tests/parallelism/recipes/bert.py PATH ARGUMENTS...

runs the script, whose path comes first, without Transformer Engine, whose layers it always imports.
"""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path

import numpy as np

# Documents (recipes keep a thousandth of them for tests), sentences in each, words in each of these.
DOCUMENTS, SENTENCES, WORDS = 3000, 4, 5
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write(folder: Path, vocabulary: int) -> None:
    """Write an indexed dataset and a word-piece tokenizer, ``corpus`` and ``tokenizer``; the same each time."""
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


def main() -> None:
    from megatron.core.models.bert import bert_layer_specs

    del sys.argv[0]
    vars(bert_layer_specs).setdefault("bert_layer_with_transformer_engine_spec", None)  # --spec local does not use it
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
