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
    "display": {"types"},
    "hearsay": set(),
    "given": {"types", "errors", "hearsay"},
    "records": {"types", "errors"},
    "config": {"types", "errors", "given"},
    "hooks": {"types", "errors"},
    "gate": {"types", "errors", "futex", "shared"},
    "control": {"types", "errors", "futex", "hearsay", "shared"},
    "stream": {"types", "errors", "futex", "hooks", "shared"},
    "predictor": {"types", "errors", "rule"},
    "rule": set(),
    "profiles": {"types"},
    "board": {"types", "profiles", "shared"},
    "sidetask": {"types", "errors", "hearsay", "profiles"},
    "device": {"types", "errors", "futex", "shared"},
    # The package itself, for where it lies.
    "sandbox": {"types", "errors"},
    "planner": {"types", "errors", "given", "profiles"},
    "scheduler": {"types", "errors", "profiles", "planner"},
    "pipeline": {"types", "errors", "profiles"},
    # Of the runtime, the simulator takes what a worker decides by: the step loop and its estimator.
    "sim": {
        *("types", "errors", "given", "profiles", "config", "records", "gate", "predictor", "pipeline", "planner"),
        *("rule", "scheduler", "store", "report", "device", "runtime"),
    },
    "store": {"types", "errors", "config"},
    "client": {"types", "errors", "config", "given", "store"},
    "report": {"types", "errors", "records", "display"},
    "runtime": {
        *("types", "errors", "profiles", "records", "gate", "board", "futex", "sidetask", "device", "predictor"),
        *("control", "hearsay", "hooks", "planner", "rule", "scheduler", "shared", "store", "stream", "sandbox"),
    },
    "chaos": {"types", "errors", "records", "store", "sidetask", "config", "report", "control", "runtime"},
    # Nothing of a job is imported in it; it starts processes that do.
    "trial": {
        *("types", "errors", "config", "device", "display", "given", "hearsay", "records", "runtime", "sidetask"),
        "store",
    },
    "cli": {
        *("chaos", "control", "types", "errors", "profiles", "config", "store", "planner", "device", "runtime", "sim"),
        *("display", "given", "hearsay", "records", "report", "sandbox", "trial"),
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
    "sim.freeride.study",
    "sim.freeride.draw",
    "store.sql",
    "cli.app",
    "runtime.agent",
    "runtime.warden",
    "runtime.worker",
    "runtime.rank",
    "runtime.relay",
    "runtime.measure",
    "runtime.srun",
    "trial.run",
    "trial.printed",
    "app.checker",
    "app.standin",
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


# Runs inside the job's own process, or writes only: what a job does to these it does to itself.
WORKER_SIDE = {
    *("worker", "loop", "planned", "profiler", "checkpoint", "saver", "command", "measure", "safefile"),
}
READERS = {"read_text", "read_bytes", "open", "fdopen", "load", "loads", "from_json"}
# What agents, report and commands read that no job's folder holds: file -> calls.
OTHER_READS = {
    "app/checker.py": {"CheckSpec.from_json", "os.open"},  # of who starts the process; /dev/null
    "app/session.py": {"(agents / f'agent{self.info.rank}.log').open"},
    "app/standin.py": {"StandInSpec.from_json"},  # likewise
    "cli/options.py": {"path.open"},  # to write
    "cli/simulate.py": {"load"},
    "control.py": {"Path(f'/proc/{pid}/stat').read_text", "os.open"},
    "records/files.py": {"from_json", "os.open", "path.open"},
    "records/rank.py": {"os.open", "temporary.open"},
    "records/segment.py": {"os.open"},
    "runtime/agent.py": {"AgentSpec.from_json", "json.loads", "Path(spec_path).read_text"},
    "runtime/confined.py": {"json.loads"},  # of a worker's first process, which runs nothing of the job
    "runtime/enforcer.py": {"stat.read_text"},  # in /proc
    "runtime/folder.py": {"os.open"},  # folders themselves
    "runtime/output.py": {"os.fdopen"},  # to write
    "runtime/rank.py": {"self.gate.open"},
    "runtime/relay.py": {"RelaySpec.from_json", "json.loads", "log.open"},
    "runtime/spec.py": {"json.loads"},  # in the worker
    "runtime/srun.py": {"Path(f'/proc/{pid}/status').read_text"},
    "runtime/submitted.py": {"json.loads", "path.read_text"},  # in the run folder
    "runtime/warden.py": {"json.loads", "spec_path.read_text"},
    "trial/spec.py": {"json.loads"},  # of who starts the process
    "trial/train.py": {"log.open"},  # to write
}


def reads(path: Path) -> set[str]:
    """Every call in a file that reads bytes, as it is written."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.rpartition(".")[2] in READERS:
                found.add(name)
    return found


def outside(path: Path) -> bool:
    """Whether a file runs outside of a job's process, and reads what others wrote."""
    return room(path) in {"report", "cli", "control", "records", "app", "trial"} or (
        room(path) == "runtime" and path.stem not in WORKER_SIDE
    )


def test_what_a_job_can_write_is_read_through_one_door():
    found = {
        str(path.relative_to(FILL)): calls
        for path in sorted(FILL.rglob("*.py"))
        if outside(path) and (calls := reads(path) - {"hearsay.read_text"})
    }
    assert found == OTHER_READS
