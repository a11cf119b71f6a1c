"""The effect of Megatron's flags on costs and memory: none, not weighed, or so large that a training is refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from math import isnan

from megatron.fill.errors import ConfigError

# Refused: the figures would be those of another training.
_REFUSED = {
    "--moe-latent-size": "experts of another width than the hidden size",
    "--decoder-num-layers": "an encoder with a decoder (T5)",
    "--decoder-seq-length": "an encoder with a decoder (T5)",
    "--img-h": "a model of images",
    "--perform-rl-step": "reinforcement learning",
    "--fp4-format": "FP4",
    "--use-torch-fsdp2": "FSDP",
    "--use-megatron-fsdp": "FSDP",
    "--experimental-attention-variant": "another attention",
    "--window-size": "sliding-window attention",
    "--hybrid-layer-pattern": "layers of several kinds",
    "--hybrid-override-pattern": "layers of several kinds",
    "--is-hybrid-model": "layers of several kinds",
    "--heterogeneous-layers-config-path": "layers of several kinds",
    "--heterogeneous-layers-config-encoded-json": "layers of several kinds",
    "--optimizer-cpu-offload": "an optimizer on the CPU",
    "--cpu-offloading-num-layers": "activations on the CPU",
    "--fine-grained-activation-offloading": "activations on the CPU",
    "--rampup-batch-size": "a batch that grows",
    "--step-batch-size-schedule": "a batch that grows",
    "--yaml-cfg": "a file in the place of flags",
}
_NEUTRAL = re.compile(
    "--(?:"
    # the model, its numbers and its precision, as far as they are counted
    "bf16|fp16|grad-reduce-in-bf16|use-precision-aware-optimizer|(?:main-grads|main-params|exp-avg|exp-avg-sq)-dtype|"
    "swiglu|quick-geglu|normalization|apply-layernorm-1p|"
    "untie-embeddings-and-output-weights|position-embedding-type|no-position-embedding|use-rotary-position-embeddings|"
    "transformer-impl|attention-backend|use-flash-attn|deterministic-mode|no-create-attention-mask-in-dataloader|"
    "defer-embedding-wgrad-compute|wgrad-deferral-limit|cross-entropy-loss-fusion|cross-entropy-fusion-impl|"
    "attention-softmax-in-fp32|no-masked-softmax-fusion|no-gradient-accumulation-fusion|moe-grouped-gemm|"
    "cuda-graph-(?:impl|modules|scope|warmup-steps)|moe-flex-dispatcher-backend|"
    "overlap-grad-reduce|overlap-param-gather|tp-comm-overlap|overlap-moe-expert-parallel-comm|"
    "use-tp-pp-dp-mapping|"
    "bert-no-binary-head|max-position-embeddings|hidden-dropout|attention-dropout|group-query-attention|disable-bias-linear|"
    "make-vocab-size-divisible-by|padded-vocab-size|norm-epsilon|rotary-.*|rope-.*|use-rope-scaling|init-method-.*|"
    # data and tokenizers
    "(?:train-|valid-|test-)?data-path|data-cache-path|(?:data|per-split-data)-args-path|mock-data|split|dataloader-.*|"
    "num-workers|num-dataset-builder-threads|fim-.*|trust-remote-code|no-mmap-bin-files|tokenizer-.*|vocab-file|merge-file|tiktoken-.*|"
    "null-tokenizer-.*|"
    # learning
    "lr|lr-.*|min-lr|decoupled-.*|(?:start-|end-)?weight-decay.*|adam-.*|clip-grad|seed|finetune|override-.*|"
    "train-iters|train-samples|eval-.*|data-parallel-random-init|calculate-per-token-loss|"
    "(?:initial-|min-)?loss-scale.*|hysteresis|"
    "multi-latent-attention|fp8-.*|mtp-loss-scaling-factor|mscale|mscale-all-dim|"
    "moe-aux-loss-coeff|moe-z-loss-coeff|moe-router-load-balancing-type|moe-router-(?:pre-softmax|score-function)|"
    "moe-router-(?:topk-scaling-factor|enable-expert-bias|bias-update-rate)|use-mup|mup-.*|"
    # checkpoints, logs and the process
    "save|save-.*|load|load-.*|no-(?:save|load)-.*|ckpt-.*|no-ckpt-fully-parallel-save|use-persistent-ckpt-worker|"
    "dist-ckpt-.*|async-.*|non-persistent-.*|use-checkpoint-.*|"
    "auto-detect-ckpt-format|pretrained-checkpoint|log-.*|tensorboard-.*|wandb-.*|.*one-logger.*|timing-log-.*|"
    "profile|profile-(?:step-start|step-end|ranks)|straggler-minmax-count|verify-integrity|"
    "logging-level|app-tag-.*|exit-.*|distributed-(?:backend|timeout-.*)|local-rank|use-cpu-initialization|"
    "use-mcore-models|manual-gc.*|rerun-mode|check-for-.*|no-check-for-nan-in-loss-and-grad|disable-msc|disable-gloo-process-groups|"
    "enable-experimental|error-injection-.*|test-mode|te-rng-tracker|"
    "fill-.*)"
)


def is_neutral(flag: str, value: str | None) -> bool:
    """Return True if the figures hold with a flag, False if they hold but for what it changes.

    Raises:
        ConfigError: they would be those of another training.
    """
    if flag in _REFUSED:
        raise ConfigError(f"{flag}: {_REFUSED[flag]} is not weighed; expected it to be left out")
    if flag == "--optimizer" and value != "adam":
        raise ConfigError(f"{flag} is {(value or '')[:60]!r}: expected adam, whose memory alone is counted")
    if flag == "--recompute-method" and value not in ("uniform", "block"):
        raise ConfigError(f"{flag} is {(value or '')[:60]!r}: expected uniform or block")
    if flag == "--spec":
        return value == "local"
    if flag == "--moe-token-dispatcher-type":
        return value in ("alltoall", "flex")
    if flag == "--recompute-num-layers":
        return value == "1"
    return flag in ("--optimizer", "--recompute-method") or _NEUTRAL.fullmatch(flag) is not None


def check_name(flag: str, own: Collection[str] = ()) -> None:
    """Check that Megatron or PipeFill has a flag.

    Args:
        own: options of the command that the flags are given to.

    Raises:
        ConfigError: neither has; the message names the nearest that one has.
    """
    if flag in _names() or flag.startswith("--fill-"):
        return
    if flag in own:
        raise ConfigError(f"{flag} comes after --, where Megatron's flags are; expected it before --")
    near = get_close_matches(flag, _names(), 1)
    raise ConfigError(f"{flag[:60]} is no flag of Megatron; expected {near[0] if near else 'one that it has'}")


def check_value(flag: str, values: Sequence[str] | None) -> None:
    """Check that Megatron's parser takes the values that a flag is given.

    Args:
        values: None if there are none.

    Raises:
        ConfigError: it does not; the message says what it takes.
    """
    kind, several = _names().get(flag, ("str", "*"))
    given = values or ()
    there = f"{flag} is {' '.join(given)[:60]!r}" if values else f"{flag} has no value"
    if not kind:
        if values:
            raise ConfigError(f"{there}: expected no value")
        return
    enough = several == "*" or len(given) == 1 or (several == "+" and len(given) > 1)
    if not (enough and all(_is_one(kind, value) for value in given)):
        expected = _KINDS.get(kind) or f"one of {kind.replace('|', ', ')}"
        raise ConfigError(f"{there}: expected {expected}{', or several' if several else ''}")


_KINDS = {"int": "a whole number", "float": "a number", "str": "one value"}


def _is_one(kind: str, value: str) -> bool:
    """Return True if a value is of this kind; what is not a number is none, though Python's ``float`` reads it."""
    if kind not in _KINDS:
        return value in kind.split("|")
    if kind == "str":
        return True
    try:
        return not isnan(int(value) if kind == "int" else float(value))
    except ValueError:
        return False


@cache
def _names() -> dict[str, tuple[str, str]]:
    """Return Megatron's flags, each with the kind of its values and whether it takes several (``+``, ``*``)."""
    lines = files(__package__).joinpath("megatron_flags.txt").read_text(encoding="utf-8").splitlines()
    return {name: (kind, several) for name, kind, several in ((*line.split(" "), "", "")[:3] for line in lines)}
