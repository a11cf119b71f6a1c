"""The run's MPS daemon, which a rank joins before it uses CUDA: the environment's, or else one of the run's own.

The run's own is stopped by a process, the guard (``python -m megatron.fill.device.joining PIPE LOG OWNER``), when the
run is over, however it ended.  A rank cannot do that: it is a client until it ends, and the daemon waits for clients.

Transformer Engine with flash-attn uses the driver during its import, which is before Megatron's command line is parsed.
So the few flags that matter are read from the command line here.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path

from megatron.fill.device.mps import PIPE, PROGRAM, MpsDaemon
from megatron.fill.device.nvml import Nvml, uuid_of
from megatron.fill.device.port import DeviceError

ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"  # makes PyTorch's ``is_available`` query NVML instead of the driver
_joined: list[MpsDaemon] = []  # at most one


def join(report: str | None, environment: MutableMapping[str, str]) -> MpsDaemon:
    """Join the daemon of this run on this node, by changing this process's environment; CUDA uses it from now on.

    ``CUDA_MPS_PIPE_DIRECTORY`` in it names a daemon that runs already; else the first rank starts one.  DeviceError if
    the daemon cannot be used.  ``report`` is the run folder; None for a folder named after the ranks' launcher.
    """
    if not _joined and environment.get(PIPE):
        _joined.append(MpsDaemon.existing(Path(environment[PIPE])))
    if not _joined:
        gpus = Nvml().gpus()
        chosen = environment.get("CUDA_VISIBLE_DEVICES") or None
        count = len(gpus) if chosen is None else chosen.count(",") + 1
        uuids = [uuid_of(f"cuda:{number}", chosen, gpus) for number in range(count)]
        # The ranks of a node share a launcher; together with the run's name it identifies this run.
        launcher = os.getppid()
        daemon = MpsDaemon.start(Path(report or Path(tempfile.gettempdir()) / f"pipefill-{launcher}"), uuids, launcher)
        if daemon.ours:
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(daemon.pipe), str(daemon.log), str(launcher)],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # it must not get Ctrl-C
            )
        environment.update(daemon.main_environment(uuids))
        _joined.append(daemon)
    return _joined[0]


def guard(daemon: MpsDaemon, owner: int) -> None:
    """Wait for the end of the process ``owner``, then stop the daemon."""
    with suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(owner)], [], [])
    daemon.stop()


def join_early(argv: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Leave the driver alone and join the daemon, if this command line shares by MPS.

    Errors in it are reported later, when it is parsed.
    """
    if flag_of(argv, "--fill-sharing") != "mps":
        return
    environment.setdefault(ASK_NVML, "1")
    if environment.get("PIPEFILL_CPU_BACKEND") != "1" and "--fill-cpu-backend" not in argv:
        with suppress(DeviceError, OSError):
            join(flag_of(argv, "--fill-report"), environment)


def flag_of(argv: Sequence[str], name: str) -> str | None:
    """The value of a flag on a command line, as argparse reads it; None if the flag is not given."""
    found = None
    for first, second in zip(argv, [*argv[1:], None], strict=True):
        if first == name:
            found = second
        elif first.startswith(f"{name}="):
            found = first.partition("=")[2]
    return found


if __name__ == "__main__":
    guard(MpsDaemon(Path(sys.argv[1]), Path(sys.argv[2]), True, PROGRAM), int(sys.argv[3]))
