"""The sandbox of a job: isolation layers of the kernel, in place before any byte of the job is read."""

from megatron.fill.sandbox.config import Bind, Sandbox, parse_bind
from megatron.fill.sandbox.probe import Layer, SandboxSupport, look

__all__ = ["Bind", "Layer", "Sandbox", "SandboxSupport", "look", "parse_bind"]
