"""What scripts/gpu_day.sh keeps: a JSON file of one part, written anew after each of its steps, and the table of it.

    python scripts/benchmarks/gpu_day.py begin FILE --part look --device cpu
    python scripts/benchmarks/gpu_day.py note FILE --step micro --command CMD --code 0 \\
        --seconds 12 --limit 150 --log LOG --found F
    python scripts/benchmarks/gpu_day.py table FILE

``device`` prints ``cuda`` where there is a GPU, and ``cpu`` where the machine has no NVIDIA driver; it fails where a
driver cannot be asked.  ``logs`` packs what is needed to find out why a step failed into one file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.fill.linux.files import write_text
from scripts.benchmarks.day_figures import figures

_TIMED_OUT = (124, 137)
_DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/nvidia0"))
_RECORDS = {"records", "agents", "control"}
_MOST_BYTES = 4 << 20
_TAIL = 6  # lines of the log of a step that failed


def begin(path: Path, part: str, device: str) -> None:
    content = {
        "part": part,
        "device": device,
        "rehearsal": device == "cpu",  # nothing in it is a figure of a GPU
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "steps": [],
    }
    _write(path, content)


def note(path: Path, options: argparse.Namespace) -> str:
    """Add a step; how it went."""
    content = json.loads(path.read_text(encoding="utf-8"))
    found = _found(options.found)
    lines = _lines(options.log)
    step = {
        "step": options.step,
        "command": options.command,
        "result": result(options.code, found),
        "code": options.code,
        "seconds": options.seconds,
        "limit_s": options.limit,
        "said": lines[-1][:300] if lines else "",
        "found": found,
    }
    if options.code:
        step["end_of_log"] = lines[-_TAIL:]
    content["steps"].append(step)
    _write(path, content)
    return str(step["result"])


def result(code: int | None, found: dict[str, Any]) -> str:
    """How a step went, by its exit code (None: there was no time for it) and by what it wrote."""
    if code is None:
        return "left out"
    if code in _TIMED_OUT:
        return "timed out"
    if code:
        return f"failed: {code}"
    return "not run" if "not_run" in found else "ran"


def table(path: Path) -> None:
    """Print what ran, what failed, and the figures, in 80 columns."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    content = json.loads(path.read_text(encoding="utf-8"))
    console = Console(width=80, highlight=False)
    if content["rehearsal"]:
        console.print("REHEARSAL on the CPU: no figure below is one of a GPU")
    rows = Table("STEP", "RESULT", "S", "FIGURES", box=None, pad_edge=False)
    for step in content["steps"]:
        told = figures(step["step"], step["found"]) if step["found"] else []
        told = told or [step["found"].get("not_run", step["said"])]
        rows.add_row(step["step"], step["result"], str(step["seconds"]), Text("\n".join(told), overflow="fold"))
    console.print(rows)
    ran = sum(step["result"] in ("ran", "not run") for step in content["steps"])
    console.print(f"{content['part']}: {ran} of {len(content['steps'])} steps ended well; {path.name} has all of it")


def device() -> str:
    from megatron.fill.device.nvml import Nvml
    from megatron.fill.device.port import DeviceError

    try:
        if Nvml().gpus():
            return "cuda"
    except DeviceError as error:
        if any(path.exists() for path in _DRIVER):
            sys.exit(f"gpu_day: there is a driver ({error}); expected a GPU, or --device cpu for a rehearsal")
    return "cpu"


def logs(folder: Path, packed: Path) -> None:
    """Pack logs, records and reports of all steps, without checkpoints, stores and what is larger than a few MiB."""
    with tarfile.open(packed, "w:gz") as archive:
        for path in sorted(folder.rglob("*")):
            wanted = path.suffix in (".log", ".json", ".jsonl", ".txt", ".yaml") or _RECORDS & set(path.parts)
            if wanted and path.is_file() and not path.is_symlink() and path.stat().st_size <= _MOST_BYTES:
                archive.add(path, path.relative_to(folder))


def _found(path: Path) -> dict[str, Any]:
    """What the step wrote; a step that was ended in the middle may have left nothing, or half of it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {"content": found}


def _lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _write(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="do", required=True)
    commands.add_parser("device")
    packing = commands.add_parser("logs")
    packing.add_argument("folder", type=Path)
    packing.add_argument("file", type=Path)
    for name in ("begin", "note", "table"):
        commands.add_parser(name).add_argument("file", type=Path)
    commands.choices["begin"].add_argument("--part", required=True)
    commands.choices["begin"].add_argument("--device", choices=("cpu", "cuda"), required=True)
    noted = commands.choices["note"]
    noted.add_argument("--step", required=True)
    noted.add_argument("--command", required=True)
    noted.add_argument("--code", type=int, help="left out where there was no time for the step")
    noted.add_argument("--seconds", type=int, default=0)
    noted.add_argument("--limit", type=int, required=True)
    noted.add_argument("--log", type=Path, required=True)
    noted.add_argument("--found", type=Path, required=True)
    options = parser.parse_args()
    if options.do == "device":
        print(device())
    elif options.do == "logs":
        logs(options.folder, options.file)
    elif options.do == "begin":
        begin(options.file, options.part, options.device)
    elif options.do == "note":
        print(note(options.file, options))
    else:
        table(options.file)


if __name__ == "__main__":
    main()
