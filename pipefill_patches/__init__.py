"""PipeFill's patches on pip's megatron-core: applied by an explicit call, in memory only.

>>> import pipefill_patches
>>> pipefill_patches.apply(("p2p_communicator", "schedules"))
>>> pipefill_patches.revert()
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron.fill.errors import ConfigError, PatchError
from pipefill_patches import (
    arguments,
    bridge,
    cpu_backend,
    free_waits,
    host_p2p,
    multimodule,
    offload,
    p2p_communicator,
    schedules,
    training_loop,
    wheel,
)
from pipefill_patches.patch import Patch

# In the order in which they are applied: the CPU backend before any code looks for a device, and the patches that stage
# the pipeline's transfers before those that watch them.
PATCHES: dict[str, Patch] = {
    patch.name: patch
    for patch in (
        cpu_backend.PATCH,
        wheel.PATCH,
        arguments.PATCH,
        training_loop.PATCH,
        schedules.PATCH,
        host_p2p.PATCH,
        free_waits.PATCH,
        p2p_communicator.PATCH,
        schedules.GPIPE_PATCH,
        bridge.PATCH,
        multimodule.PATCH,
        offload.PATCH,
    )
}
_ADDED: list[str] = []  # names of the patches that ``add`` has added


def add(patch: Patch, before: str) -> None:
    """Add a patch that only one program needs; it is applied by default, and before the patch ``before``."""
    later = list(PATCHES)[list(PATCHES).index(before) :]
    PATCHES[patch.name] = patch
    for name in later:
        PATCHES[name] = PATCHES.pop(name)
    _ADDED.append(patch.name)


def defaults(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the patches that a run with this command line needs.

    The CPU backend is included if requested (``--fill-cpu-backend`` or ``PIPEFILL_CPU_BACKEND=1``) or without a CUDA
    device, ``host_p2p`` on ``PIPEFILL_HOST_P2P=1``, ``free_waits`` on ``--fill-free-waits``, and all of ``add``.
    ConfigError if one of the variables has another value than 0 or 1.
    """
    on_cpu = _is_set("PIPEFILL_CPU_BACKEND") or "--fill-cpu-backend" in argv or cpu_backend.needed()
    names: tuple[str, ...] = ("arguments", "training_loop", "schedules", "p2p_communicator")
    if _is_set("PIPEFILL_HOST_P2P"):
        names = ("host_p2p", *names)
    if "--fill-free-waits" in argv:
        names = ("free_waits", *names)
    return ("cpu_backend" if on_cpu else "wheel", *_ADDED, *names)


def _is_set(variable: str) -> bool:
    value = os.environ.get(variable) or "0"
    if value not in ("0", "1"):
        raise ConfigError(f"{variable} is {value!r} in the environment; expected 1, or 0 or nothing for no")
    return value == "1"


def apply(names: Sequence[str]) -> None:
    """Apply the named patches, in the order of ``PATCHES``, unless they are; PatchError if one is unknown or does not
    fit.
    """
    for name in names:
        if name not in PATCHES:
            raise PatchError(f"there is no patch {name!r}; expected one of {', '.join(PATCHES)}")
    for name, patch in PATCHES.items():
        if name in names:
            patch.apply()


def revert() -> None:
    """Revert every applied patch."""
    for patch in reversed(PATCHES.values()):
        patch.revert()
