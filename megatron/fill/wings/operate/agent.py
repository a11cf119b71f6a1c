"""The parts of an agent: figures for Megatron's writers, the labels of a GPU, and the metrics server of a node.

The server runs below the agent of the node's first rank.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

from megatron.fill.agent.context import Attendant
from megatron.fill.agent.spec import AgentSpec
from megatron.fill.device.nvml import shared_nvml
from megatron.fill.linux.tree import OWN
from megatron.fill.pages.control import ControlPage
from megatron.fill.wings.operate.figures import ShownFigures
from megatron.fill.wings.operate.jobmapping import open_mapping
from megatron.fill.wings.operate.spec import OTLP, MetricsSpec

logger = logging.getLogger("pipefill.agent")


class MetricsServer(Attendant):
    """Starts the server, and again when it has ended; it ends with this process."""

    def __init__(self, spec: MetricsSpec) -> None:
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None

    def keep(self) -> None:
        """Start the server unless it runs; OSError if it cannot be started."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            OWN.discard(self._process.pid)
            logger.warning("the metrics server ended with %d; it is started again", code)
        command = [sys.executable, "-m", "megatron.fill.wings.operate.serve"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        OWN.add(self._process.pid)
        if self._process.stdin is not None:  # not its command line: the store's URL may hold a password
            with self._process.stdin as settings:
                settings.write(self._spec.to_json().encode())


def attendants(spec: AgentSpec, control: ControlPage) -> list[Attendant]:
    """Return the figures; the metrics server, on one rank of each node, and the GPU's mapping if they are asked for."""
    found: list[Attendant] = [ShownFigures(Path(spec.run_dir), control)]
    asked = bool(spec.metrics) or bool(os.environ.get(OTLP) and importlib.util.find_spec("prometheus_client"))
    if asked and spec.place == 0:
        store = spec.store if spec.rank == 0 else ""
        found.append(MetricsServer(MetricsSpec(spec.run_dir, spec.node, store, **(spec.metrics or {}))))
    mapping = open_mapping(spec.dcgm_job_mapping, spec.device_uuid, lambda: shared_nvml().gpus())
    return found if mapping is None else [*found, mapping]
