"""How main job and workers share a GPU.

*Time-slicing*: each process has a context of its own, and the GPU runs one at a time.  A fault stays with the process
that made it.  *MPS*: kernels of several processes run side by side, which is faster, but they share what a fault hits:
an illegal access in one client can take down all clients of that GPU, the main job too.  So MPS is only ever used where
it was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.fill.device.port import DeviceError, Sharing


@dataclass(frozen=True, slots=True)
class SharingFacts:
    """What the choice depends on.

    Attributes:
        gpus: the number of GPUs.
        mps_program: whether the MPS control program is installed.
        same_user: workers run as the main job's user.
        exclusive: the compute mode lets one process use a GPU at a time.
    """

    gpus: int
    mps_program: bool
    same_user: bool = True
    exclusive: bool = False


def choose_sharing(setting: str, facts: SharingFacts) -> tuple[Sharing, str]:
    """The mode, and why this one.

    Args:
        setting: ``auto``, ``mps`` or ``timeslice``, as the user said.

    Raises:
        DeviceError: MPS was asked for and cannot be used; or time-slicing cannot.
    """
    if setting not in ("auto", *Sharing):
        raise DeviceError(f"sharing {setting!r}: expected auto, mps or timeslice")
    if setting != Sharing.MPS and facts.gpus and facts.exclusive:
        raise DeviceError(
            "a GPU here is in an exclusive compute mode, in which no job can use it beside the training; expected the "
            "mode Default (nvidia-smi -c 0, by root), or --fill-sharing mps"
        )
    if setting == Sharing.TIMESLICE:
        return Sharing.TIMESLICE, "asked for"
    if setting == Sharing.MPS:
        obstacle = mps_obstacle(facts)
        if obstacle:
            raise DeviceError(f"sharing by MPS was asked for, but {obstacle}")
        return Sharing.MPS, "asked for; a worker's illegal access can end the main job"
    if not facts.gpus:
        return Sharing.TIMESLICE, "there is no GPU"
    return Sharing.TIMESLICE, "the mode that keeps a worker's fault from the main job"


def mps_obstacle(facts: SharingFacts) -> str:
    """Why MPS cannot be used; empty if it can."""
    if not facts.gpus:
        return "there is no GPU"
    if not facts.mps_program:
        return "nvidia-cuda-mps-control is not installed"
    if not facts.same_user:
        return "an MPS server serves one user only, and the workers run as another"
    return ""
