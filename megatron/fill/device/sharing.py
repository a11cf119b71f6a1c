"""The choice of how the training and the workers share a GPU.

*Time-slicing*: each process has its own context, and the GPU runs one at a time.  A fault affects only the process that
caused it.  *MPS*: kernels of several processes run at the same time, which is faster, but an illegal access in one
client can end all clients of that GPU, the training too.  So MPS is used only if the user asks for it.
"""

from __future__ import annotations

from megatron.fill.device.port import DeviceError, Sharing


def choose_sharing(
    setting: str, gpus: int, mps_program: bool, same_user: bool = True, exclusive: bool = False
) -> tuple[Sharing, str]:
    """Choose the mode; return it and the reason.

    DeviceError if MPS was asked for and cannot be used, or time-slicing cannot be used.

    Args:
        setting: the user's choice: ``auto``, ``mps`` or ``timeslice``.
        gpus: number of GPUs.
        mps_program: True if the MPS control program is installed.
        same_user: True if workers run as the training's user.
        exclusive: True if the compute mode of a GPU allows at most one process at a time.
    """
    if setting != Sharing.MPS and gpus and exclusive:
        raise DeviceError(
            "a GPU here is in an exclusive compute mode, in which no job can use it beside the training; expected the "
            "mode Default (nvidia-smi -c 0, by root), or --fill-sharing mps"
        )
    if setting == Sharing.TIMESLICE:
        return Sharing.TIMESLICE, "asked for"
    if setting == Sharing.MPS:
        if obstacle := mps_obstacle(gpus, mps_program, same_user):
            raise DeviceError(f"sharing by MPS was asked for, but {obstacle}")
        return Sharing.MPS, "asked for; a worker's illegal access can end the main job"
    if not gpus:
        return Sharing.TIMESLICE, "there is no GPU"
    return Sharing.TIMESLICE, "the mode that keeps a worker's fault from the main job"


def mps_obstacle(gpus: int, mps_program: bool, same_user: bool = True) -> str:
    """The reason why MPS cannot be used; empty if it can."""
    if not gpus:
        return "there is no GPU"
    if not mps_program:
        return "nvidia-cuda-mps-control is not installed"
    if not same_user:
        return "an MPS server serves one user only, and the workers run as another"
    return ""
