"""Patches apply by explicit call, once, revertibly, and only to what they were tested with.

Each case runs in a process of its own: a patch changes modules for good, and the order of imports is what is tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import pipefill_patches
from pipefill_patches import ghost_stages
from pipefill_patches.patch import Target
from pipefill_patches.versions import TESTED
from tests.patches.fresh import python

ROOT = Path(__file__).resolve().parents[2]

STATE = """
    import importlib
    SEAMS = [
        ("megatron.core.pipeline_parallel.p2p_communication", "P2PCommunicator._communicate"),
        ("megatron.core.pipeline_parallel.schedules", "forward_backward_pipelining_without_interleaving"),
        ("megatron.core.pipeline_parallel.schedules", "forward_backward_pipelining_with_interleaving"),
        ("megatron.core.pipeline_parallel.schedules", "forward_step"),
        ("megatron.core.pipeline_parallel.schedules", "backward_step"),
        ("megatron.training.training", "train_step"),
        ("megatron.training.training", "evaluate"),
        ("megatron.training.training", "save_checkpoint_and_time"),
        ("megatron.training.training", "initialize_megatron"),
        ("megatron.training.arguments", "add_megatron_arguments"),
        ("megatron.training.arguments", "parse_args"),
        ("torch.distributed", "ProcessGroup.allreduce"),
        ("torch.distributed", "Work.wait"),
        ("torch.cuda", "graph.__exit__"),
    ]
    def state():
        found = []
        for module, dotted in SEAMS:
            value = importlib.import_module(module)
            for name in dotted.split("."):
                value = getattr(value, name)
            found.append(value)
        return found
    NAMES = ("arguments", "training_loop", "schedules", "p2p_communicator")
"""


def run(code: str, megatron: bool = False) -> str:
    """Run the code in a fresh interpreter, which may have imported Megatron; its output."""
    source = textwrap.dedent(STATE) + textwrap.dedent(code)
    done = python("-c", source, megatron=megatron)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_importing_the_package_changes_nothing():
    run("""
    import sys, pipefill_patches
    assert not any(name.startswith(("megatron.core", "megatron.training")) for name in sys.modules)
    assert not any(patch.applied for patch in pipefill_patches.PATCHES.values())
    """)


def test_applied_before_megatron_is_imported():
    run("""
    import pipefill_patches
    pipefill_patches.apply(NAMES)
    import megatron.training
    assert all(hasattr(value, "__wrapped__") for value in state())
    pipefill_patches.revert()
    assert not any("pipefill_patches" in value.__module__ for value in state())
    """)


def test_applied_after_megatron_is_imported():
    output = run(
        """
    import sys
    import megatron.training.training, pipefill_patches
    before = state()

    # applied, applied again, reverted, reverted again, applied once more
    pipefill_patches.apply(NAMES)
    after = state()
    assert all(a is not b for a, b in zip(before, after)), [s for s, a, b in zip(SEAMS, before, after) if a is b]
    pipefill_patches.apply(NAMES)
    assert all(a is b for a, b in zip(after, state())), "a second apply changed something"
    pipefill_patches.revert()
    assert all(a is b for a, b in zip(before, state()))
    pipefill_patches.revert()
    pipefill_patches.apply(NAMES)
    assert all(hasattr(value, "__wrapped__") for value in state())

    # GPipe replaces the schedule on top of that, and gives it back
    from megatron.core.pipeline_parallel import schedules
    bracketed = schedules.forward_backward_pipelining_without_interleaving
    pipefill_patches.apply(("gpipe",))
    assert schedules.forward_backward_pipelining_without_interleaving is not bracketed
    pipefill_patches.revert()
    assert all(a is b for a, b in zip(before, state()))

    # the flags are in Megatron's help
    pipefill_patches.apply(NAMES)
    from megatron.training.arguments import parse_args
    sys.argv = ["x", "--help"]
    try:
        parse_args()
    except SystemExit as stop:
        assert stop.code == 0

    # and a wrong one is told in a line, without Megatron's usage
    import contextlib, io
    for flag, said in ((["--fill-overrun", "much"], "argument --fill-overrun: invalid float value: 'much'"),
                       (["--fill-job", "a.yaml"], "did you mean --fill-jobs?")):
        sys.argv, told = ["x", *flag], io.StringIO()
        with contextlib.redirect_stderr(told), contextlib.suppress(SystemExit):
            parse_args()
        assert told.getvalue().count("\\n") == 1 and said in told.getvalue(), told.getvalue()
    """,
        megatron=True,
    )
    assert "--fill-jobs FILE" in output
    assert "--pipeline-model-parallel-size" in output


def test_the_signatures_decide_and_not_the_version():
    """Neither the number that the imported code gives itself nor what pip says of another copy keeps a patch away."""
    output = run(
        """
    import importlib.metadata, logging, sys
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    import megatron.core, pipefill_patches
    importlib.metadata.version = lambda package: "0.1.0"
    megatron.core.__version__ = "0.19.2"
    pipefill_patches.apply(("p2p_communicator",))
    print("TESTED", flush=True)
    pipefill_patches.revert()
    megatron.core.__version__ = "7.8.9+1234567"
    pipefill_patches.apply(("p2p_communicator", "training_loop"))
    assert pipefill_patches.PATCHES["training_loop"].applied
    pipefill_patches.revert()
    from megatron.training import training
    training.train_step = lambda surprise: None
    try:
        pipefill_patches.apply(("training_loop",))
    except pipefill_patches.PatchError as error:
        print(error)
    """,
        megatron=True,
    )
    quiet, warned = output.split("TESTED\n")
    assert "was tested" not in quiet
    warning, refusal = warned.strip().splitlines()
    assert f"tested with megatron-core{TESTED}, not with megatron-core 7.8.9 in /" in warning
    assert "patch 'training_loop' does not fit megatron-core 7.8.9 in /" in refusal
    assert "megatron.training.training:train_step takes (surprise); expected it to begin with (forward_step" in refusal


def test_a_copy_in_front_of_pips_is_the_one_that_is_judged(tmp_path):
    """As with a checkout of Megatron-LM on PYTHONPATH."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("__version__ = '0.5.0'\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pipefill_patches", "--check"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr[-3000:]
    assert f"tested with megatron-core{TESTED}, not with megatron-core 0.5.0 in {core}" in done.stderr
    assert "p2p_communicator: patch 'p2p_communicator' does not fit megatron-core 0.5.0" in done.stdout
    assert "P2PCommunicator._communicate cannot be found: No module named" in done.stdout


