"""Who may import whom: the rules of the house, read from the source."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILL = ROOT / "megatron" / "fill"

# room -> the rooms of megatron.fill that it may import, from the bottom up.
RULES: dict[str, set[str]] = {
    # Values, and what knows no other part.
    "status": set(),
    "types": {"status"},
    "errors": set(),
    "lazy": set(),
    "folders": set(),
    "untrusted": set(),
    "models": set(),
    "profiles": {"types"},
    "work": set(),
    "display": {"types"},
    "console": {"display"},
    "account": set(),
    "hooks": {"account", "types"},
    "attached": {"errors", "types"},
    "spec": set(),
    "launcher": set(),
    # The machine.
    "linux": set(),
    "pages": {"errors", "folders", "linux", "profiles", "types", "untrusted"},
    "sandbox": {"errors", "folders", "linux", "spec"},
    "device": {"display", "errors", "linux"},
    # What users give, what jobs are, and where they wait.
    "given": {"errors", "types", "untrusted", "work"},
    "config": {"errors", "given"},
    "store": {"errors", "spec", "status", "types", "work"},
    "client": {"errors", "given", "store", "types"},
    "sidetask": {"errors", "linux", "models", "profiles", "untrusted"},
    # What is decided.
    "pipeline": {"errors", "given", "profiles", "types"},
    "planner": {"display", "errors", "given", "profiles", "types"},
    "scheduler": {"errors"},
    # What runs: a rank with its relay, an agent, its workers.
    "records": {"account", "errors", "folders", "linux", "spec", "types"},
    "rank": {"device", "errors", "linux", "pages", "profiles", "records", "spec", "types"},
    "worker": {
        *("device", "display", "errors", "folders", "linux", "pages", "planner", "profiles", "sandbox", "sidetask"),
        *("spec", "status", "types", "untrusted", "work"),
    },
    "agent": {
        *("device", "display", "errors", "folders", "linux", "pages", "planner", "profiles", "records"),
        *("sandbox", "scheduler", "sidetask", "spec", "status", "store", "types", "untrusted", "work", "worker"),
    },
    # What is seen of it, and tried out.
    "report": {"account", "display", "errors", "linux", "records", "status", "types"},
    # All that a training runs, put together.
    "app": {
        *("agent", "attached", "config", "device", "display", "errors", "folders", "given", "hooks", "launcher"),
        *("linux", "pages", "planner", "rank", "records", "report", "sandbox", "scheduler", "store", "types"),
        *("untrusted", "work"),
    },
    # What only commands need.  They import nothing of a job; processes that they start do.
    "trial": {
        *("agent", "app", "config", "console", "device", "display", "errors", "folders", "given", "hooks", "linux"),
        *("profiles", "records", "sandbox", "sidetask", "spec", "status", "store", "types", "untrusted", "work"),
        "worker",
    },
    "cli": {
        *("agent", "console", "device", "display", "errors", "folders", "given", "linux", "pages", "pipeline"),
        *("planner", "profiles", "records", "report", "sandbox", "store", "trial", "types", "untrusted"),
    },
    "__init__": {"errors", "hooks", "lazy", "sidetask", "types"},
}
# wing -> the other wings that it may import, from the bottom up.  A wing may import all of the core but the app.
WINGS: dict[str, set[str]] = {
    "mainjob": set(),
    "llm": set(),
    "operate": set(),
    "graph": {"mainjob"},
    "sim": {"mainjob"},
    "configure": {"mainjob", "sim"},
}
TORCH_FREE = [
    "status",
    "types",
    "errors",
    "config",
    "attached",
    "hooks",
    "pages.gate",
    "pages.control",
    "rank.predictor",
    "profiles",
    "models",
    "pages.board",
    "records.live",
    "report",
    "rank.stream",
    "rank.signals",
    "device",
    "device.cpu",
    "device.cuda",
    "sandbox.process",
    "sandbox.probe",
    "device.doctor",
    "device.probes",
    "sidetask",
    "sidetask.training",
    "sidetask.inference",
    "planner.search",
    "planner.draw",
    "scheduler.policies",
    "pipeline.ghosts",
    "pipeline.timeline",
    "wings.graph.baselines",
    "wings.graph.draw",
    "wings.graph.export",
    "wings.graph.files",
    "wings.graph.printed",
    "wings.sim.report",
    "wings.sim.run",
    "wings.sim.recorded.busy",
    "wings.configure.choose",
    "wings.configure.pays",
    "wings.configure.correction",
    "wings.configure.peaks",
    "store.sql",
    "cli.app",
    "wings.configure.commands.network",
    "wings.configure.network",
    "wings.configure.measure",
    "wings.configure.drift",
    "wings.configure.draw",
    "agent.agent",
    "agent.warden",
    "worker.worker",
    "rank.listener",
    "rank.relay",
    "rank.spec",
    "trial.measure",
    "rank.srun",
    "wings.llm.speccheck",
    "wings.llm",
    "wings.llm.batch",
    "wings.llm.evaluate",
    "wings.llm.commands.batch",
    "wings.llm.commands.evaluate",
    "trial.run",
    "trial.printed",
    "trial.checker",
    "trial.standin",
]


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return frozenset(found)


def room(path: Path) -> str:
    return path.relative_to(FILL).parts[0].removesuffix(".py")


def wing(path: Path) -> str:
    return path.relative_to(FILL / "wings").parts[0].removesuffix(".py")


FILES = sorted(path for path in FILL.rglob("*.py") if room(path) != "wings")
OF_WINGS = sorted((FILL / "wings").glob("*/**/*.py"))


def test_every_room_has_a_rule():
    assert {room(path) for path in FILES} == set(RULES)


def test_no_arrow_goes_back_up():
    rooms = list(RULES)
    for index, (name, may) in enumerate(RULES.items()):
        assert may <= set(rooms[:index]), f"{name} imports what is above it, or what is no room"


def test_the_rules_allow_nothing_that_nobody_needs():
    used: dict[str, set[str]] = {name: set() for name in RULES}
    for path in FILES:
        used[room(path)] |= {name.split(".")[2] for name in imports(path) if name.startswith("megatron.fill.")}
    assert {name: used[name] & set(RULES) - {name} for name in RULES} == RULES


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FILL)))
def test_a_room_imports_only_what_it_may(path):
    ours = {name.split(".")[2] for name in imports(path) if name.startswith("megatron.fill.")}
    assert ours & set(RULES) <= RULES[room(path)] | {room(path)}
    foreign = ("megatron.core", "megatron.training", "pipefill_patches")
    assert room(path) == "app" or not any(name.startswith(foreign) for name in imports(path))


def test_every_wing_has_a_rule_and_uses_what_it_may():
    used: dict[str, set[str]] = {wing(path): set() for path in OF_WINGS}
    for path in OF_WINGS:
        names = {name for name in imports(path) if name.startswith("megatron.fill.")}
        used[wing(path)] |= {name.split(".")[3] for name in names if name.startswith("megatron.fill.wings.")}
    assert {name: others - {name} for name, others in used.items()} == WINGS


def test_no_wing_uses_one_above_it():
    for index, (name, may) in enumerate(WINGS.items()):
        assert may <= set(list(WINGS)[:index]), name


def test_a_training_needs_no_command_and_no_page():
    for path in [*FILL.glob("app/*.py"), FILL / "report" / "__init__.py", *ROOT.glob("pipefill_patches/*.py")]:
        foreign = ("megatron.fill.cli", "megatron.fill.report.page")
        assert not any(name.startswith(foreign) for name in imports(path)), path


def test_the_core_knows_no_wing():
    for path in [*(path for path in FILL.rglob("*.py") if room(path) != "wings"), *ROOT.glob("pipefill_patches/*.py")]:
        assert not any(name.startswith("megatron.fill.wings.") for name in imports(path)), path
        assert not any(f"wings.{name}" in path.read_text(encoding="utf-8") for name in WINGS), path


@pytest.mark.parametrize("path", OF_WINGS, ids=lambda path: str(path.relative_to(FILL)))
def test_only_the_trainings_of_graphs_know_megatron(path):
    if path.parent == FILL / "wings" / "graph" / "running":
        return
    foreign = ("megatron.core", "megatron.training", "megatron.fill.app", "pipefill_patches")
    assert not any(name.startswith(foreign) for name in imports(path))


def test_patches_import_only_the_hooks_schedules_settings_and_values():
    allowed = {"account", "attached", "config", "given", "hooks", "launcher", "types", "errors", "pipeline"}
    for path in (ROOT / "pipefill_patches").glob("*.py"):
        if path.name == "__main__.py":  # an entry point, which starts the app
            continue
        ours = {name.split(".")[2] for name in imports(path) if name.startswith("megatron.fill.")}
        assert ours & set(RULES) <= allowed, path


def test_the_product_imports_nothing_of_its_tests():
    for path in [*FILL.rglob("*.py"), *(ROOT / "pipefill_patches").glob("*.py"), ROOT / "pretrain_gpt.py"]:
        assert not any(name.split(".")[0] == "tests" for name in imports(path)), path


def test_megatron_stays_a_namespace():
    assert not (ROOT / "megatron" / "__init__.py").exists()


# One process imports them all, until the first that brings in what none of them may.
IMPORT_ALL = """
import importlib, sys

