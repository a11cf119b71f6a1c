"""Megatron's flags: what they say of the model and fix of its layout, and a layout as flags."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.fill.errors import ConfigError
from megatron.fill.wings.configure.known import check_name, check_value, is_neutral
from megatron.fill.wings.configure.rules import STAGES_FIRST, together_problem, whole_problem
from megatron.fill.wings.mainjob.model import Latent, ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Precision, Recompute

_SHARED = "--moe-shared-expert-intermediate-size"
_MODEL = {
    "--num-layers": "layers",
    "--hidden-size": "hidden",
    "--num-attention-heads": "heads",
    "--seq-length": "sequence",
    "--vocab-size": "vocabulary",
    "--ffn-hidden-size": "ffn_hidden",
    "--num-query-groups": "query_groups",
    "--num-experts": "experts",
    "--moe-router-topk": "experts_per_token",
    "--mtp-num-layers": "predicted",
    "--kv-channels": "channels",
    _SHARED: "shared_width",
}
_LATENT_FLAG = "--multi-latent-attention"
_LATENT = {  # of multi-latent attention, with Megatron's defaults
    "--q-lora-rank": ("query", 0),
    "--kv-lora-rank": ("keys", 32),
    "--qk-head-dim": ("head", 128),
    "--qk-pos-emb-head-dim": ("rotated", 64),
    "--v-head-dim": ("value", 128),
}
# For Megatron as if they were not given.
_NONE = [(flag, ["0"]) for flag in ("--num-experts", "--mtp-num-layers", "--lr-warmup-iters", "--lr-warmup-samples")]
_NEEDED = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--vocab-size")
_EXPERT_WIDTH, _PATTERN = "--moe-ffn-hidden-size", "--moe-layer-freq"
_POSITIONS = "--max-position-embeddings"
_NUMBERS = (
    _POSITIONS,
    "--global-batch-size",
    "--make-vocab-size-divisible-by",
    "--padded-vocab-size",
    _EXPERT_WIDTH,
    *_LATENT,
)
_LAYOUT = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep",
    "--micro-batch-size": "microbatch",
    "--num-virtual-stages-per-pipeline-rank": "chunks",
    "--num-layers-per-virtual-pipeline-stage": "chunk_layers",
    "--microbatch-group-size-per-virtual-pipeline-stage": "group_size",
    "--expert-tensor-parallel-size": "expert_tp",
}
_ENDS = {"--decoder-first-pipeline-num-layers": "first_layers", "--decoder-last-pipeline-num-layers": "last_layers"}
_FIELDS = {field: flag for flag, field in (_MODEL | _LAYOUT | _ENDS).items()}
_SWITCHES = {
    "--sequence-parallel": "sequence_parallel",
    "--use-distributed-optimizer": "distributed_optimizer",
    "--account-for-embedding-in-pipeline-split": "embedding_is_layer",
    "--account-for-loss-in-pipeline-split": "loss_is_layer",
}
_RECOMPUTE = ("--recompute-method", "--recompute-num-layers")  # a layout has its own
_UNTIMED = "--expert-tensor-parallel-size"  # weighed in memory and links, but not what such ranks gather
_MODULES = "--recompute-modules"
_WEIGHED = ("core_attn", "mlp", "moe", "shared_experts", "layernorm", "moe_act", "mla_up_proj")
_MOST_LAYERS = 10_000  # of a list by layer
_LAYOUT_TEXT = "--pipeline-model-parallel-layout"
_REPEATED = tuple(re.compile(rf"{its}\*([0-9]{{1,3}})(?![0-9])") for its in (r"\(([^)]+)\)", "(.)"))  # in this order
_LONGEST = 10_000  # letters of a layout
_MAIN_GRADIENTS = "--main-grads-dtype"
_SIZES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}  # bytes
_DIVISOR = 128  # Megatron's default of --make-vocab-size-divisible-by
# Tokenizers whose vocabulary is known without their files.
_VOCABULARIES = {
    "GPT2BPETokenizer": 50257,
    "Llama2Tokenizer": 32000,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
}


@dataclass(frozen=True, slots=True)
class Training:
    """A training as Megatron's flags describe it."""

    model: ModelSpec
    global_batch: int
    precision: Precision
    fixed: Mapping[str, Any]  # fields of ``Parallel`` that the flags already decide
    others: tuple[str, ...]  # all flags but those of the layout, as they were
    divisor: int = _DIVISOR  # multiple that the vocabulary is padded to, per tensor-parallel rank
    ignored: tuple[str, ...] = ()  # flags that change time or memory in ways that are not weighed

    @property
    def replicas_last(self) -> bool:
        """True if Megatron numbers ranks stage by stage inside each replica, not replica by replica inside a stage."""
        return STAGES_FIRST in self.others

    def padded(self, tp: int) -> int:
        """The vocabulary as Megatron pads it."""
        unit = self.divisor * tp
        return -(-self.model.vocabulary // unit) * unit


def read_flags(tokens: Sequence[str], ran: bool = False, own: Collection[str] = ()) -> Training:
    """Read a training from Megatron's flags.

    Args:
        ran: True if they are those of a training that ran: its script may have had flags of its own.
        own: options of the command that they are given to, which come before them.

    Raises:
        ConfigError: naming the flag, its value, and what was expected.
    """
    values: dict[str, int] = {}
    fixed: dict[str, Any] = {}
    others: list[str] = []
    given = pairs(tokens)
    block = (_RECOMPUTE[0], ["block"]) in given
    ignored: list[str] = []
    pattern = "1"
    later: int | None = None
    for flag, value in given:
        text = " ".join(value or ())
        if not ran:
            check_name(flag, own)
        if flag in _FIXED:
            name, read = _FIXED[flag]
            fixed[name] = read(flag, text)
            ignored += [flag] if flag == _UNTIMED else []
            continue
        if flag == _LAYOUT_TEXT:
            fixed["stage_layers"], later, later_stage = _stage_layers(text)
            if later_stage is not None:
                fixed["later_stage"] = later_stage
            continue
        if flag in _MODEL or flag in _NUMBERS:
            values[flag] = _number(flag, text)
        elif flag == _PATTERN:
            pattern = text
        elif flag == _RECOMPUTE[1] and block:
            fixed["recomputed"] = _number(flag, text, least=0)
        elif not is_neutral(flag, text):
            ignored.append(flag)
        if flag not in _RECOMPUTE:
            others += [flag] if value is None else [flag, *value]
    if not ran:
        for flag, value in given:
            check_value(flag, value)
    if block:
        _check_block(fixed)
    selective = fixed.get("recompute") is Recompute.SELECTIVE
    if selective and any(flag in _RECOMPUTE for flag, _ in given) and not ran:
        raise ConfigError(f"{' or '.join(_RECOMPUTE)} with selective recomputation: expected --recompute-modules alone")
    if "--padded-vocab-size" in values:
        padded, least = values["--padded-vocab-size"], values.get("--vocab-size", 1)
        if padded < least:
            raise ConfigError(f"--padded-vocab-size is {padded}: expected at least --vocab-size, {least}")
        values["--vocab-size"] = padded
    tokenizer = " ".join(dict(given).get("--tokenizer-type") or ())
    if tokenizer in _VOCABULARIES:
        values.setdefault("--vocab-size", _VOCABULARIES[tokenizer])
    for flag in (*_NEEDED, "--global-batch-size"):
        if flag not in values:
            unless = ", unless --tokenizer-type says how large it is" if flag == "--vocab-size" else ""
            raise ConfigError(
                f"{flag} is missing; expected Megatron's flags of the model and --global-batch-size{unless}"
            )
    names = {flag for flag, _ in given}
    if not ran and (problem := together_problem(given)):
        raise ConfigError(problem)
    fields = _shape(values, names, pattern)
    if "shared_width" in fields and "--disable-bias-linear" not in names:
        raise ConfigError(f"{_SHARED} without --disable-bias-linear: expected both, as shared experts have no biases")
    if "stage_layers" in fixed:
        _check_layout(fixed, fields["layers"])
        if later != fields.get("predicted", 0):
            raise ConfigError(f"{_LAYOUT_TEXT} has {later} m: expected --mtp-num-layers, {fields.get('predicted', 0)}")
    if "chunk_layers" in fixed:
        if not fixed.keys().isdisjoint(_ENDS.values()):
            raise ConfigError(
                f"--num-layers-per-virtual-pipeline-stage with {' or '.join(_ENDS)}: expected "
                "--num-virtual-stages-per-pipeline-rank in its place"
            )
        per_chunk = fixed.pop("chunk_layers")
        counted = counted_layers(fields["layers"], fixed)
        stages = fixed.setdefault("pp", 1) if per_chunk == counted else fixed.get("pp")
        if stages is None or counted % (stages * per_chunk):
            raise ConfigError(
                f"--num-layers-per-virtual-pipeline-stage is {per_chunk}: expected --pipeline-model-parallel-size with "
                "it, and both to divide --num-layers, with embedding and loss where they count as layers"
            )
        fixed["chunks"] = counted // (stages * per_chunk)
    try:
        model = ModelSpec(
            **fields,
            swiglu=not names.isdisjoint(("--swiglu", "--quick-geglu")),
            tied_embeddings="--untie-embeddings-and-output-weights" not in names,
        )
    except ValueError as error:
        raise ConfigError(f"the flags describe no model: {in_flags(str(error))}") from error
    precision = Precision.BF16 if "--bf16" in names else Precision.FP16 if "--fp16" in names else Precision.FP32
    if precision is Precision.BF16 and ("--grad-reduce-in-bf16" in names or (_MAIN_GRADIENTS, ["bf16"]) in given):
        precision = Precision.BF16_GRADIENTS
    if "--use-precision-aware-optimizer" in names:
        fixed["optimizer_bytes"] = _optimizer_bytes(given, precision)
    divisor = values.get("--make-vocab-size-divisible-by", _DIVISOR)
    return Training(
        model, values["--global-batch-size"], precision, fixed, tuple(others), divisor, tuple(dict.fromkeys(ignored))
    )


def _optimizer_bytes(given: Sequence[tuple[str, list[str] | None]], precision: Precision) -> int:
    """Return the bytes per parameter of a precision-aware optimizer's state (Megatron-core 0.19, ``OptimizerConfig``).

    Transformer Engine keeps a single-precision copy of bf16 weights as the 16 bits that those lack; with 8-bit recipes
    but delayed scaling, Megatron keeps all 32.
    """
    values = {flag: " ".join(value or ()) for flag, value in given}
    main, recipe = values.get("--main-params-dtype", "fp32"), values.get("--fp8-recipe", "delayed")
    if precision is Precision.FP32:
        weights = 0  # the model's own
    elif main == "fp16" or (precision is not Precision.FP16 and recipe == "delayed"):
        weights = 2
    else:
        weights = 4
    return weights + sum(_SIZES[values.get(flag, "fp32")] for flag in ("--exp-avg-dtype", "--exp-avg-sq-dtype"))


def counted_layers(layers: int, fixed: Mapping[str, Any]) -> int:
    """Return the layers that Megatron divides among the stages, with embedding and loss where they count as one.

    Args:
        fixed: as ``Training`` has it.
    """
    return layers + len({"embedding_is_layer", "loss_is_layer"} & fixed.keys())


def _shape(values: Mapping[str, int], names: Collection[str], pattern: str) -> dict[str, Any]:
    """Return the fields of ``ModelSpec`` that flags with numbers say, by Megatron's defaults where they say nothing.

    Args:
        names: all flags that are given.
        pattern: value of ``--moe-layer-freq``.
    """
    fields: dict[str, Any] = {name: values[flag] for flag, name in _MODEL.items() if flag in values}
    if "--group-query-attention" not in names:
        fields.pop("query_groups", None)  # as in Megatron
    else:
        fields.setdefault("query_groups", 1)  # Megatron's default
    if "experts" in fields:
        fields.setdefault("experts_per_token", min(2, fields["experts"]))  # Megatron's default
    if "--swiglu" in names and "ffn_hidden" not in fields:  # Megatron's default: as many parameters as without a gate
        fields["ffn_hidden"] = int(4 * fields["hidden"] * 2 / 3 / 64) * 64
    fields["dense_layers"] = _dense_layers(pattern, fields)
    if _EXPERT_WIDTH in values and "experts" in fields:
        fields["dense_ffn"] = fields.get("ffn_hidden", 4 * fields["hidden"]) if fields["dense_layers"] else 0
        fields["ffn_hidden"] = values[_EXPERT_WIDTH]
    if (most := values.get(_POSITIONS, fields["sequence"])) < fields["sequence"]:
        raise ConfigError(f"{_POSITIONS} is {most}: expected at least --seq-length, {fields['sequence']}")
    if _LATENT_FLAG in names:
        widths = {name: values.get(flag, default) for flag, (name, default) in _LATENT.items()}
        fields["latent"] = Latent(**widths)
        fields.pop("channels", None)  # not theirs
    if fields.get("channels", 0) * fields["heads"] == fields["hidden"]:
        del fields["channels"]
    return fields


def _dense_layers(pattern: str, fields: Mapping[str, Any]) -> int:
    """Return the number of first layers without experts that ``--moe-layer-freq`` says."""
    text = re.sub(r"[\s\"']", "", pattern)
    if "experts" not in fields or text.strip("()") == "1":
        return 0
    kinds = _by_layer(text)
    if kinds != sorted(kinds) or set(kinds) not in ({1}, {0, 1}) or len(kinds) != fields["layers"]:
        raise ConfigError(
            f"{_PATTERN} is {pattern[:60]!r}: expected 1, or layers without experts before all others as in "
            f"([0]*3+[1]*{max(1, fields['layers'] - 3)}), --num-layers in all"
        )
    return kinds.count(0)


def _by_layer(text: str) -> list[int]:
    """Return the values of a list of Python's, with sums and multiples, as Megatron evaluates it; empty if it is none.

    Megatron takes the same letters (``_eval_pattern`` of its ``arguments.py``).
    """

    def listed(node: ast.expr) -> list[int]:
        match node:
            case ast.List(elts):
                return [int(ast.unparse(one)) for one in elts]
            case ast.BinOp(left, ast.Add(), right):
                return listed(left) + listed(right)
            case ast.BinOp(part, ast.Mult(), ast.Constant(int(times))) | ast.BinOp(
                ast.Constant(int(times)), ast.Mult(), part
            ):
                if len(its := listed(part)) * times <= _MOST_LAYERS:
                    return its * times
        raise ValueError

    try:
        return listed(ast.parse(text, mode="eval").body) if re.fullmatch(r"[,\d\[\]()*+]{,10000}", text) else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _stage_layers(text: str) -> tuple[tuple[int, ...], int, int | None]:
    """Return the layers of each virtual stage, the number of ``m``, and their virtual stage, None for the last.

    ``|`` ends a stage, ``t`` is a layer, ``E`` the embedding, ``L`` the loss, and ``m`` before it predicts a later
    token; ``x*n`` and ``(...)*n`` repeat, commas are for the eye (Megatron-core 0.19,
    ``transformer/pipeline_parallel_layer_layout.py``).  Quotation marks around it are a shell's.
    """
    letters = text.strip("\"'").replace(",", "")
    for repeated in _REPEATED:
        if len(letters) <= _LONGEST:
            letters = repeated.sub(lambda its: its[1] * int(its[2]), letters)
    right = re.fullmatch(r"E[t|]*(m*)(\|*)L", letters)
    if right is None or len(letters) > _LONGEST:
        raise ConfigError(
            f"{_LAYOUT_TEXT} is {text[:60]!r}: expected E first, L last, t for each layer, | between stages and m in "
            "one of them, after all t, as in Ett|(tt|)*2ttL"
        )
    stages = letters.split("|")
    later_stage = len(stages) - 1 - len(right[2]) if right[1] and right[2] else None
    return tuple(stage.count("t") for stage in stages), letters.count("m"), later_stage


def _check_layout(fixed: dict[str, Any], layers: int) -> None:
    """Check a layout in letters against the other flags, and add the virtual stages per rank that it has."""
    counts = fixed["stage_layers"]
    stages = fixed.setdefault("pp", 1) if len(counts) == 1 else fixed.get("pp")
    if stages is None or len(counts) % stages:
        raise ConfigError(
            f"{_LAYOUT_TEXT} has {len(counts)} stages: expected --pipeline-model-parallel-size with it, and a multiple "
            "of that"
        )
    if (later_stage := fixed.get("later_stage", len(counts))) < len(counts) - stages:
        raise ConfigError(
            f"{_LAYOUT_TEXT} has m in stage {later_stage + 1} of {len(counts)}: expected it in a rank's last virtual "
            f"stage, one of the last {stages}"
        )
    if sum(counts) != layers:
        raise ConfigError(f"{_LAYOUT_TEXT} has {sum(counts)} layers: expected --num-layers, {layers}")
    dividing = {"chunks", "chunk_layers", "embedding_is_layer", "loss_is_layer", *_ENDS.values()} & fixed.keys()
    for flag, name in (_LAYOUT | _ENDS | _SWITCHES).items():
        if name in dividing:
            raise ConfigError(f"{_LAYOUT_TEXT} with {flag}, which divides the layers too: expected one of them")
    fixed["chunks"] = len(counts) // stages


def check_whole(training: Training, tokens: Sequence[str]) -> None:
    """Check flags that a layout needs, where no others are added.

    Raises:
        ConfigError: one that Megatron needs with the others is missing, or one is there that it refuses with them.
    """
    given = pairs(tokens)
    if problem := whole_problem(given, training.fixed.get("chunks", 1)):
        raise ConfigError(problem)
    names = {flag for flag, _ in given}
    for flag in _RECOMPUTE:
        if training.fixed.get("recompute") is Recompute.FULL and flag not in names:
            raise ConfigError(f"--recompute-granularity is full without {flag}; expected both")


def in_flags(problem: str) -> str:
    """Return what a model or a layout says of its fields with Megatron's flags for their names."""
    names = "|".join(_FIELDS)
    named = rf"\b({names})(?= is )|(?<=divisor of )({names})(?=,)|(?<=model's )({names})(?=,)"
    return re.sub(named, lambda its: _FIELDS[its[0]], problem)


def with_values(training: Training, text: str) -> str:
    """Return the flags that a text names, each with its value in a training; "" if none has one."""
    held = dict(pairs(training.others)) | {
        _FIELDS[its]: [str(size)] for its, size in training.fixed.items() if its in _FIELDS
    }
    named = dict.fromkeys(re.findall("--[a-z-]+", text))
    return ", ".join(f"{flag} {' '.join(held[flag] or ())}" for flag in named if held.get(flag))


def layout_flags(parallel: Parallel, predicted: int = 0) -> list[str]:
    """A layout as Megatron's flags; every other one of the training stays as it was.

    Args:
        predicted: number of layers that predict later tokens.
    """
    flags: list[str] = []
    for name in ("tp", "pp", "cp", "microbatch", "expert_tp", "group_size", "ep"):
        size = getattr(parallel, name)
        if size is not None and (name != "ep" or size > 1):
            flags += [_FIELDS[name], str(size)]
    if parallel.stage_layers is not None:
        stages = ["t" * count for count in parallel.stage_layers]
        stages[-1 if parallel.later_stage is None else parallel.later_stage] += "m" * predicted
        flags += [_LAYOUT_TEXT, f"E{'|'.join(stages)}L"]
    elif parallel.chunks > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(parallel.chunks)]
    for flag, name in _ENDS.items():
        if (count := getattr(parallel, name)) is not None:
            flags += [flag, str(count)]
    flags += [flag for flag, name in _SWITCHES.items() if getattr(parallel, name)]
    if parallel.recompute is not Recompute.NONE:
        flags += ["--recompute-granularity", parallel.recompute.value]
    if parallel.recompute is Recompute.SELECTIVE and parallel.recompute_modules != ("core_attn",):
        flags += [_MODULES, *parallel.recompute_modules]
    if parallel.recompute is Recompute.FULL:
        block = parallel.recomputed is not None
        flags += ["--recompute-method", "block" if block else "uniform"]
        flags += ["--recompute-num-layers", str(parallel.recomputed or 1)]
    return flags


