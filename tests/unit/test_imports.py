"""Who may import whom: the rules of the house, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILL = ROOT / "megatron" / "fill"

# room -> the rooms of megatron.fill that it may import.  The app may import everything.
RULES: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "futex": set(),
    "shared": set(),
    "records": {"types", "errors"},
    "config": {"types", "errors"},
    "hooks": {"types", "errors"},
    "gate": {"types", "errors", "futex", "shared"},
    "control": {"types", "errors", "futex", "shared"},
    "stream": {"types", "errors", "futex", "hooks", "shared"},
    "predictor": {"types", "errors"},
    "profiles": {"types"},
    "board": {"types", "profiles", "shared"},
    "sidetask": {"types", "errors", "profiles"},
    "device": {"types", "errors"},
    # The package itself, for where it lies.
    "sandbox": {"types", "errors"},
    "planner": {"types", "errors", "profiles"},
    "scheduler": {"types", "errors", "profiles", "planner"},
    "pipeline": {"types", "errors", "profiles"},
    # Of the runtime, the simulator takes what a worker decides by: the step loop and its estimator.
    "sim": {
        *("types", "errors", "profiles", "config", "records", "gate", "predictor", "pipeline", "planner", "scheduler"),
        *("store", "report", "device", "runtime"),
    },
    "store": {"types", "errors", "config"},
    "report": {"types", "errors", "records"},
    "runtime": {
        *("types", "errors", "profiles", "records", "gate", "board", "futex", "sidetask", "device", "predictor"),
        *("control", "hooks", "planner", "scheduler", "shared", "store", "stream", "sandbox"),
    },
    "chaos": {"types", "errors", "records", "store", "sidetask", "config", "report", "control", "runtime"},
    "cli": {
        *(
            "chaos",
            "control",
            "types",
            "errors",
            "profiles",
            "config",
            "store",
            "planner",
            "device",
            "runtime",
            "sim",
            "sandbox",
        ),
    },
    "__init__": {"types", "errors", "sidetask"},
}
TORCH_FREE = [
    "types",
    "errors",
    "config",
    "hooks",
    "gate",
    "control",
    "predictor",
    "profiles",
    "board",
    "records",
    "report",
    "stream.listener",
    "stream.signals",
    "device",
    "device.cpu",
    "device.cuda",
    "sandbox.jail",
    "sandbox.probe",
    "device.doctor",
    "device.pressure",
    "device.probes",
    "sidetask",
    "sidetask.training",
    "sidetask.inference",
    "sidetask.embed",
    "planner.search",
    "planner.draw",
    "scheduler.policies",
    "pipeline.timeline",
    "sim.run",
    "sim.truth.replay",
    "sim.truth.recorded",
    "store.sql",
    "cli.app",
    "runtime.agent",
    "runtime.warden",
    "runtime.worker",
    "runtime.rank",
    "runtime.relay",
    "runtime.measure",
]


def imports(path: Path) -> set[str]:
    """Every module that a file imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return found


def room(path: Path) -> str:
    return path.relative_to(FILL).parts[0].removesuffix(".py")


FILES = sorted(path for path in FILL.rglob("*.py") if room(path) != "app")


def test_every_room_has_a_rule():
    assert {room(path) for path in FILES} == set(RULES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FILL)))
def test_a_room_imports_only_what_it_may(path):
    ours = {name.split(".")[2] for name in imports(path) if name.startswith("megatron.fill.")}
    known = {name for name in ours if name in RULES or name == "app"}
    assert known <= RULES[room(path)] | {room(path)}
    foreign = ("megatron.core", "megatron.training", "pipefill_patches")
    assert not any(name.startswith(foreign) for name in imports(path))


def test_patches_import_only_the_hooks_and_values():
    allowed = {"hooks", "types", "errors"}
    for path in (ROOT / "pipefill_patches").glob("*.py"):
        if path.name == "__main__.py":  # an entry point, which starts the app
            continue
        ours = {name.split(".")[2] for name in imports(path) if name.startswith("megatron.fill.")}
        assert {name for name in ours if name in RULES or name == "app"} <= allowed, path


def test_megatron_stays_a_namespace():
    assert not (ROOT / "megatron" / "__init__.py").exists()


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_free_modules_import_without_torch(module):
    code = f"import sys, megatron.fill.{module}; sys.exit('torch' in sys.modules or 'megatron.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
