"""Wall clocks that jump in agents only: the machine's clock is not touched, nor that of workers (``python -I``).

A folder on ``PYTHONPATH`` holds a ``sitecustomize`` that adds an offset to ``time.time()``; it reads the offset from a
file of eight bytes that it maps, and that the driver writes.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from tests.chaos.checkout import ROOT
from tests.chaos.processes import maps

_OFFSET = "offset"
_CUSTOMIZE = '''\
"""time.time() of PipeFill's agents, shifted by the seconds in the file beside this one."""

import sys

if "megatron.fill.agent.agent" in sys.orig_argv:
    import mmap
    import os
    import time

    with open(os.path.join(os.path.dirname(__file__), "offset"), "rb") as _file:
        _shift = memoryview(mmap.mmap(_file.fileno(), 8, prot=mmap.PROT_READ)).cast("d")
    _true = time.time
    time.time = lambda: _true() + _shift[0]
    time.time_ns = lambda: int(time.time() * 1e9)
'''


class JumpingClock:
    """The folder on ``PYTHONPATH``, and the offset.

    Args:
        folder: created here.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "sitecustomize.py").write_text(_CUSTOMIZE, encoding="utf-8")
        self.jump(0.0)

    @property
    def python_path(self) -> str:
        """``PYTHONPATH`` of processes whose clocks jump; includes the checkout, from which jobs import their tasks."""
        return os.pathsep.join([str(self.folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

    def jump(self, seconds: float) -> None:
        """Set all these clocks ``seconds`` off the machine's."""
        path = self.folder / _OFFSET
        with path.open("r+b" if path.exists() else "wb") as file:  # in place: it is mapped
            file.write(struct.pack("d", seconds))

    def moves(self, pid: int) -> bool:
        """True if the process uses this clock."""
        return str(self.folder / _OFFSET) in maps(pid)
