"""Import-time setup before Megatron, whose own import queries CUDA and imports Transformer Engine.

A process becomes a client of MPS when it first uses the driver, or never.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

from megatron.fill.device.joining import join_early


def leave_out_broken(names: Sequence[str] = ("transformer_engine.pytorch", "apex")) -> None:
    """Make packages count as missing that are installed but whose import fails with another error than ImportError.

    Megatron works without a package that is missing.  A package that was built for another PyTorch or CUDA raises other
    errors, in the middle of Megatron's own imports.
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
            sys.modules[top] = None  # type: ignore[assignment]  # any further import raises ImportError
            if os.environ.get("RANK", "0") == "0":
                why = (str(error).splitlines() or [""])[0]
                print(
                    f"PipeFill: {top} is installed, but cannot be imported ({type(error).__name__}: {why}); "
                    "it counts as missing",
                    flush=True,
                )


join_early(sys.argv, os.environ)
leave_out_broken()
