"""Network namespaces with a link of its own between each two of them, as fast as it is said to be.

All of it is inside namespaces that have no name and live as long as their processes, which die with this one: nothing
is left, even if this process is killed, and this host's own network is not touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations

from megatron.fill.linux.libc import PR_SET_PDEATHSIG, prctl

INTERFACE = "link0"  # has the namespace's address; on whatever link a peer is reached, this is what it is called by
_MTU = 9000
_BURST_BYTES = 18_000  # two packets: what passes before the limit is felt
_QUEUE_BYTES = 4 << 20  # nothing is dropped


def address(rank: int) -> str:
    """Of a namespace, the same on all its links."""
    return f"10.77.0.{rank + 1}"


def why_not() -> str:
    """Why there can be no such network here; empty if there can."""
    for program in ("ip", "tc", "nsenter"):
        if shutil.which(program) is None:
            return f"{program} is not installed; expected Debian's iproute2 and util-linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with linked([[0.0, 1e6], [1e6, 0.0]]):
            return ""
    except (OSError, RuntimeError) as error:
        return f"no network namespaces here: {error}"


@contextmanager
def linked(bits_per_s: Sequence[Sequence[float]]) -> Iterator[list[int]]:
    """Namespaces that are linked pair by pair.

    Args:
        bits_per_s: N x N, from row to column.

    Yields:
        Their files, for ``setns``.

    Raises:
        RuntimeError: the kernel refused something; says what.
    """
    count = len(bits_per_s)
    holders: list[int] = []
    files: list[int] = []
    try:
        for _ in range(count):
            holders.append(_holder())
            files.append(os.open(f"/proc/{holders[-1]}/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        for one, other in combinations(range(count), 2):
            peer = f"peer name {_name(other, one)} netns {holders[other]}"
            _run(holders[one], f"ip link add {_name(one, other)} type veth {peer}")
        for one in range(count):
            _set_up(holders[one], one, bits_per_s[one])
        yield files
    finally:
        for file in files:
            os.close(file)
        for pid in holders:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _set_up(pid: int, rank: int, bits_per_s: Sequence[float]) -> None:
    _run(pid, "ip link set lo up")
    others = [other for other in range(len(bits_per_s)) if other != rank]
    for other in others:
        name = _name(rank, other)
        _run(pid, f"ip link set {name} mtu {_MTU} up")
        limits = f"rate {bits_per_s[other]:.0f}bit burst {_BURST_BYTES} limit {_QUEUE_BYTES}"
        _run(pid, f"tc qdisc add dev {name} root tbf {limits}")
    _run(pid, f"ip address add {address(rank)}/32 dev {_name(rank, others[0])}")
    for other in others:
        _run(pid, f"ip route add {address(other)}/32 dev {_name(rank, other)} src {address(rank)}")


def _name(rank: int, other: int) -> str:
    """Of a namespace's end of a link; the first of them has the address."""
    first = 0 if rank else 1
    return INTERFACE if other == first else f"to{other}"


def _holder() -> int:
    """A process in a network namespace of its own."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.unshare(os.CLONE_NEWNET)
            os.write(writer, b"1")
            while True:
                signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader, "rb") as answer:
        if not answer.read(1):
            os.waitpid(pid, 0)
            raise RuntimeError("the kernel refuses a network namespace")
    return pid


def _run(pid: int, command: str) -> None:
    """In the network namespace of a process."""
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", *command.split()], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command}: {(done.stdout + done.stderr).strip()}")
