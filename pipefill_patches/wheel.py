"""Megatron on CUDA from pip's wheel, with or without Transformer Engine and Apex.

The wheel ships the compiled dataset helper, but not the Makefile that Megatron runs at its start.  And the parser's
defaults require Transformer Engine and Apex: without them no model can be built unless several flags are given.

The CPU backend contains the same changes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch

from megatron.fill.errors import PatchError
from pipefill_patches import arguments
from pipefill_patches.patch import Call, Patch, Target, around

# The module that a parser's default needs, the dest, its default without the module, and the equivalent flag.
_NEEDS: tuple[tuple[str, str, Any, str], ...] = (
    ("transformer_engine.pytorch", "transformer_impl", "local", "--transformer-impl local"),
    ("transformer_engine.pytorch", "apply_rope_fusion", False, "--no-rope-fusion"),
    ("apex", "no_persist_layer_norm", True, "--no-persist-layer-norm"),
    ("fused_weight_gradient_mlp_cuda", "gradient_accumulation_fusion", False, "--no-gradient-accumulation-fusion"),
    ("scaled_masked_softmax_cuda", "masked_softmax_fusion", False, "--no-masked-softmax-fusion"),
)
COMPILE = Target("megatron.core.datasets.utils:compile_helpers", ())


def set_defaults(parser: argparse.ArgumentParser, defaults: dict[str, Any], patch: Patch) -> dict[str, argparse.Action]:
    """Change defaults of Megatron's parser, and return its actions by dest; PatchError if it lacks one."""
    actions = {action.dest: action for action in parser._actions}
    missing = sorted(defaults.keys() - actions.keys())
    if missing:
        raise PatchError(f"patch {patch.name!r}: Megatron's parser has no {', '.join(missing)}")
    parser.set_defaults(**defaults)
    return actions


def _can_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # a broken library counts as missing
        return False
    return True


def _with_what_there_is(add: Call, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Change the defaults that need missing modules; flags override them."""
    parser = add(parser)
    lacks = {name for name in dict.fromkeys(need for need, *_ in _NEEDS) if not _can_import(name)}
    chosen = [(dest, value, flag) for need, dest, value, flag in _NEEDS if need in lacks]
    set_defaults(parser, {dest: value for dest, value, _ in chosen}, PATCH)
    if chosen and os.environ.get("RANK", "0") == "0":
        flags = " ".join(flag for *_, flag in chosen)
        print(f"PipeFill: no {', '.join(sorted(lacks))} here, so Megatron's defaults are {flags}", flush=True)
    return parser


def unless_shipped(compile_helpers: Callable[[], None]) -> None:
    """Compile the dataset helper unless it is installed, as from the wheel."""
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        compile_helpers()


def resumable_adam(stack: contextlib.ExitStack) -> None:
    """Fix loading of the distributed optimizer when it wraps torch's own Adam, as it does without Apex and TE.

    Upstream then reads the step of a new Adam without state, copies into parameters that require gradients, reads a
    step per parameter from a checkpoint with one for all, and gives all parameters the same step tensor, which Adam
    increments once for each of them.
    """
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as Optimizer

    if HAVE_APEX_OR_TE:
        return

    def with_states(
        sharded: Call, this: Any, /, model: Any = MappingProxyType({}), is_loading: bool = False, **kwargs: Any
    ) -> Any:
        if is_loading and not this.optimizer.state:
            this._init_optimizer_states_with_dummy_values()
        return sharded(this, model, is_loading, **kwargs)

    def with_own_steps(load: Call, this: Any, state_dict: Any) -> None:
        load(this, state_dict)
        for state in this.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    def without_grad(set_states: Call, this: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        with torch.no_grad():
            set_states(this, model_param, {**tensors, "step": None})

    around(stack, Optimizer, "sharded_state_dict", with_states)
    around(stack, Optimizer, "load_state_dict", with_own_steps)
    around(stack, Optimizer, "_set_main_param_and_optimizer_states", without_grad)


def _install(stack: contextlib.ExitStack) -> None:
    around(stack, *COMPILE.resolve(), unless_shipped)
    around(stack, *arguments.ADD.resolve(), _with_what_there_is)
    resumable_adam(stack)


PATCH = Patch("wheel", _install, (COMPILE, arguments.ADD))
