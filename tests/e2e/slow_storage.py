"""Runs a training script whose storage is slow: rank 1 sleeps in each file that it saves, all do in each sample, and
rank 1 for three times as long.

python slow_storage.py SCRIPT FLAGS...
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from typing import Any

# A sample is long against what the rank computes in it: above a quarter, a wait for it would be no rest.
SAVE_S, SAMPLE_S = 0.4, 0.04


def slow_down() -> None:
    """Make ``torch.save`` and the data set slow."""
    import torch
    from megatron.core.datasets.gpt_dataset import GPTDataset

    save, sample = torch.save, GPTDataset.__getitem__

    def slow_save(*args: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] == "1":
            time.sleep(SAVE_S)
        return save(*args, **kwargs)

    def slow_sample(*args: Any, **kwargs: Any) -> Any:
        time.sleep(SAMPLE_S * (3 if os.environ["RANK"] == "1" else 1))
        return sample(*args, **kwargs)

    torch.save = slow_save
    GPTDataset.__getitem__ = slow_sample


def main() -> None:
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    slow_down()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
