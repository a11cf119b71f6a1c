"""The sandbox of a job: isolation layers of the kernel, in place before any byte of the job is read.

``Cage`` is the sandbox's configuration, ``enter`` sets it up in three steps, ``probe`` finds the layers that this
machine supports.
"""

from megatron.fill.sandbox.cage import Bind, Cage, parse_bind
from megatron.fill.sandbox.probe import Layer, Walls, look

__all__ = ["Bind", "Cage", "Layer", "Walls", "look", "parse_bind"]
