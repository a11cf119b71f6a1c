"""The torch half of the CPU backend: a stand-in for ``torch.cuda`` in a process without a CUDA device.

Megatron names ``device="cuda"`` everywhere, so the smallest faithful seam is torch itself: what makes or moves tensors
takes the CPU for a CUDA device, and the few ``torch.cuda`` functions that Megatron calls get a stand-in.  (A
``TorchFunctionMode`` would be called for every function and every attribute of a tensor.)  Everything is registered on
an ``ExitStack`` and reverted by closing it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.accelerator
import torch.cuda.random
import torch.distributed.distributed_c10d
import torch.fft
import torch.nested
import torch.utils.data.dataloader

from pipefill_patches.patch import Call, around, replace, wrap

_CPU = torch.device("cpu")


def _on_cpu(device: Any) -> Any:
    """Return the CPU for a value that names a CUDA device (as a bare int does), and other values unchanged."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return _CPU if device.partition(":")[0] == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    return device


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _same(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return tensor


def _making(make: Call) -> Call:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):  # without a device, memory cannot be pinned
            kwargs["pin_memory"] = False
        return make(*args, **kwargs)

    return made


def _moving(move: Call) -> Call:
    def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        elif args:
            args = (_on_cpu(args[0]), *args[1:])
        return move(tensor, *args, **kwargs)

    return moved


def _typing(type_of: Call) -> Call:
    # Megatron's optimizers sort parameters by comparing this name with 'torch.cuda.FloatTensor' and the like.
    def typed(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return type_of(tensor).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return type_of(tensor, dtype, non_blocking=non_blocking, **kwargs)

    return typed


# The functions and methods that take a device as a keyword.
_MAKERS: dict[Any, tuple[str, ...]] = {
    torch: (
        *("arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_like"),
        *("empty_permuted", "empty_quantized", "empty_strided", "eye", "from_file", "full", "full_like"),
        *("hamming_window", "hann_window", "kaiser_window", "linspace", "logspace", "normal", "ones", "ones_like"),
        *("rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "range"),
        *("scalar_tensor", "sparse_bsc_tensor", "sparse_bsr_tensor", "sparse_compressed_tensor", "sparse_coo_tensor"),
        *("sparse_csc_tensor", "sparse_csr_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like"),
    ),
    torch.fft: ("fftfreq", "rfftfreq"),
    torch.nested: ("nested_tensor",),
    torch.Tensor: ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"),
}


class Stream:
    """A stream on which all work is finished as soon as it is submitted, as CPU work is."""

    device = _CPU
    cuda_stream = 0
    synchronize = wait_event = wait_stream = _nothing

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        event = event or HostEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_exc: object) -> None:
        pass


class HostEvent:
    """An event that is complete as soon as it is recorded; it stores the host's time."""

    synchronize = wait = _nothing

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._recorded_s = 0.0

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        """Return the milliseconds between two recorded events."""
        return (end._recorded_s - self._recorded_s) * 1e3

    def query(self) -> bool:
        return True


def _total_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _peak_bytes(*_args: Any) -> int:
    """Return the peak resident memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident_bytes(*_args: Any) -> int:
    """Return the resident memory of this process now, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _memory_stats(*_args: Any) -> dict[str, int]:
    both = {"current": _resident_bytes(), "peak": _peak_bytes()}
    stats = {f"{kind}_bytes.all.{when}": size for kind in ("allocated", "reserved") for when, size in both.items()}
    return stats | {"allocation.all.current": 0}


def _properties(*_args: Any) -> SimpleNamespace:
    # From compute capability 10 on, Megatron does not require CUDA_DEVICE_MAX_CONNECTIONS=1 with tensor or context
    # parallelism, a setting that has no meaning here.
    return SimpleNamespace(name="cpu", major=10, minor=0, total_memory=_total_memory_bytes(), multi_processor_count=1)


def _cuda_stand_ins() -> dict[str, Any]:
    """Return the replacements of ``torch.cuda``'s attributes, by name."""
    resident = dict.fromkeys(("memory_allocated", "memory_reserved", "device_memory_used"), _resident_bytes)
    peak = dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), _peak_bytes)
    # What NVIDIA's driver tells of a GPU; --log-straggler shows it.
    unknown = dict.fromkeys(("clock_rate", "power_draw", "temperature", "utilization"), lambda *_args: 0)
    stream = Stream()
    silent = dict.fromkeys(
        ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device", "set_stream", "synchronize"), _nothing
    )
    return {
        **resident,
        **peak,
        **unknown,
        **silent,
        "is_available": lambda: True,
        # True makes torch's own lazy initialisation a no-op, so that torch.cuda's RNG functions act at once.
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        # torch.cuda.random and Megatron's RNG helpers use this tuple throughout: with the CPU's generator in it they
        # save, set and fork the very state that dropout and initialisation draw from on the CPU.
        "default_generators": (torch.default_generator,),
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *_args, **_kwargs: True,
        "get_device_properties": _properties,
        "get_device_capability": lambda *_args: (10, 0),
        "get_device_name": lambda *_args: "cpu",
        "mem_get_info": lambda *_args: (max(0, _total_memory_bytes() - _resident_bytes()), _total_memory_bytes()),
        "memory_stats": _memory_stats,
        "Stream": Stream,
        "Event": HostEvent,
        "stream": lambda _stream: contextlib.nullcontext(),
        "current_stream": lambda *_args: stream,
        "default_stream": lambda *_args: stream,
    }


