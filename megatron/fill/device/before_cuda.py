"""Imported before PyTorch is asked for CUDA, which Megatron does while it is imported.

A process becomes a client of MPS when it first uses the driver, or never.  PyTorch's ``is_available`` uses it, unless
it is told to ask NVML instead.  So where this run is to share by MPS it is told: whose client to become is known only
once the command line is parsed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence

ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


def leave_driver_alone(argv: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Have PyTorch ask NVML whether there is CUDA, if this command line shares by MPS."""
    pairs = zip(argv, [*argv[1:], ""], strict=True)
    if any(first == "--fill-sharing=mps" or (first, second) == ("--fill-sharing", "mps") for first, second in pairs):
        environment.setdefault(ASK_NVML, "1")


leave_driver_alone(sys.argv, os.environ)
