"""Flags that ``pipefill configure`` and ``pays`` refuse together are those that Megatron refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest
from packaging.version import Version

from tests.support.memory_truth import Asked, answers
from tests.wings.configure.test_rules import CASES, IN_A_PASS, MODEL, STARTED, mended

# Asked for each line of flags on stdin, in a process that is forked after the imports: on a machine with Transformer
# Engine and Hopper GPUs, as far as Megatron's checks see.
ASK = """
import argparse, contextlib, io, json, os, sys, types
import torch
import megatron.core.tokenizers.text  # slow, and needed by each
import megatron.core.utils as utils
import megatron.training.arguments as arguments
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from packaging.version import Version

torch.cuda.get_device_capability = lambda *_: (9, 0)
arguments.get_device_arch_version = lambda: 9
arguments.is_te_min_version = lambda *_, **__: True
utils._te_version = Version("2.14.0")
utils.get_te_version = lambda: utils._te_version
engine = types.ModuleType("transformer_engine.pytorch.optimizers")
engine.FusedAdam = lambda master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype, use_decoupled_grad: None
sys.modules[engine.__name__] = engine
out = os.dup(1)
os.dup2(2, 1)
parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))  # half a second each
arguments.add_megatron_arguments = lambda _: parser

for line in sys.stdin:
    if os.fork() == 0:
        said = ""
        sys.argv = ["pretrain_gpt.py", *line.split()]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
            try:
                args = arguments.parse_and_validate_args(args_defaults={})
                pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
            except BaseException as error:
                said = f"{type(error).__name__}: {error} {errors.getvalue()[-300:]}"
        os.write(out, (json.dumps(said) + "\\n").encode())
        os._exit(0)
    os.wait()
"""
RUN = (
    "--mock-data --tokenizer-type NullTokenizer --lr 1e-4 --lr-decay-style constant --train-iters 10 "
    "--transformer-impl transformer_engine --no-rope-fusion --no-persist-layer-norm --rerun-mode disabled"
)


@pytest.mark.timeout(1200)  # a process for each line, on a busy machine
@pytest.mark.skipif(Version(megatron.core.__version__) < Version("0.19"), reason="the rules are those of the newest")
def test_megatron_refuses_what_is_refused_and_takes_what_is_mended():
    ignored = (  # what Megatron does not look at, or not beside the flags of RUN
        "--num-query-groups 2",
        "--fp8-output-proj",
        "--fp8-param-gather --use",
        "--train-samples",
    )
    cases = [one for one in CASES if one not in IN_A_PASS and not any(its in one[0] for its in ignored)]
    refused = [f"{MODEL} {RUN} {flags}" for flags, _ in cases]
    taken = [f"{MODEL} {RUN} {flags}" for flags in (*(mended(*one) for one in cases), *(its for its, _ in STARTED))]
    lines = refused + taken
    here = os.environ | {"RANK": "0", "WORLD_SIZE": "8", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    answered = subprocess.run(
        [sys.executable, "-c", ASK],
        input="\n".join(lines) + "\n",
        env=here,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    said = [json.loads(line) for line in answered.stdout.splitlines()]
    assert len(said) == len(lines)
    assert [line for line, refusal in zip(refused, said, strict=False) if not refusal] == []
    assert [one for one in zip(taken, said[len(refused) :], strict=True) if one[1]] == []


def test_megatron_does_not_run_local_experts_with_biases():
    local = "--transformer-impl local --no-persist-layer-norm --no-rope-fusion --no-gradient-accumulation-fusion"
    flags = f"{MODEL} {local} --num-experts 8 --no-bias-gelu-fusion".split()
    (said,) = answers([Asked((*flags,), 0, 8)])
    assert "is being modified inplace" in str(said)
