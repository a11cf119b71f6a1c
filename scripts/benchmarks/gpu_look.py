"""What there is on a machine, before anything is measured on it: as JSON, and the same to read.

Nothing is changed and the GPU is not used.  What cannot be had is in the JSON with the reason.

    python scripts/benchmarks/gpu_look.py --json look.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import resource
import shutil
import stat
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
KERNEL_OPTIONS = {  # what walls, gates and measurements need
    *("USER_NS", "PID_NS", "IPC_NS", "NET_NS", "CGROUPS", "SECCOMP", "SECCOMP_FILTER", "SECURITY_LANDLOCK", "LSM"),
    *("MEMFD_CREATE", "FUTEX", "CHECKPOINT_RESTORE", "PROC_CHILDREN", "SCHED_INFO", "MODULES", "PREEMPT"),
}
LIMITS = ("MEMLOCK", "NOFILE", "NPROC", "RTPRIO", "RTTIME", "NICE", "AS", "STACK", "CORE")
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
        "libraries": driver_libraries(answered(["ldconfig", "-p"])),
        "library_path": os.environ.get("LD_LIBRARY_PATH", ""),
        "kernel_options": kernel_options(Path("/proc/config.gz")),
        "nodes": nodes(Path("/dev")),
        "limits": limits(),
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


def driver_libraries(listed: str) -> list[str]:
    """The driver's libraries of a list by ldconfig; its first line, or why there is no list, if they are not in it."""
    lines = [line.strip() for line in listed.splitlines()]
    return [line for line in lines if line.startswith(("libcuda.so", "libnvidia-ml.so"))] or lines[:1]


def kernel_options(path: Path) -> dict[str, str]:
    """The options of ``KERNEL_OPTIONS`` in the kernel's configuration; ``why`` where it cannot be read."""
    try:
        lines = gzip.decompress(path.read_bytes()).decode("utf-8", "replace").splitlines()
    except (OSError, EOFError) as error:
        return {"why": f"not there: {error}"}
    pairs = (line.removeprefix("CONFIG_").split("=", 1) for line in lines if "=" in line)
    return {name: value for name, value in pairs if name in KERNEL_OPTIONS}


def nodes(folder: Path) -> dict[str, str]:
    """The driver's device nodes, with mode, owner and number; those of MIG and of the fabric, too."""
    found: dict[str, str] = {}
    for path in sorted((*folder.glob("nvidia*"), *folder.glob("nvidia*/*"))):
        about = path.lstat()
        number = f" {os.major(about.st_rdev)},{os.minor(about.st_rdev)}" if about.st_rdev else ""
        found[str(path)] = f"{stat.filemode(about.st_mode)} {about.st_uid}:{about.st_gid}{number}"
    return found


def limits() -> dict[str, list[int]]:
    """The process's resource limits, soft and hard; -1 for none."""
    return {name: list(resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))) for name in LIMITS}


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