unwanted = set(sys.argv[1].split(","))
for module in sys.argv[2:]:
    importlib.import_module(f"megatron.fill.{module}")
    if found := unwanted & set(sys.modules):
        sys.exit(f"{module} imports {found}")
"""


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (TORCH_FREE, "torch,megatron.core"),
        # What starts on the training's cores.
        (["agent.agent", "worker.worker", "worker.nodes", "rank.relay"], "pydantic,rich,typer,yaml"),
    ],
    ids=["torch-free", "on the training's cores"],
)
def test_no_library_is_imported_that_is_not_needed(modules, unwanted):
    command = [sys.executable, "-c", IMPORT_ALL, unwanted, *modules]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# Runs inside the job's own process, or writes only: what a job does to these it does to itself.
WORKER_SIDE = {"worker", "loop", "nodes", "profiler", "checkpoint", "saver", "command", "driven"}
READERS = {"read_text", "read_bytes", "open", "fdopen", "load", "loads", "from_json"}
# What agents, report and commands read that no job's folder holds: file -> calls.
OTHER_READS = {
    "app/runlock.py": {"os.open"},
    "app/session.py": {"(agents / f'agent{self.info.rank}.log').open"},
    # To write, and to count what this process has just written there; the user's own, twice.
    "wings/llm/commands/batch.py": {
        "copied.open",
        "output.open",
        "requests.read_bytes",
        "Path(args['requests']).read_bytes",
    },
    "wings/configure/commands/configure.py": {"Correction.load"},  # the user's own
    "wings/configure/commands/network.py": {"Network.load"},  # the user's own
    "cli/options.py": {"path.open"},  # to write
    "cli/leftovers.py": {"os.open"},  # to lock
    "wings/sim/commands.py": {"load"},
    "app/freeing.py": {"_BOOT.read_text"},  # the kernel's
    "pages/find.py": {"os.open"},  # a page, through /proc
    "pages/ready.py": {"os.open"},  # a rank's own, which it names to the others
    "wings/operate/serve.py": {
        "MetricsSpec.from_json",
        "Path(path).read_bytes",
    },  # of its agent; the operator's
    "report/page.py": {"files(__package__).joinpath('page.html').read_text"},  # installed with it
    "pages/moving.py": {"os.open"},  # likewise
    "records/files.py": {"from_json", "os.open", "path.open"},
    "records/live.py": {"self._path.open"},  # of ranks and agents
    "records/rank.py": {"os.open", "temporary.open"},
    "records/segment.py": {"os.open"},
    "records/unwritten.py": {"json.loads", "open"},  # of another rank; to write
    "agent/agent.py": {"AgentSpec.from_json", "Path(spec_path).read_text"},
    "worker/spec.py": {"cls.from_json"},  # of a worker's first process, which runs nothing of the job
    "agent/folder.py": {"os.open", "os.fdopen"},  # folders themselves; to write
    "rank/listener.py": {"self.gate.open"},
    "rank/relay.py": {"RelaySpec.from_json", "log.open"},
    "rank/srun.py": {"Path(f'/proc/{pid}/status').read_text"},
    "agent/claims.py": {"json.loads", "path.read_text"},  # in the run folder
    "wings/operate/jobmapping.py": {"os.open", "path.read_text"},  # of the site, which other users' jobs do not see
    "agent/keeper.py": {"AgentSpec.from_json", "Path(spec_path).read_text"},
    "agent/turn.py": {"os.open"},  # to lock
    "agent/warden.py": {"json.loads", "spec_path.read_text"},
    "trial/checker.py": {"CheckSpec.from_json", "os.open"},  # of who starts the process; /dev/null
    "trial/measure.py": {"MeasureSpec.from_json", "Path(sys.argv[1]).read_text"},  # likewise
    "trial/standin.py": {"StandInSpec.from_json"},  # likewise
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
    return (
        "commands" in (path.stem, path.parent.name)
        or path.parent.name == "operate"
        or room(path) in {"report", "cli", "pages", "records", "app", "trial", "agent", "rank"}
        or (room(path) == "worker" and path.stem not in WORKER_SIDE)
    )


def test_what_a_job_can_write_is_read_through_one_door():
    found = {
        str(path.relative_to(FILL)): calls
        for path in sorted(FILL.rglob("*.py"))
        if outside(path) and (calls := reads(path) - {"untrusted.read_text", "untrusted.open_plain"})
    }
    assert found == OTHER_READS
