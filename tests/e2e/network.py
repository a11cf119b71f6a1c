"""Nodes of one machine: each a network namespace, on a network for the database and one for the training.

It takes root, and the programs ``ip`` and ``nsenter``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack
from types import TracebackType

TRAINING, DATABASE = "training", "database"  # the two networks, and a node's devices on them
_SUBNETS = {TRAINING: "10.77.2", DATABASE: "10.77.1"}
_SERVER = 100


def why_no_network() -> str:
    """Return what this machine lacks for such nodes; empty if it lacks nothing."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    lacking = [name for name in ("ip", "nsenter") if shutil.which(name) is None]
    return f"{lacking} not installed" if lacking else ""


class Network:
    """The nodes and their two networks, as a context manager.

    Args:
        nodes: number of nodes; the database's server has a namespace besides.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = range(nodes)
        self._prefix = f"pipefill-{os.getpid()}"
        self._cut: set[tuple[int, str]] = set()

    def __enter__(self) -> Network:
        with ExitStack() as stack:
            for place in ("switch", "server", *self.nodes):
                name = self._name(place)
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "del", name)
                _ip("-n", name, "link", "set", "lo", "up")
            for network in _SUBNETS:
                self._on_switch("link", "add", network, "type", "bridge")
                self._on_switch("link", "set", network, "up")
                for node in self.nodes:
                    self._connect(self._name(node), network, f"{network}{node}", node + 1)
            self._connect(self._name("server"), DATABASE, "server", _SERVER)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def server(self) -> tuple[str, list[str]]:
        """The address of the database's server, and the command that runs another one there."""
        return f"{_SUBNETS[DATABASE]}.{_SERVER}", _within(self._name("server"))

    def on(self, node: int) -> list[str]:
        """The command that runs another one on a node."""
        return _within(self._name(node))

    def address(self, node: int) -> str:
        """The address of a node for the others."""
        return f"{_SUBNETS[TRAINING]}.{node + 1}"

    def cut(self, node: int, network: str) -> None:
        """Take a node off a network: all that is sent is lost, and neither end is told."""
        self._on_switch("link", "set", f"{network}{node}", "nomaster")
        self._cut.add((node, network))

    def mend(self) -> None:
        """Put all nodes back on the networks that they were taken off."""
        while self._cut:
            node, network = self._cut.pop()
            self._on_switch("link", "set", f"{network}{node}", "master", network)

    def _name(self, place: object) -> str:
        return f"{self._prefix}-{place}"

    def _on_switch(self, *words: str) -> None:
        _ip("-n", self._name("switch"), *words)

    def _connect(self, name: str, network: str, port: str, number: int) -> None:
        """Connect a namespace to a network by a port of the switch."""
        self._on_switch("link", "add", port, "type", "veth", "peer", "name", network, "netns", name)
        self._on_switch("link", "set", port, "master", network, "up")
        _ip("-n", name, "address", "add", f"{_SUBNETS[network]}.{number}/24", "dev", network)
        _ip("-n", name, "link", "set", network, "up")


def _within(name: str) -> list[str]:
    # `ip netns exec` would mount another /sys, without the control groups.
    return ["nsenter", f"--net=/run/netns/{name}", "--"]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