def pairs(tokens: Sequence[str]) -> list[tuple[str, list[str] | None]]:
    """Return each flag with its values, None for a switch, without those that are as if they were not given.

    Raises:
        ConfigError: the first token is no flag.
    """
    found: list[tuple[str, list[str] | None]] = []
    for token in tokens:
        if token.startswith("--"):
            flag, equals, value = token.partition("=")
            found.append((flag, [value] if equals else None))
        elif not found:
            raise ConfigError(f"{token!r} belongs to no flag; expected Megatron's flags after --")
        else:
            flag, values = found[-1]
            found[-1] = flag, [*(values or ()), token]
    return [its for its in found if its not in _NONE]


def _number(flag: str, text: str, least: int = 1) -> int:
    if not (text.isdecimal() and text.isascii() and least <= int(text) < 1 << 31):
        raise ConfigError(f"{flag} is {text[:60]!r}: expected a whole number {'from 0' if least == 0 else 'above 0'}")
    return int(text)


def _check_block(fixed: dict[str, Any]) -> None:
    """Take ``--recompute-method block`` with the number of layers that it needs; with 0 nothing is computed again."""
    if "recomputed" not in fixed:
        raise ConfigError(f"{_RECOMPUTE[0]} is 'block' without {_RECOMPUTE[1]}; expected both")
    if fixed.get("recompute") is not Recompute.FULL:
        raise ConfigError(f"{_RECOMPUTE[0]} without --recompute-granularity full; expected both")
    if fixed["recomputed"] == 0:
        del fixed["recomputed"]
        fixed["recompute"] = Recompute.NONE


def _modules(flag: str, text: str) -> tuple[str, ...]:
    modules = re.findall(r"[^\s\[\],\"']+", text) or [""]
    for module in modules:
        if module not in _WEIGHED:
            known = ", ".join(_WEIGHED)
            raise ConfigError(f"{flag} has {module[:60]!r}: expected some of {known}; no other is weighed")
    return tuple(modules)


def _recompute(flag: str, text: str) -> Recompute:
    if text not in ("selective", "full"):
        raise ConfigError(f"{flag} is {text[:60]!r}: expected selective or full")
    return Recompute(text)


# Flags of a layout: the field of ``Parallel`` that each fixes, and the reader of its value.
_FIXED: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    **{flag: (name, _number) for flag, name in (_LAYOUT | _ENDS).items()},
    **{flag: (name, lambda flag, text: True) for flag, name in _SWITCHES.items()},
    _MODULES: ("recompute_modules", _modules),
    "--recompute-granularity": ("recompute", _recompute),
    "--recompute-activations": ("recompute", lambda flag, text: Recompute.SELECTIVE),
}
