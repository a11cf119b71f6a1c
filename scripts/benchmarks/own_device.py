"""A script's training whose ranks have devices of their own: every pass takes its time, and none of the rank's core.

python -m scripts.benchmarks.own_device SCRIPT ARGUMENTS...

More ranks than cores compute in turns, so while one waits its core is not idle.  Here each pass has a length, as on a
GPU: once it has computed, the rank sleeps for the rest.  The model is to be so small that the rest is nearly all.
"""

from __future__ import annotations

import functools
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

import pipefill_patches

FORWARD_S, BACKWARD_S = 0.1, 0.2  # about as long as in the trainings with a core for each rank


def _lasting(original: Callable[..., Any], pass_s: float) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        end_s = time.monotonic() + pass_s
        found = original(*args, **kwargs)
        time.sleep(max(0.0, end_s - time.monotonic()))
        return found

    return run


def main() -> None:
    pipefill_patches.apply(pipefill_patches.defaults(sys.argv))  # Megatron imports without a device after that
    from megatron.core.models.gpt import GPTModel
    from megatron.core.pipeline_parallel import schedules

    GPTModel.forward = _lasting(GPTModel.forward, FORWARD_S)
    schedules.custom_backward = _lasting(schedules.custom_backward, BACKWARD_S)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
