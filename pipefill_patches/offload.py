"""``--fill-offload-optimizer``: the optimizer's state is kept in host memory while no optimizer step needs it.

Megatron's own ``offload_to_cpu`` and ``restore_from_cpu`` move it (PipeFill, section 4.1); they copy, so every bit is
kept.  They run in a separate thread and stream: to the host during the next iteration's compute, and back during the
drain bubble.
After a few iterations the adviser decides whether that pays; if not, the state stays on the device permanently.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from megatron.fill.attached import attached
from megatron.fill.hooks import Callback, bus
from pipefill_patches.patch import Call, Patch, Target, around

_SETUP = Target("megatron.training.training:setup_model_and_optimizer", ())  # its arguments are only passed on
_OFFLOAD = Target("megatron.core.optimizer.optimizer:MegatronOptimizer.offload_to_cpu", ("self",))
_RESTORE = Target("megatron.core.optimizer.optimizer:MegatronOptimizer.restore_from_cpu", ("self",))
_TRIAL_STEPS = 10
_READERS = ("state_dict", "sharded_state_dict", "load_state_dict", "reload_model_params", "save_parameter_state")


@dataclass(eq=False, repr=False)
class OffloadedOptimizer(Callback):
    """Moves a ``MegatronOptimizer``'s state to the host and back; its ``step`` and the readers of its state are
    wrapped.
    """

    optimizer: Any
    # Called with the bytes gained, the ns lost per iteration and the iteration's ns; False ends offloading.
    pays: Callable[[int, int, int], bool]

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload")
        self._moving: Future[None] | None = None
        self._stream: Any = None
        self._away = False
        self._on = True
        self._steps = 0
        self._lost_ns = 0
        self._began_ns = 0
        self._bytes = 0
        optimizer, self._step = self.optimizer, self.optimizer.step
        optimizer.step = self.step
        for name in _READERS:
            if hasattr(optimizer, name):
                setattr(optimizer, name, self._with_state(getattr(optimizer, name)))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        start_ns = time.monotonic_ns()
        self._bring_back()
        self._lost_ns += time.monotonic_ns() - start_ns
        result = self._step(*args, **kwargs)
        if self._on:
            self._weigh(start_ns)
        if self._on:
            self._away = True
            self._move(self.optimizer.offload_to_cpu)
        return result

    def on_last_backward(self) -> None:
        """Start moving the state back, since the next optimizer step is near."""
        if self._away:
            self._away = False
            self._move(self.optimizer.restore_from_cpu)

    def _bring_back(self) -> None:
        self.on_last_backward()
        if self._moving is not None:
            self._moving.result()
            self._moving = None
            if self._stream is not None:
                import torch

                torch.cuda.current_stream().wait_stream(self._stream)

    def _move(self, move: Callable[[], None]) -> None:
        import torch

        if not torch.cuda.is_available():
            self._moving = self._thread.submit(move)
            return
        stream = self._stream = self._stream or torch.cuda.Stream()
        ready = torch.cuda.current_stream().record_event()  # the move has to wait for the queued optimizer step

        def on_stream() -> None:
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                move()

        self._moving = self._thread.submit(on_stream)

    def _with_state(self, method: Call) -> Call:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._bring_back()
            return method(*args, **kwargs)

        return run

    def _weigh(self, now_ns: int) -> None:
        self._steps += 1
        if self._steps == 1:  # this step has created the state
            self._bytes = sum(tensor.nbytes for tensor in _state(self.optimizer) if tensor.is_cuda)
            self._began_ns, self._lost_ns = now_ns, 0
        # Without anything to gain, no trial is needed.
        if self._steps == _TRIAL_STEPS or not self._bytes:
            steps = max(1, self._steps - 1)
            self._on = self.pays(self._bytes, self._lost_ns // steps, (now_ns - self._began_ns) // steps)
            self._steps = _TRIAL_STEPS + 1


def _state(optimizer: Any) -> Iterator[Any]:
    """Yield the tensors that ``offload_to_cpu`` moves: the optimizer's own parameters and its state."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if inner is None or getattr(part, "is_stub_optimizer", False):
            continue
        for group in inner.param_groups:
            yield from group["params"]
        for values in inner.state.values():
            yield from (value for value in values.values() if hasattr(value, "nbytes"))


def _install(stack: contextlib.ExitStack) -> None:
    def with_offload(setup: Call, /, *args: Any, **kwargs: Any) -> Any:
        result = setup(*args, **kwargs)
        if result[1] is not None and attached.offload_pays is not None:
            offloaded = OffloadedOptimizer(result[1], attached.offload_pays)
            bus.callbacks.append(offloaded)
            stack.callback(bus.callbacks.remove, offloaded)
        return result

    around(stack, *_SETUP.resolve(), with_offload)


PATCH = Patch("offload", _install, (_SETUP, _OFFLOAD, _RESTORE))
