"""The composition root: the one room that knows all the others."""

from megatron.fill.app.launch import launch

__all__ = ["launch"]
