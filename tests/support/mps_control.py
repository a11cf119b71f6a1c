"""A pretended ``nvidia-cuda-mps-control``: plays a daemon, and logs what it is told.

A file ``clients`` in the folder of its pipes lists the processes that use it; ``terminate_client`` takes one out.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

SERVER = 4321
PIPE = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", ""))
LOG = Path(os.environ.get("CUDA_MPS_LOG_DIRECTORY", ""))
PID = PIPE / "nvidia-cuda-mps-control.pid"
CLIENTS = PIPE / "clients"


def install(folder: Path) -> Path:
    """Put it into ``folder`` as an executable; its path."""
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(f"#!{sys.executable} -I\n{Path(__file__).read_text(encoding='utf-8')}", encoding="utf-8")
    program.chmod(0o755)
    return program


def start() -> None:
    if os.fork():
        while not PID.exists():
            time.sleep(0.005)
        return
    os.setsid()
    for fd in (0, 1, 2):
        os.close(fd)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    part = PID.with_suffix(".part")
    part.write_text(str(os.getpid()))
    part.rename(PID)
    time.sleep(60)
    os._exit(0)


def alive() -> bool:
    try:
        return b"nvidia-cuda-mps-control" in Path(f"/proc/{int(PID.read_text())}/cmdline").read_bytes()
    except (OSError, ValueError):
        return False


def obey(command: str) -> None:
    words = command.split()
    clients = CLIENTS.read_text().split() if CLIENTS.exists() else []
    if words[0] == "get_server_list":
        print(SERVER)
    elif words[0] == "get_client_list":
        print("\n".join(clients))
    elif words[0] == "terminate_client":
        CLIENTS.write_text("\n".join(client for client in clients if client != words[2]))
    elif words[0] == "quit":
        os.kill(int(PID.read_text()), signal.SIGTERM)
        PID.unlink()


def main() -> int:
    with (LOG / "commands.log").open("a") as log:
        if sys.argv[1:] == ["-d"]:
            log.write(f"start {os.environ.get('CUDA_VISIBLE_DEVICES')}\n")
            start()
            return 0
        if not alive():
            print("Cannot find MPS control daemon process")
            return 1
        for command in sys.stdin:
            log.write(command)
            obey(command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
