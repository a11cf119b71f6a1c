"""The limits of workers, and the device memory that the training leaves free.

The agent opens the device of its rank and gets a ``Limiter`` for each worker.
"""

from __future__ import annotations

from megatron.fill.device.mps import MpsDaemon
from megatron.fill.device.port import DeviceError, Limiter, Limits, Sharing, WorkerDevice

__all__ = ["DeviceError", "Limiter", "Limits", "MpsDaemon", "Sharing", "WorkerDevice", "open_device"]


def open_device(
    name: str, mps: MpsDaemon | None = None, uuid: str | None = None, rank: int | None = None
) -> WorkerDevice:
    """Open the device ``cpu``, or ``cuda:N`` with the arguments of ``CudaDevice``; DeviceError if there is none."""
    if name == "cpu":
        from megatron.fill.device.cpu import CpuDevice

        return CpuDevice()
    from megatron.fill.device.cuda import CudaDevice

    return CudaDevice(name, mps, uuid, rank=rank)
