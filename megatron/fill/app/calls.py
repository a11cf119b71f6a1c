"""Calls that wait in a thread of their own, so that their caller can do something else meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from pipefill_patches import cpu_backend


class CallThread:
    """A thread that makes calls, one at a time.  It does not keep the process, if that fails while a call waits."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._make, name="pipefill-waits", daemon=True).start()

    def submit[T](self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def _make(self) -> None:
        if cpu_backend.PATCH.applied:  # how torch runs is a setting of each thread
            from pipefill_patches.cpu_torch import CudaOnCpu

            CudaOnCpu().__enter__()
        while True:
            call, future = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
