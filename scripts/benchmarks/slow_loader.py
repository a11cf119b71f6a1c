"""A script's training whose data set takes its time: every sample comes 5 ms late.

python -m scripts.benchmarks.slow_loader SCRIPT ARGUMENTS...
"""

from __future__ import annotations

import runpy
import sys
import time
from typing import Any

import pipefill_patches

LATE_S = 0.005


def main() -> None:
    pipefill_patches.apply(pipefill_patches.defaults(sys.argv))  # Megatron imports without a device after that
    from megatron.core.datasets.gpt_dataset import MockGPTDataset

    sample = MockGPTDataset.__getitem__

    def late(self: Any, index: int | None) -> Any:
        time.sleep(LATE_S)
        return sample(self, index)

    MockGPTDataset.__getitem__ = late
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
