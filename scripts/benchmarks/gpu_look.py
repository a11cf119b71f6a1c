"""What there is on a machine, before anything is measured on it: as JSON, and the same to read.

Nothing is changed and the GPU is not used.  What cannot be had is in the JSON with the reason.

    python scripts/benchmarks/gpu_look.py --json look.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.fill.sandbox.landlock import landlock_abi

PROGRAMS = ("nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvcc", "gcc", "git")
ASKED = {
    "gpus": ["nvidia-smi", "--query-gpu=name,uuid,driver_version,memory.total,compute_mode", "--format=csv,noheader"],
    "clocks": ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu", "--format=csv,noheader"],
    "slices": ["nvidia-smi", "compute-policy", "--list"],
}
FILES = {"kernel_modules": "/sys/kernel/security/lsm", "driver": "/proc/driver/nvidia/version"}


def look() -> dict[str, object]:
    """All of it."""
    shm = shutil.disk_usage("/dev/shm")
    return {
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "shm_gib": round(shm.total / 2**30, 1),
        "landlock_abi": landlock_abi(),
        "user": os.getuid(),
        "programs": {name: shutil.which(name) for name in PROGRAMS},
        "packages": {one.name: one.version for one in sorted(distributions(), key=lambda one: one.name.lower())},
        **{name: answered(command) for name, command in ASKED.items()},
        **{name: read(Path(path)) for name, path in FILES.items()},
    }


def answered(command: list[str]) -> str:
    """What a command prints, or why it does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not there: {error}"
    return (
        (done.stdout + done.stderr).strip() if not done.returncode else f"failed: {(done.stdout + done.stderr)[:300]}"
    )


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        return f"not there: {error.strerror}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write it here")
    options = parser.parse_args()
    found = look()
    text = json.dumps(found, indent=2)
    if options.json is not None:
        try:
            options.json.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            parser.error(f"argument --json: {options.json}: {error.strerror}; expected a file that can be written")
    print(text)


if __name__ == "__main__":
    main()
