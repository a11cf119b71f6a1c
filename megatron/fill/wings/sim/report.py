"""The part of a report: whom each rank waited for."""

from megatron.fill.wings.sim.recorded.waits import waits

__all__ = ["waits"]