def _without_device_id(init: Call, /, *args: Any, device_id: Any = None, **kwargs: Any) -> Any:
    """Create the process groups without ``device_id``, which would bind them to a device that does not exist."""
    return init(*args, **kwargs)


def _keeping_rng_state(init: Call, /, *args: Any, **kwargs: Any) -> None:
    """Restore the state of the CPU generator after a data loader's ``__init__``.

    It draws a seed for its workers, on the ranks that load data only.  Since the CPU's generator is also the model's
    here, the ranks of a tensor-parallel group would get different dropout, and so would a resumed run.
    """
    state = torch.get_rng_state()
    try:
        init(*args, **kwargs)
    finally:
        torch.set_rng_state(state)


def install(stack: contextlib.ExitStack) -> None:
    """Make the CPU stand in for this process's CUDA device, until ``stack`` is closed."""
    # Compiling for the CPU takes minutes and a C++ compiler.  This comes first: it imports dynamo, which refuses the
    # stand-ins.
    stance = torch.compiler.set_stance("force_eager")
    stack.callback(stance.__exit__, None, None, None)

    for name, stand_in in _cuda_stand_ins().items():
        replace(stack, torch.cuda, name, stand_in)
    for name in ("current_device", "device_count", "is_initialized"):  # that module imports them by name
        replace(stack, torch.cuda.random, name, getattr(torch.cuda, name))
    # A CUDA build of torch names CUDA as its accelerator even where there is no device.
    replace(stack, torch.accelerator, "is_available", lambda: False)
    replace(stack, torch.accelerator, "current_accelerator", lambda check_available=False: None)
    replace(stack, torch.accelerator, "device_count", lambda: 0)

    for owner, names in _MAKERS.items():
        for name in names:
            wrap(stack, owner, name, _making)
    wrap(stack, torch.Tensor, "to", _moving)
    wrap(stack, torch.Tensor, "type", _typing)
    replace(stack, torch.Tensor, "cuda", _same)
    replace(stack, torch.Tensor, "pin_memory", _same)
    replace(stack, torch.Tensor, "record_stream", _nothing)

    for module in (torch.distributed, torch.distributed.distributed_c10d):
        around(stack, module, "init_process_group", _without_device_id)
    around(stack, torch.utils.data.dataloader._BaseDataLoaderIter, "__init__", _keeping_rng_state)
