"""Imported before Megatron, which asks PyTorch for CUDA, and imports Transformer Engine, while it is imported.

A process becomes a client of MPS when it first uses the driver, or never.  PyTorch's ``is_available`` uses it, unless
it is told to ask NVML instead.  So where this run is to share by MPS it is told: whose client to become is known only
once the command line is parsed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import MutableMapping, Sequence

ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


def leave_driver_alone(argv: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Have PyTorch ask NVML whether there is CUDA, if this command line shares by MPS."""
    pairs = zip(argv, [*argv[1:], ""], strict=True)
    if any(first == "--fill-sharing=mps" or (first, second) == ("--fill-sharing", "mps") for first, second in pairs):
        environment.setdefault(ASK_NVML, "1")


def leave_out_broken(names: Sequence[str] = ("transformer_engine.pytorch", "apex")) -> None:
    """Have packages that are installed, and whose import fails in another way than by ImportError, count as missing.

    Megatron does without a package that is not there.  One that was built for another PyTorch or another CUDA raises
    something else, in the middle of Megatron's own imports.
    """
    for name in names:
        top = name.partition(".")[0]
        if importlib.util.find_spec(top) is None:
            continue
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        except Exception as error:
            for module in [one for one in sys.modules if one == top or one.startswith(f"{top}.")]:
                del sys.modules[module]
            sys.modules[top] = None  # type: ignore[assignment]  # each further import of it is an ImportError
            if os.environ.get("RANK", "0") == "0":
                why = (str(error).splitlines() or [""])[0]
                print(
                    f"PipeFill: {top} is installed, but cannot be imported ({type(error).__name__}: {why}); "
                    "it counts as missing",
                    flush=True,
                )


leave_driver_alone(sys.argv, os.environ)
leave_out_broken()
