"""Language models from local folders, with their tokenizers.  Nothing is fetched from a network."""

from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from pathlib import Path
from typing import Any, Protocol

from megatron.fill.errors import TaskError
from megatron.fill.llm.attention import AttentionKinds, context_length

_BYTES = "byte_tokenizer.json"  # in a model's folder: its tokens are bytes
_DTYPES = ("auto", "float32", "bfloat16", "float16")


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        size: ids are below it.
        eos_ids: ids that end a text.
        begins: the id that a text without tokens begins with; None for none.
        closed: whether ids from ``size`` on stand for nothing, though a model may have them.
    """

    size: int
    eos_ids: frozenset[int]
    begins: int | None
    closed: bool

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt."""

    def decode(self, tokens: list[int]) -> str:
        """The text of ids; an incomplete character becomes U+FFFD."""

    def piece(self, token: int) -> str:
        """One token's text; bytes of it that are no whole character are surrogates (``surrogateescape``)."""

    def special(self, text: str) -> int | None:
        """The id of a token of this name that has no text; None if there is none."""

    def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **arguments: Any
    ) -> list[int]:
        """The ids of a conversation, with the beginning of the answer.

        Args:
            tools: functions that the template tells of.
            arguments: of the template's own.

        Raises:
            ValueError: the model has no template for that, or these messages do not fit it.
        """

    def same_tokens(self, other: Tokenizer) -> bool:
        """Whether both give a text the same ids."""

    def save(self, folder: Path) -> None:
        """Write it beside a model, for ``load_tokenizer``."""


class FolderTokenizer:
    """A tokenizer of ``transformers``.

    Args:
        ends: ids that end a text besides the tokenizer's own.

    Attributes:
        inner: that of ``transformers``.
    """

    def __init__(self, tokenizer: Any, ends: frozenset[int] = frozenset()) -> None:
        self._tokenizer = self.inner = tokenizer
        self._anchor: list[int] | None = None
        self.size = 1 + max(tokenizer.get_vocab().values(), default=-1)  # there may be holes
        own = tokenizer.eos_token_id
        self.eos_ids = ends | (frozenset() if own is None else frozenset([own]))
        self.begins = next((one for one in (tokenizer.bos_token_id, *sorted(self.eos_ids)) if one is not None), None)
        self.closed = False

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def decode(self, tokens: list[int]) -> str:
        return self._after_text(tokens, skip_special=True)

    def piece(self, token: int) -> str:
        text = self._after_text([token], skip_special=False)
        if "\ufffd" not in text:
            return text
        form = str(self._tokenizer.convert_ids_to_tokens(token))
        data = _bytes_of(form)
        return form if data is None else data.decode(errors="surrogateescape")

    def special(self, text: str) -> int | None:
        found = self._tokenizer.convert_tokens_to_ids(text)
        if found is None or self._tokenizer.convert_ids_to_tokens(found) != text or self.decode([found]):
            return None
        return int(found)

    def _after_text(self, tokens: list[int], skip_special: bool) -> str:
        """The text of ids that follow others: some decoders (Llama-2, Mistral) drop a space before the first one."""
        if self._anchor is None:
            self._anchor = list(self._tokenizer("a", add_special_tokens=False)["input_ids"])
        before = self._decoded(self._anchor, skip_special)
        text = self._decoded([*self._anchor, *tokens], skip_special)
        return text[len(before) :] if before and text.startswith(before) else self._decoded(tokens, skip_special)

    def _decoded(self, tokens: list[int], skip_special: bool) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))

    def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **arguments: Any
    ) -> list[int]:
        if not self._tokenizer.chat_template:
            raise ValueError("this model has no chat template: expected /v1/completions with a prompt")
        try:
            found = self._tokenizer.apply_chat_template(
                messages, tools, add_generation_prompt=True, return_dict=False, **arguments
            )
        except Exception as error:  # the template's own words, which are no class of ours
            raise ValueError(f"messages do not fit the model's chat template: {error}") from error
        if not list(found):
            raise ValueError("the model's chat template gives no token for these messages; expected one at least")
        return list(found)

    def same_tokens(self, other: Tokenizer) -> bool:
        return isinstance(other, FolderTokenizer) and self._tokenizer.get_vocab() == other._tokenizer.get_vocab()

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)


