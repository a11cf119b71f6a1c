"""Starts the ranks of a training as torchrun does, each in a session of its own, without importing torch itself.

    python launch.py RANKS PYTHON_ARGUMENTS...

When a rank fails the others are ended, and its exit code is returned.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time


def main() -> int:
    ranks = int(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    running = [
        subprocess.Popen(
            [sys.executable, "-u", *sys.argv[2:]],
            env=os.environ | shared | {"LOCAL_WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,
        )
        for rank in range(ranks)
    ]
    while running:
        for process in running:
            if process.poll() is not None:
                running.remove(process)
                if process.returncode:
                    for other in running:
                        other.terminate()
                    return process.returncode
                break
        time.sleep(0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main())
