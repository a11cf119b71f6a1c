"""Attacks that need no pid: on sockets, interfaces, the terminal."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.chaos.attacks.base import Attack, Ground, NoTargetError, beside, own_session, try_all
from tests.chaos.kind import NETWORK, attack

_FLAGS = struct.Struct("16sH14x")
_HELD_S = 3.0
_OFF_S = 5.0


def _loopback(ground: Ground) -> str:
    """Take the loopback interface down, and up again after some seconds; never the machine's."""
    if not ground.own_network():
        raise NoTargetError("this is the machine's network")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        (_, flags) = _FLAGS.unpack(fcntl.ioctl(any_socket, 0x8913, _FLAGS.pack(b"lo", 0)))

    def turn(up: bool) -> None:
        wanted = flags | 1 if up else flags & ~1
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            fcntl.ioctl(one, 0x8914, _FLAGS.pack(b"lo", wanted))

    found = try_all([("lo is down", lambda: turn(False))])
    if os.fork() == 0:
        try:
            own_session()
            time.sleep(_OFF_S)
            turn(True)
        finally:
            os._exit(0)
    return found


def listeners() -> list[tuple[int, str, int]]:
    """The listening TCP sockets of this network: family, address, port."""
    found = []
    for family, name, address in ((socket.AF_INET, "tcp", "127.0.0.1"), (socket.AF_INET6, "tcp6", "::1")):
        with suppress(OSError):
            for line in Path(f"/proc/self/net/{name}").read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    found.append((int(family), address, int(fields[1].rpartition(":")[2], 16)))
    return found


def unix_names(folder: Path) -> list[str]:
    """The abstract unix sockets of this network, as ``@NAME``, and those in a folder."""
    lines = Path("/proc/self/net/unix").read_text(encoding="utf-8").splitlines()[1:]
    names = [fields[-1] for line in lines if len(fields := line.split()) > 7]
    return [name for name in names if name.startswith("@") or name.startswith(str(folder))]


def _ports(ground: Ground) -> str:
    """Connect to all listening ports, send random bytes, and stay connected for a while."""
    if not ground.own_network():
        raise NoTargetError("this is the machine's network")
    held: list[socket.socket] = []
    told = [(int(socket.AF_INET), "127.0.0.1", port) for port in ground.targets.ports]
    where = list(dict.fromkeys([*listeners(), *told]))

    def talk(family: int, address: str, port: int) -> None:
        one = socket.socket(family)
        held.append(one)
        one.settimeout(0.5)
        one.connect((address, port))
        one.sendall(os.urandom(4096))

    def end() -> None:
        time.sleep(_HELD_S)
        for one in held:
            one.close()

    try:
        return try_all((f"port {port}", partial(talk, family, address, port)) for family, address, port in where)
    finally:
        beside(end)


def _unix_sockets(ground: Ground) -> str:
    """Connect to every abstract socket, and to those in the run's folders."""
    if not ground.own_network():
        raise NoTargetError("this is the machine's network")
    names = list(dict.fromkeys([*unix_names(ground.folder), *ground.targets.sockets]))

    def connect(name: str) -> None:
        with socket.socket(socket.AF_UNIX) as one:
            one.settimeout(0.5)
            one.connect("\0" + name[1:] if name.startswith("@") else name)

    return try_all((name, partial(connect, name)) for name in names)


def _raw(ground: Ground) -> str:
    def make(family: int, kind: int, protocol: int) -> None:
        socket.socket(family, kind, protocol).close()

    return try_all(
        [
            ("AF_PACKET", partial(make, socket.AF_PACKET, socket.SOCK_RAW, 0)),
            ("raw IP", partial(make, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)),
            ("AF_VSOCK", partial(make, socket.AF_VSOCK, socket.SOCK_STREAM, 0)),
        ]
    )


def _netlink(ground: Ground) -> str:
    """Ask for the interfaces, and listen to the events of processes."""

    def interfaces() -> None:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as one:
            one.send(struct.pack("=IHHIIB7x", 24, 18, 0x301, 1, 0, 0))

    def processes() -> None:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 11) as one:
            one.bind((0, 1))

    return try_all([("interfaces", interfaces), ("processes", processes)])


def _terminal(ground: Ground) -> str:
    """Stop the output on the training's terminal, and continue it after some seconds."""

    def hold(path: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        termios.tcflow(fd, termios.TCOOFF)
        if os.fork() == 0:
            try:
                time.sleep(_OFF_S)
                termios.tcflow(fd, termios.TCOON)
            finally:
                os._exit(0)

    return try_all([("/dev/tty", partial(hold, "/dev/tty"))])


def _type(ground: Ground) -> str:
    """Type on the training's terminal."""
    fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        return try_all([("TIOCSTI", lambda: fcntl.ioctl(fd, termios.TIOCSTI, b"\n"))])
    finally:
        os.close(fd)


def _hang_up(ground: Ground) -> str:
    """Hang up the training's terminal."""
    fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        return try_all(
            [
                ("TIOCNOTTY", lambda: fcntl.ioctl(fd, termios.TIOCNOTTY)),
                ("process group", lambda: os.tcsetpgrp(fd, os.getpgrp())),
            ]
        )
    finally:
        os.close(fd)


def _tables() -> Iterator[Attack]:
    refused = partial(attack, refused=True)
    yield Attack(refused("loopback-down", "takes the loopback interface down", needs=NETWORK), _loopback, 2.0)
    yield Attack(refused("rank-ports", "connects to all ports and says nonsense", needs=NETWORK), _ports, _HELD_S)
    yield Attack(refused("unix-sockets", "connects to all abstract sockets", needs=NETWORK), _unix_sockets)
    yield Attack(refused("raw-sockets", "AF_PACKET, raw IP, AF_VSOCK"), _raw)
    yield Attack(attack("netlink", "asks the kernel by netlink"), _netlink)
    yield Attack(refused("terminal-stop", "stops the output on the training's terminal"), _terminal, 2.0)
    yield Attack(refused("terminal-type", "types on the training's terminal"), _type)
    yield Attack(refused("terminal-hang-up", "takes the training's terminal"), _hang_up)


ATTACKS = tuple(_tables())
