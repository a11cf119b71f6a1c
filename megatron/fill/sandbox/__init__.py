"""What keeps a job in: walls of the kernel that stand before a byte of the job is looked at.

``Cage`` says what is wanted, ``enter`` builds it in three steps, ``probe`` tells what this machine can give.
"""

from megatron.fill.sandbox.cage import Bind, Cage, parse_bind
from megatron.fill.sandbox.probe import Layer, Walls, look

__all__ = ["Bind", "Cage", "Layer", "Walls", "look", "parse_bind"]
