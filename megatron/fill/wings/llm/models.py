"""Language models and their adapters from local folders.  Nothing is fetched from a network."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron.fill.errors import TaskError
from megatron.fill.wings.llm.attention import attention_kinds, context_of
from megatron.fill.wings.llm.tokenizers import BYTES, ByteTokenizer, FolderTokenizer, Tokenizer

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_ADAPTER = "adapter_config.json"


def load_language_model(path: Path, dtype: str = "auto") -> tuple[Any, Tokenizer]:
    """A causal language model in host memory, in evaluation mode, and its tokenizer.

    Args:
        path: a folder that ``transformers`` can load, or one of Megatron's checkpoints (the newest is taken).
        dtype: type of the weights: ``auto`` for that of the files, or ``float32``, ``bfloat16``, ``float16``.

    Raises:
        ValueError: ``dtype`` is unknown.
        TaskError: there is no such model, or a package is missing, or the model cannot be run in pieces.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(_DTYPES)}")
    try:
        import greenlet  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise TaskError(f"{error}: language models need pip install 'pipefill[models]'") from error
    from megatron.fill.wings.llm.megatron import is_checkpoint

    closed = [file.name for file in path.glob("*") if not os.access(file, os.R_OK)]
    if closed:  # transformers would say that they are not there
        raise TaskError(f"model {path}: this user may not read {', '.join(sorted(closed)[:3])}")
    if is_checkpoint(path):
        model, tokenizer = _from_megatron(path, dtype)
    elif (path / "config.json").is_file():
        model, tokenizer = _from_transformers(path, dtype)
    else:
        raise TaskError(f"model is {path}: expected a folder as transformers saves it, or of Megatron's checkpoints")
    context_of(model)
    attention_kinds(model)
    return model.eval(), tokenizer


def merge_adapter(model: Any, path: Path) -> Any:
    """The model with a LoRA adapter's changes in its own weights: so it costs nothing where the model runs.

    Args:
        path: the adapter's folder, as ``peft`` saves it.

    Raises:
        TaskError: it is no adapter of this model, it lacks tensors, or a package is missing.
    """
    if not (path / _ADAPTER).is_file():
        raise TaskError(f"adapter is {path}: expected a folder with {_ADAPTER}, as peft saves it")
    if not os.access(path / _ADAPTER, os.R_OK):
        raise TaskError(f"adapter {path}: this user may not read {_ADAPTER}")
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise TaskError(f"{error}: adapters need pip install 'pipefill[lora]'") from error
    try:
        config = PeftConfig.from_pretrained(str(path))
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA":
            raise TaskError(f"adapter {path} is of the kind {kind}: expected LORA")
        config.inference_mode = True
        adapted = PeftModel(model, config)
        # What an adapter lacks would be left as if it had been trained to nothing, and what the model lacks left out.
        found = adapted.load_adapter(str(path), "default", torch_device="cpu")
        for names, where in ((found.missing_keys, "its files lack"), (found.unexpected_keys, "the model lacks")):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise TaskError(f"adapter {path} does not fit the model: {where} {', '.join(sorted(names)[:3])}{more}")
        return adapted.merge_and_unload(safe_merge=True)
    except TaskError:
        raise
    except Exception as error:  # peft and safetensors raise whatever their parts do
        said = " ".join(str(error).split())
        raise TaskError(f"adapter {path} does not fit the model: {type(error).__name__}: {said[:500]}") from error


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model's folder, without the model; TaskError if there is none."""
    from megatron.fill.wings.llm.megatron import is_checkpoint, latest, read_checkpoint

    if is_checkpoint(path):
        return tokenizer_of(read_checkpoint(latest(path), weights=False)[0])
    return _folder_tokenizer(path)


def _from_transformers(path: Path, dtype: str) -> tuple[Any, Tokenizer]:
    from transformers import AutoModelForCausalLM

    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except Exception as error:  # transformers raises whatever its parts do
        raise TaskError(f"model {path} cannot be loaded: {type(error).__name__}: {error}") from error
    _refuse_random_weights(path, model, found)
    ends = getattr(model.generation_config, "eos_token_id", None)
    return model, _folder_tokenizer(path, frozenset([ends] if isinstance(ends, int) else ends or []))


def _refuse_random_weights(path: Path, model: Any, found: dict[str, Any]) -> None:
    """A tensor that the files lack, or have in another shape, would be random.

    Raises:
        TaskError: naming them.
    """
    other_shapes = [name if isinstance(name, str) else name[0] for name in found.get("mismatched_keys", ())]
    lacking = sorted({*found["missing_keys"], *other_shapes})
    if not lacking:
        return
    unused = sorted(found.get("unexpected_keys", ()))
    named = ", ".join(lacking[:3]) + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else "")
    there = f"; the files have {', '.join(unused[:3])} instead" if unused else ""
    raise TaskError(
        f"model {path}: {len(lacking)} tensors of {type(model).__name__} are not in its files, or have another shape: "
        f"{named}{there}; expected all of them"
    )


def _folder_tokenizer(path: Path, ends: frozenset[int] = frozenset()) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        if (path / BYTES).is_file():
            return ByteTokenizer(**json.loads((path / BYTES).read_text(encoding="utf-8")))
        return FolderTokenizer(AutoTokenizer.from_pretrained(path, local_files_only=True), ends)
    except Exception as error:
        raise TaskError(f"the tokenizer of {path} cannot be loaded: {type(error).__name__}: {error}") from error


def _from_megatron(path: Path, dtype: str) -> tuple[Any, Tokenizer]:
    import torch

    from megatron.fill.wings.llm.megatron import load_megatron

    model, args = load_megatron(path)
    if dtype != "auto":
        model.to(getattr(torch, dtype))
    return model, tokenizer_of(args)


def tokenizer_of(args: Namespace) -> Tokenizer:
    """The tokenizer that a training had, by its arguments; TaskError if it cannot be had here."""
    kind = args.tokenizer_type
    if kind == "NullTokenizer" and args.vocab_size in (256, 257):
        end = getattr(args, "null_tokenizer_eod_id", None)
        return ByteTokenizer(args.vocab_size, args.vocab_size - 1 if end is None else end)
    if kind == "HuggingFaceTokenizer" and args.tokenizer_model and Path(args.tokenizer_model).is_dir():
        return _folder_tokenizer(Path(args.tokenizer_model))
    raise TaskError(
        f"the checkpoint was trained with --tokenizer-type {kind}, --tokenizer-model {args.tokenizer_model} and "
        f"--vocab-size {args.vocab_size}: expected NullTokenizer with 256, or HuggingFaceTokenizer with a folder"
    )
