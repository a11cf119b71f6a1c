"""Blocking calls in a thread of their own, so that the caller can do other work in the meantime."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from pipefill_patches import cpu_backend


class CallThread:
    """A daemon thread that makes calls, one at a time; a call that waits does not keep the process alive."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._make, name="pipefill-waits", daemon=True).start()

    def submit[T](self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def _make(self) -> None:
        if cpu_backend.PATCH.applied:  # torch function modes are per thread
            from pipefill_patches.cpu_torch import CudaOnCpu

            CudaOnCpu().__enter__()
        while True:
            call, future = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
