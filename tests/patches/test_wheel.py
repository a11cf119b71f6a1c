"""pip's wheel has no Makefile: Megatron must not look for it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

import pipefill_patches
from megatron.fill.errors import ConfigError

FUSED = ("transformer_engine", "transformer_engine.pytorch", "apex", "fused_weight_gradient_mlp_cuda")
SOFTMAX = "scaled_masked_softmax_cuda"
DEFAULTS = {
    "transformer_impl": ("transformer_engine", "local"),
    "apply_rope_fusion": (True, False),
    "no_persist_layer_norm": (False, True),
    "gradient_accumulation_fusion": (True, False),
    "masked_softmax_fusion": (True, False),
}


@pytest.fixture
def wheel() -> Iterator[None]:
    pipefill_patches.PATCHES["wheel"].apply()
    yield
    pipefill_patches.PATCHES["wheel"].revert()


def parsed(*arguments: str) -> dict[str, object]:
    from megatron.training import arguments as upstream

    found = vars(upstream.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(arguments))
    return {name: found[name] for name in DEFAULTS}


def have(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """These modules can be imported, and no other of those that the defaults need."""
    for name in (*FUSED, SOFTMAX):
        monkeypatch.setitem(sys.modules, name, ModuleType(name) if name in names else None)


def test_without_transformer_engine_and_apex_no_flag_is_needed(wheel, monkeypatch, capsys):
    have(monkeypatch)
    assert parsed() == {name: without for name, (_, without) in DEFAULTS.items()}
    (said,) = capsys.readouterr().out.splitlines()
    assert "no apex, " in said
    assert "--transformer-impl local --no-rope-fusion --no-persist-layer-norm" in said


def test_with_them_they_are_used(wheel, monkeypatch, capsys):
    have(monkeypatch, *FUSED, SOFTMAX)
    assert parsed() == {name: usual for name, (usual, _) in DEFAULTS.items()}
    assert capsys.readouterr().out == ""


def test_what_one_of_them_gives_is_used(wheel, monkeypatch):
    have(monkeypatch, "transformer_engine", "transformer_engine.pytorch")
    found = parsed()
    assert (found["transformer_impl"], found["apply_rope_fusion"]) == ("transformer_engine", True)
    assert (found["no_persist_layer_norm"], found["gradient_accumulation_fusion"]) == (True, False)


def test_a_flag_on_the_command_line_wins(wheel, monkeypatch):
    have(monkeypatch)
    assert parsed("--transformer-impl", "transformer_engine")["transformer_impl"] == "transformer_engine"


def test_checkpoints_of_torch_s_adam_can_be_loaded_as_on_the_cpu(wheel):
    from megatron.core.optimizer import distrib_optimizer

    wrapped = hasattr(distrib_optimizer.DistributedOptimizer.load_state_dict, "__wrapped__")
    assert wrapped is not distrib_optimizer.HAVE_APEX_OR_TE


def test_nothing_is_compiled_that_the_wheel_has(monkeypatch):
    from megatron.core.datasets import utils

    def run(*args: object, **kwargs: object) -> None:
        raise AssertionError("make was called")

    monkeypatch.setattr(subprocess, "run", run)
    original = utils.compile_helpers
    pipefill_patches.PATCHES["wheel"].apply()
    try:
        utils.compile_helpers()
    finally:
        pipefill_patches.PATCHES["wheel"].revert()
    assert utils.compile_helpers is original


def test_it_is_applied_where_the_cpu_backend_is_not(monkeypatch):
    from pipefill_patches import cpu_backend

    monkeypatch.delenv("PIPEFILL_CPU_BACKEND", raising=False)
    monkeypatch.setattr(cpu_backend, "needed", lambda: False)
    assert "wheel" in pipefill_patches.defaults([])
    assert "wheel" not in pipefill_patches.defaults(["--fill-cpu-backend"])


def test_a_variable_with_another_value_than_0_or_1_is_refused(monkeypatch):
    for variable in ("PIPEFILL_CPU_BACKEND", "PIPEFILL_HOST_P2P"):
        with monkeypatch.context() as here:
            here.setenv(variable, "true")
            with pytest.raises(ConfigError, match=f"{variable} is 'true' in the environment; expected 1"):
                pipefill_patches.defaults(["--fill-cpu-backend"])
