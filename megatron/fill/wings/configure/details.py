"""Settings in Megatron's flags beside the sizes of layers: dropout, positions, BERT's heads and kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron.fill.wings.configure.flags import pairs
from megatron.fill.wings.mainjob.kernels import Kernels, Overlaps
from megatron.fill.wings.mainjob.model import ModelSpec

_MOST_HEAD = 256  # channels of a head that flash attention takes
_SINGLE = "--attention-softmax-in-fp32", "--apply-query-key-layer-scaling"  # the latter brings the former

type Given = Mapping[str, list[str] | None]  # values of each flag


def detailed(model: ModelSpec, flags: Sequence[str]) -> ModelSpec:
    """The model with its position embeddings, dropout and heads, by Megatron's defaults where flags say nothing.

    One with a tokenizer of BERT's is a BERT.
    """
    given = dict(pairs(flags))
    kind = _value(given, "--position-embedding-type") or "learned_absolute"
    if "--use-rotary-position-embeddings" in given:
        kind = "rope"
    positions = 0
    if kind == "learned_absolute":
        most = _value(given, "--max-position-embeddings") or ""
        positions = int(most) if most.isdecimal() and most.isascii() else model.sequence
    bert = (_value(given, "--tokenizer-type") or "").startswith("BertWordPiece")
    return replace(
        model,
        positions=positions,
        hidden_dropout=_is_some(_value(given, "--hidden-dropout")),
        attention_dropout=_is_some(_value(given, "--attention-dropout")),
        word_head=bert,
        pair_head=bert and "--bert-no-binary-head" not in given,
        kernels=_kernels(model, given),
    )


def _kernels(model: ModelSpec, given: Given) -> Kernels:
    """The kernels that flags choose, by Megatron's defaults where they say nothing.

    Local layers have unfused attention, whatever backend is asked for.  Transformer Engine takes flash attention, its
    own library's or cuDNN's, for 16-bit numbers and heads of up to 256 channels, with or without dropout.
    """
    impl = _value(given, "--transformer-impl") or "transformer_engine"
    engine = impl != "local" and _value(given, "--spec") != "local"
    backend = _value(given, "--attention-backend") or "auto"
    half = "--bf16" in given or "--fp16" in given
    flash = engine and half and backend not in ("unfused", "local") and model.head <= _MOST_HEAD
    deterministic = "--deterministic-mode" in given
    deferred: int | None = 0
    if "--defer-embedding-wgrad-compute" in given:
        limit = _value(given, "--wgrad-deferral-limit") or "0"
        deferred = int(limit) or None if limit.isdecimal() and limit.isascii() else None
    fp8 = engine and _value(given, "--fp8-format") is not None
    recipe = _value(given, "--fp8-recipe") or "delayed"
    fused_loss = "--cross-entropy-loss-fusion" in given
    unfused = ["--no-bias-swiglu-fusion"]
    if "--quick-geglu" in given:  # which is fused together with a bias alone
        unfused = ["--no-bias-gelu-fusion", "--disable-bias-linear"]
    engine_loss = fused_loss and _value(given, "--cross-entropy-fusion-impl") == "te"
    return Kernels(
        transformer_engine=engine,
        flash=flash,
        fused_softmax=engine or "--no-masked-softmax-fusion" not in given,
        wide_softmax=not engine and "--no-masked-softmax-fusion" in given and not given.keys().isdisjoint(_SINGLE),
        fused_gate=given.keys().isdisjoint(unfused),
        turned=flash and backend != "fused" and model.latent is None,  # its heads are of two widths: cuDNN's
        masked="--no-create-attention-mask-in-dataloader" not in given,
        fused_loss=fused_loss and not engine_loss,
        engine_loss=engine_loss,
        accumulated=engine and "--no-gradient-accumulation-fusion" not in given,
        deferred=deferred,
        deterministic=deterministic,
        fp8_weights="--fp8-param-gather" in given,
        fp8=fp8,
        fp8_output=fp8 and recipe == "mxfp8" and "--fp8-output-proj" in given,
        fp8_per_tensor=fp8 and recipe in ("delayed", "tensorwise"),
        grouped="--moe-grouped-gemm" in given,
        dispatcher=_dispatcher(given),
        graphs=_graphs(given),
        undecided=flash and deterministic and backend == "auto",
        overlaps=Overlaps(
            tensor=engine and "--tp-comm-overlap" in given,
            gradients="--overlap-grad-reduce" in given,
            weights="--overlap-param-gather" in given,
            experts="--overlap-moe-expert-parallel-comm" in given,
        ),
    )


def _dispatcher(given: Given) -> str:
    """Sender of tokens to their experts, by its name in ``Kernels``; Megatron's default backend is DeepEP."""
    flex = _value(given, "--moe-token-dispatcher-type") == "flex"
    return (_value(given, "--moe-flex-dispatcher-backend") or "deepep") if flex else ""


def _graphs(given: Given) -> tuple[str, ...]:
    """Parts that CUDA graphs launch, by their names in ``Kernels``; without modules, they launch whole layers."""
    impl = _value(given, "--cuda-graph-impl") or "none"
    modules = given.get("--cuda-graph-modules") or given.get("--cuda-graph-scope") or []
    if impl == "full_iteration" or "full_iteration" in modules:
        return ("iteration",)
    if impl not in ("local", "transformer_engine"):
        return ()
    return tuple(modules) if modules and modules != ["full"] else ("layer",)


def _value(given: Given, name: str) -> str | None:
    """Value of a flag, the first if it has several; None without one."""
    values = given.get(name)
    return values[0] if values else None


def _is_some(dropout: str | None) -> bool:
    try:
        return dropout is None or float(dropout) != 0
    except ValueError:
        return True  # Megatron will say what is wrong with it
