"""The mode in which jobs share the GPUs of this run, chosen before CUDA is first used."""

from __future__ import annotations

import os
import shutil

from megatron.fill.config import FillSettings
from megatron.fill.device.joining import ASK_NVML, join
from megatron.fill.device.mps import PROGRAM, MpsDaemon
from megatron.fill.device.nvml import Nvml
from megatron.fill.device.port import DeviceError, Sharing
from megatron.fill.device.sharing import choose_sharing
from megatron.fill.errors import ConfigError
from megatron.fill.linux.proc import has_host_pids


def share(settings: FillSettings, on_cpu: bool) -> MpsDaemon | None:
    """Choose the mode, or raise ConfigError; with MPS, start or find the daemon, become its client, and return it."""
    try:
        nvml = None if on_cpu else Nvml()
        gpus = [] if nvml is None else nvml.gpus()
        sharing, why = choose_sharing(
            settings.sharing,
            gpus=len(gpus),
            mps_program=shutil.which(PROGRAM) is not None,
            same_user=settings.user is None,
            exclusive=settings.serves and nvml is not None and any(nvml.shared_by(gpu.uuid) != "all" for gpu in gpus),
        )
        if gpus and os.environ.get("RANK", "0") == "0":
            print(f"PipeFill: jobs share the GPU by {sharing}: {why}", flush=True)
        if sharing is not Sharing.MPS:
            return None
        return join(settings.report, os.environ)
    except DeviceError as error:
        raise ConfigError(f"--fill-sharing {settings.sharing}: {error}") from error


def why_no_client(daemon: MpsDaemon) -> str:
    """Return why this rank is not a client of the daemon that its workers use; empty if it is one.

    A rank that is none shares the GPU with the MPS server by time slices: workers get far more than their share.
    """
    import torch

    torch.cuda.synchronize()  # makes a context, if there is none
    try:
        if os.getpid() in daemon.clients() or (daemon.outside and not has_host_pids()):
            return ""
    except DeviceError as error:
        return str(error)
    return (
        f"it is not a client of the MPS daemon in {daemon.pipe}, perhaps because something used CUDA before Megatron's "
        f"command line was parsed; {ASK_NVML}=1 in the environment keeps PyTorch from it"
    )