def test_every_patch_fits_what_is_installed():
    done = python("-m", "pipefill_patches", "--check", megatron=True)
    assert done.returncode == 0, done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines() if line.endswith(": fits")] == [
        f"{name}:" for name in pipefill_patches.PATCHES
    ]


def test_our_script_refuses_a_version_that_builds_models_in_another_way():
    said = run(
        f"""
    import sys
    sys.path.insert(0, {str(ROOT)!r})
    sys.stderr = sys.stdout
    sys.argv = ["pretrain_gpt.py"]
    from megatron.training import argument_utils
    vars(argument_utils).pop("gpt_config_from_args", None)  # as in 0.18
    import pretrain_gpt
    from megatron.fill.app.launch import launch
    try:
        launch(pretrain_gpt.main)
    except SystemExit as stop:
        print(stop.code)
    """,
        megatron=True,
    )
    line, code = said.splitlines()[-2:]
    assert line.startswith("pretrain_gpt.py: error: this script is written for megatron-core 0.19: cannot import name")
    assert "python -m pipefill_patches" in line
    assert code == "2"


def test_what_a_patch_changes_the_meaning_of_must_be_used():
    """GPipe gives 1F1B another communicator: where 1F1B did not ask for it, the training would silently be 1F1B."""
    target = Target("textwrap:dedent", ("text",), uses=("total_stages",))
    with pytest.raises(pipefill_patches.PatchError, match="textwrap:dedent does not use total_stages any more"):
        target.check()


def test_a_changed_signature_and_a_missing_function_are_refused():
    run(
        """
    import pipefill_patches
    from megatron.core.pipeline_parallel import p2p_communication
    upstream = p2p_communication.P2PCommunicator._communicate
    def _communicate(self, *, tensors): ...
    p2p_communication.P2PCommunicator._communicate = _communicate
    for expected in ("takes (self, tensors); expected it to begin with (self, tensor_send_next", "cannot be found"):
        try:
            pipefill_patches.apply(("p2p_communicator",))
        except pipefill_patches.PatchError as error:
            assert "p2p_communicator" in str(error) and expected in str(error), error
        else:
            raise AssertionError("a wrong signature was patched")
        if hasattr(p2p_communication.P2PCommunicator, "_communicate"):
            del p2p_communication.P2PCommunicator._communicate
    """,
        megatron=True,
    )


def test_an_unknown_patch_is_refused():
    with pytest.raises(pipefill_patches.PatchError, match="there is no patch 'nccl'; expected one of cpu_backend"):
        pipefill_patches.apply(("nccl",))


def test_a_patch_that_fails_half_way_takes_its_changes_back():
    run("""
    import types
    from pipefill_patches.patch import Patch, replace
    holder = types.SimpleNamespace(value=1)
    def install(stack):
        replace(stack, holder, "value", 2)
        replace(stack, holder, "extra", 3)
        raise RuntimeError("half way")
    patch = Patch("half", install)
    try:
        patch.apply()
    except RuntimeError:
        pass
    assert holder.__dict__ == {"value": 1} and not patch.applied
    """)


@pytest.mark.parametrize(
    "patch", [*pipefill_patches.PATCHES.values(), ghost_stages.PATCH], ids=lambda patch: patch.name
)
def test_upstream_has_the_signatures_that_the_patches_rely_on(patch):
    patch.check()


def test_a_patch_that_is_added_comes_before_the_one_that_it_names():
    run("""
    import pipefill_patches
    from pipefill_patches import ghost_stages
    before = list(pipefill_patches.PATCHES)
    pipefill_patches.add(ghost_stages.PATCH, before="arguments")
    at = before.index("arguments")
    assert list(pipefill_patches.PATCHES) == [*before[:at], "ghost_stages", *before[at:]]
    assert pipefill_patches.defaults(["--fill-cpu-backend"])[:2] == ("cpu_backend", "ghost_stages")
    """)


def test_a_training_imports_nothing_of_ghosts():
    run("""
    import sys
    import megatron.fill.app.launch
    assert not [name for name in sys.modules if "ghost" in name or name.startswith("megatron.fill.pipeline")]
    """)


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ([], 2, "usage: python -m pipefill_patches"),
        (["--help"], 0, "usage: python -m pipefill_patches"),
        (["nowhere.py"], 2, "no such script: nowhere.py"),
        (["--only", "nonsense", __file__], 2, "there is no patch 'nonsense'"),
    ],
)
def test_the_runner_says_what_is_wrong(arguments, code, expected):
    done = python("-m", "pipefill_patches", *arguments)
    assert done.returncode == code
    assert expected in done.stdout + done.stderr
