"""The run's own MPS daemon, which a rank joins before anything in it uses CUDA.

Transformer Engine with flash-attn asks the driver while it is imported, which is before Megatron's command line is
parsed.  So the command line is looked at here first, for these few flags.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path

from megatron.fill.device import mps_guard
from megatron.fill.device.mps import MpsDaemon
from megatron.fill.device.nvml import Nvml, uuid_of
from megatron.fill.device.port import DeviceError

_joined: list[MpsDaemon] = []  # one at most


def join(report: str | None, environment: MutableMapping[str, str]) -> MpsDaemon:
    """The daemon of this run on this node, started if this rank is its first; CUDA uses it from now on.

    Args:
        report: the run folder; None for a name that is this run's only.
        environment: of this process.

    Raises:
        DeviceError: it cannot be had.
    """
    if not _joined:
        gpus = Nvml().gpus()
        chosen = environment.get("CUDA_VISIBLE_DEVICES") or None
        count = len(gpus) if chosen is None else chosen.count(",") + 1
        uuids = [uuid_of(f"cuda:{number}", chosen, gpus) for number in range(count)]
        # The ranks of a node have their launcher in common; with the run's name it tells this run from others.
        launcher = os.getppid()
        daemon = MpsDaemon.start(Path(report or Path(tempfile.gettempdir()) / f"pipefill-{launcher}"), uuids, launcher)
        if daemon.ours:
            mps_guard.start(daemon, launcher)
        environment.update(daemon.main_environment(uuids))
        _joined.append(daemon)
    return _joined[0]


def join_early(argv: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Use the daemon that this command line asks for; what is wrong with it is said when the command line is parsed."""
    if flag_of(argv, "--fill-sharing") != "mps":
        return
    pipe = flag_of(argv, "--fill-mps-pipe")
    if pipe is not None:
        environment["CUDA_MPS_PIPE_DIRECTORY"] = pipe
    elif environment.get("PIPEFILL_CPU_BACKEND") != "1" and "--fill-cpu-backend" not in argv:
        with suppress(DeviceError, OSError):
            join(flag_of(argv, "--fill-report"), environment)


def flag_of(argv: Sequence[str], name: str) -> str | None:
    """The value of a flag on a command line, as argparse takes it; None if it is not there."""
    found = None
    for first, second in zip(argv, [*argv[1:], None], strict=True):
        if first == name:
            found = second
        elif first.startswith(f"{name}="):
            found = first.partition("=")[2]
    return found
