"""Settings in Megatron's flags beside the sizes of layers: dropout, positions, BERT's heads and kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from megatron.fill.wings.mainjob.kernels import Kernels, Overlaps
from megatron.fill.wings.mainjob.model import ModelSpec

_MOST_HEAD = 256  # channels of a head that flash attention takes


def detailed(model: ModelSpec, flags: Sequence[str]) -> ModelSpec:
    """The model with its position embeddings, dropout and heads, by Megatron's defaults where flags say nothing.

    One with a tokenizer of BERT's is a BERT.
    """
    kind = _value(flags, "--position-embedding-type") or "learned_absolute"
    if "--use-rotary-position-embeddings" in flags:
        kind = "rope"
    positions = 0
    if kind == "learned_absolute":
        given = _value(flags, "--max-position-embeddings") or ""
        positions = int(given) if given.isdecimal() and given.isascii() else model.sequence
    bert = (_value(flags, "--tokenizer-type") or "").startswith("BertWordPiece")
    return replace(
        model,
        positions=positions,
        hidden_dropout=_is_some(_value(flags, "--hidden-dropout")),
        attention_dropout=_is_some(_value(flags, "--attention-dropout")),
        word_head=bert,
        pair_head=bert and "--bert-no-binary-head" not in flags,
        kernels=_kernels(model, flags),
    )


def _kernels(model: ModelSpec, flags: Sequence[str]) -> Kernels:
    """The kernels that flags choose, by Megatron's defaults where they say nothing.

    Local layers have unfused attention, whatever backend is asked for.  Transformer Engine takes flash attention, its
    own library's or cuDNN's, for 16-bit numbers and heads of up to 256 channels, with or without dropout.
    """
    impl = _value(flags, "--transformer-impl") or "transformer_engine"
    engine = impl != "local" and _value(flags, "--spec") != "local"
    backend = _value(flags, "--attention-backend") or "auto"
    half = "--bf16" in flags or "--fp16" in flags
    flash = engine and half and backend not in ("unfused", "local") and model.head <= _MOST_HEAD
    deterministic = "--deterministic-mode" in flags
    deferred: int | None = 0
    if "--defer-embedding-wgrad-compute" in flags:
        given = _value(flags, "--wgrad-deferral-limit") or "0"
        deferred = int(given) or None if given.isdecimal() and given.isascii() else None
    fp8 = engine and _value(flags, "--fp8-format") is not None
    fused_loss = "--cross-entropy-loss-fusion" in flags
    engine_loss = fused_loss and _value(flags, "--cross-entropy-fusion-impl") == "te"
    return Kernels(
        transformer_engine=engine,
        flash=flash,
        fused_softmax="--no-masked-softmax-fusion" not in flags,
        turned=flash and backend != "fused" and model.latent is None,  # its heads are of two widths: cuDNN's
        masked="--no-create-attention-mask-in-dataloader" not in flags,
        fused_loss=fused_loss and not engine_loss,
        engine_loss=engine_loss,
        accumulated=engine and "--no-gradient-accumulation-fusion" not in flags,
        deferred=deferred,
        deterministic=deterministic,
        fp8_weights="--fp8-param-gather" in flags,
        fp8=fp8,
        fp8_per_tensor=fp8 and (_value(flags, "--fp8-recipe") or "delayed") in ("delayed", "tensorwise"),
        grouped="--moe-grouped-gemm" in flags,
        dispatcher=_dispatcher(flags),
        graphs=_graphs(flags),
        undecided=flash and deterministic and backend == "auto",
        overlaps=Overlaps(
            tensor=engine and "--tp-comm-overlap" in flags,
            gradients="--overlap-grad-reduce" in flags,
            weights="--overlap-param-gather" in flags,
            experts="--overlap-moe-expert-parallel-comm" in flags,
        ),
    )


def _dispatcher(flags: Sequence[str]) -> str:
    """Sender of tokens to their experts, by its name in ``Kernels``; Megatron's default backend is DeepEP."""
    flex = _value(flags, "--moe-token-dispatcher-type") == "flex"
    return (_value(flags, "--moe-flex-dispatcher-backend") or "deepep") if flex else ""


def _graphs(flags: Sequence[str]) -> tuple[str, ...]:
    """Parts that CUDA graphs launch, by their names in ``Kernels``; without modules, they launch whole layers."""
    impl = _value(flags, "--cuda-graph-impl") or "none"
    modules = _values(flags, "--cuda-graph-modules") or _values(flags, "--cuda-graph-scope")
    if impl == "full_iteration" or "full_iteration" in modules:
        return ("iteration",)
    if impl not in ("local", "transformer_engine"):
        return ()
    return tuple(modules) if modules and modules != ["full"] else ("layer",)


def _values(flags: Sequence[str], name: str) -> list[str]:
    """Values of the last flag of a name."""
    found: list[str] = []
    for at, flag in enumerate(flags):
        head, equals, tail = flag.partition("=")
        if head == name:
            found = [tail] if equals else list(takewhile(lambda one: not one.startswith("--"), flags[at + 1 :]))
    return found


def _value(flags: Sequence[str], name: str) -> str | None:
    """Value of the last flag of a name, the first if it has several; None without one."""
    return next(iter(_values(flags, name)), None)


def _is_some(dropout: str | None) -> bool:
    try:
        return dropout is None or float(dropout) != 0
    except ValueError:
        return True  # Megatron will say what is wrong with it
