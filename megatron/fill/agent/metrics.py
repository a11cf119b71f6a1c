"""The metrics server of a node: a process below the agent of the node's first rank."""

from __future__ import annotations

import logging
import subprocess
import sys

from megatron.fill.linux.tree import OWN
from megatron.fill.operate.spec import MetricsSpec

logger = logging.getLogger("pipefill.agent")


class MetricsServer:
    """Starts the server, and again when it has ended; it ends with this process."""

    def __init__(self, spec: MetricsSpec) -> None:
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None

    def keep(self) -> None:
        """Start the server unless it runs.

        Raises:
            OSError: it cannot be started.
        """
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            OWN.discard(self._process.pid)
            logger.warning("the metrics server ended with %d; it is started again", code)
        command = [sys.executable, "-m", "megatron.fill.operate.serve"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        OWN.add(self._process.pid)
        if self._process.stdin is not None:  # not its command line: the store's URL may hold a password
            with self._process.stdin as settings:
                settings.write(self._spec.to_json().encode())
