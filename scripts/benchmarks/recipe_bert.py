"""Runs Megatron-LM's BERT script, whose path comes first, without Transformer Engine, whose layers it always imports.

python -m pipefill_patches scripts/benchmarks/recipe_bert.py PATH ARGUMENTS...
"""

from __future__ import annotations

import runpy
import sys

from megatron.core.models.bert import bert_layer_specs


def main() -> None:
    del sys.argv[0]
    vars(bert_layer_specs).setdefault("bert_layer_with_transformer_engine_spec", None)  # --spec local does not use it
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
