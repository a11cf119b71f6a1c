"""Pages of a test's own, whose descriptors are closed at its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from megatron.fill.linux import memfd
from megatron.fill.pages import control, find


@contextmanager
def closed_pages() -> Iterator[None]:
    """Close at the end the descriptors of pages that are made or opened meanwhile, and that nobody has closed.

    In a rank or an agent they are open until it ends; a process that runs thousands of tests would have as many.
    """
    made: list[tuple[int, os.stat_result]] = []

    def noting[**P](make: Callable[P, int]) -> Callable[P, int]:
        def noted(*args: P.args, **kwargs: P.kwargs) -> int:
            fd = make(*args, **kwargs)
            made.append((fd, os.fstat(fd)))
            return fd

        return noted

    class Opened(control.ControlPage):
        def __init__(self, fd: int) -> None:
            super().__init__(fd)
            made.append((fd, os.fstat(fd)))

    with pytest.MonkeyPatch.context() as patch:
        for name in ("create", "reader_fd"):
            patch.setattr(memfd, name, noting(getattr(memfd, name)))
        patch.setattr(find, "ControlPage", Opened)  # find_pages opens those of other processes
        yield
    for fd, its in made:
        with suppress(OSError):
            if os.path.samestat(os.fstat(fd), its):  # not a number that another file has since
                os.close(fd)