class ByteTokenizer:
    """UTF-8 as token ids, as ``scripts/preprocess_text.py`` writes it.

    Args:
        size: ids are below it.
        end: the id that ends a text; no byte of UTF-8.
    """

    def __init__(self, size: int, end: int) -> None:
        self.size, self._end = size, end
        self.eos_ids, self.closed = frozenset([end]), True
        self.begins: int | None = end

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="replace"))

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256 and token != self._end).decode(errors="replace")

    def piece(self, token: int) -> str:
        return bytes([token]).decode(errors="surrogateescape") if token < 256 and token != self._end else ""

    def special(self, text: str) -> int | None:
        return None

    def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **arguments: Any
    ) -> list[int]:
        raise ValueError("a model of bytes has no chat template: expected /v1/completions with a prompt")

    def same_tokens(self, other: Tokenizer) -> bool:
        return isinstance(other, ByteTokenizer) and (self.size, self._end) == (other.size, other._end)

    def save(self, folder: Path) -> None:
        (folder / _BYTES).write_text(json.dumps({"size": self.size, "end": self._end}), encoding="utf-8")


def _bytes_of(form: str) -> bytes | None:
    """The bytes of a token with this form in its vocabulary; None if it is not in a notation of bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if byte := re.fullmatch("<0x([0-9A-F]{2})>", form):
        return bytes.fromhex(byte[1])
    alphabet = {letter: byte for byte, letter in bytes_to_unicode().items()}  # of byte-level BPE
    return bytes(alphabet[letter] for letter in form) if set(form) <= set(alphabet) else None


def load_language_model(path: Path, dtype: str = "auto") -> tuple[Any, Tokenizer]:
    """A causal language model in host memory, in evaluation mode, and its tokenizer.

    Args:
        path: a folder that ``transformers`` can load, or one of Megatron's checkpoints (the newest is taken).
        dtype: of the weights: ``auto`` for that of the files, or ``float32``, ``bfloat16``, ``float16``.

    Raises:
        ValueError: ``dtype`` is none.
        TaskError: there is no such model, or a package is missing, or the model cannot be run in pieces.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(_DTYPES)}")
    try:
        import greenlet  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise TaskError(f"{error}: language models need pip install 'pipefill[models]'") from error
    from megatron.fill.llm.megatron import is_checkpoint

    closed = [file.name for file in path.glob("*") if not os.access(file, os.R_OK)]
    if closed:  # transformers would say that they are not there
        raise TaskError(f"model {path}: this user may not read {', '.join(sorted(closed)[:3])}")
    if is_checkpoint(path):
        model, tokenizer = _from_megatron(path, dtype)
    elif (path / "config.json").is_file():
        model, tokenizer = _from_transformers(path, dtype)
    else:
        raise TaskError(f"model is {path}: expected a folder as transformers saves it, or of Megatron's checkpoints")
    context_length(model)
    AttentionKinds.of(model)
    return model.eval(), tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model's folder, without the model.

    Raises:
        TaskError: there is none.
    """
    from megatron.fill.llm.megatron import is_checkpoint, latest, read_arguments

    return tokenizer_of(read_arguments(latest(path))) if is_checkpoint(path) else _folder_tokenizer(path)


def _from_transformers(path: Path, dtype: str) -> tuple[Any, Tokenizer]:
    from transformers import AutoModelForCausalLM

    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, output_loading_info=True
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
        f"model {path}: {len(lacking)} tensors of {type(model).__name__} are not in its files: {named}{there}; "
        "expected all of them"
    )


def _folder_tokenizer(path: Path, ends: frozenset[int] = frozenset()) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        if (path / _BYTES).is_file():
            return ByteTokenizer(**json.loads((path / _BYTES).read_text(encoding="utf-8")))
        return FolderTokenizer(AutoTokenizer.from_pretrained(path, local_files_only=True), ends)
    except Exception as error:
        raise TaskError(f"the tokenizer of {path} cannot be loaded: {type(error).__name__}: {error}") from error


def _from_megatron(path: Path, dtype: str) -> tuple[Any, Tokenizer]:
    import torch

    from megatron.fill.llm.megatron import load_megatron

    model, args = load_megatron(path)
    if dtype != "auto":
        model.to(getattr(torch, dtype))
    return model, tokenizer_of(args)


def tokenizer_of(args: Namespace) -> Tokenizer:
    """The tokenizer that a training had, by its arguments.

    Raises:
        TaskError: it cannot be had here.
    """
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
