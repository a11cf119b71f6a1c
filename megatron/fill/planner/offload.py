"""The choice whether the training keeps its optimizer state in host memory between steps (PipeFill, section 4.1)."""

from __future__ import annotations

MOST_LOST = 0.01  # greatest share of an iteration lost: the training comes first
LEAST_GAINED = 0.05  # least memory gained, as a share of the free memory: less makes room for no other job


def weigh_offload(gained_bytes: int, free_bytes: int, lost_ns: int, iteration_ns: int) -> tuple[bool, str]:
    """Weigh the device memory gained, beside what is free without it, against the time that an iteration waits.

    Return whether to offload, and the reason.
    """
    lost = lost_ns / iteration_ns if iteration_ns > 0 else 0.0
    costs = f"{gained_bytes / 2**20:.0f} MiB for {lost:.2%} of an iteration"
    if gained_bytes == 0:
        return False, "none of it is in the memory of a device, so there is nothing to gain"
    if lost > MOST_LOST:
        return False, f"{costs}: more than {MOST_LOST:.0%} is too slow"
    if gained_bytes < LEAST_GAINED * free_bytes:
        return False, f"{costs}: {free_bytes / 2**20:.0f} MiB are free without it"
    return True, costs
