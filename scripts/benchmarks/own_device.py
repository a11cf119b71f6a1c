"""A script's training whose ranks have devices of their own: every pass takes its time, and none of the rank's core.

python -m scripts.benchmarks.own_device SCRIPT ARGUMENTS...

More ranks than cores compute in turns, so while one waits its core is not idle.  Here a rank sleeps in each pass, as
the host of a GPU does; the model is to be so small that what it computes itself is little beside that.
"""

from __future__ import annotations

import functools
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

import pipefill_patches

FORWARD_S, BACKWARD_S = 0.05, 0.1


def _longer(original: Callable[..., Any], more_s: float) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        time.sleep(more_s)
        return original(*args, **kwargs)

    return run


def main() -> None:
    pipefill_patches.apply(pipefill_patches.defaults(sys.argv))  # Megatron imports without a device after that
    from megatron.core.models.gpt import GPTModel
    from megatron.core.pipeline_parallel import schedules

    GPTModel.forward = _longer(GPTModel.forward, FORWARD_S)
    schedules.custom_backward = _longer(schedules.custom_backward, BACKWARD_S)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
