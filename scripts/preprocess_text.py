#!/usr/bin/env python
"""Make one of Megatron's indexed datasets (a .bin and an .idx file) from text files; each file is one document.

The tokenizer is chosen with Megatron's own flags.  Without any it is byte-level and needs no files: ``NullTokenizer``
takes text that is already numbers, so each byte of the UTF-8 text is written as its number.  Id 255, which no UTF-8
text contains, marks the end of a document.
"""

from __future__ import annotations

import argparse
import glob
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

BYTE_TOKENIZER = "NullTokenizer"
BYTE_VOCABULARY = 256


class InputError(Exception):
    """Something the user gave cannot be used."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose error is one line: with Megatron's flags the usage text hides it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


@dataclass(slots=True)
class Counts:
    """What was read and written."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    empty: int = 0
    undecodable: int = 0


def _own_parser(add_help: bool) -> Parser:
    parser = Parser(description=__doc__, allow_abbrev=False, add_help=add_help)
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, folders or glob patterns")
    parser.add_argument("--suffix", default="", help="take only these from folders and patterns, such as .py,.txt")
    parser.add_argument("--output-prefix", required=True, help="the dataset is PREFIX_text_document.bin and .idx")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    return parser


def find_files(inputs: Iterable[str], suffix: str = "") -> list[Path]:
    """The files that ``inputs`` name, each once, in order.

    Raises:
        InputError: an input names nothing, or nothing is left.
    """
    suffixes = tuple(part.strip() for part in suffix.split(",") if part.strip())
    found: dict[Path, Path] = {}
    for name in inputs:
        path = Path(name)
        if path.is_file():
            files: Iterable[Path] = [path]
        elif path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(suffixes or ""))
        elif glob.has_magic(name):
            matched = (Path(match) for match in sorted(glob.glob(name, recursive=True)))
            files = [file for file in matched if file.is_file() and file.name.endswith(suffixes or "")]
        else:
            raise InputError(f"--input {name}: no such file or folder")
        for file in files:
            found.setdefault(file.resolve(), file)
    if not found:
        wanted = f" with a name ending in {' or '.join(suffixes)}" if suffixes else ""
        raise InputError(f"--input {' '.join(inputs)}: no files{wanted}")
    return list(found.values())


def _output_prefix(prefix: str) -> str:
    """The path of the dataset without its endings; its folder is there."""
    folder = os.path.dirname(prefix) or "."
    if not os.path.isdir(folder):
        raise InputError(f"--output-prefix {prefix}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise InputError(f"--output-prefix {prefix}: the folder {folder} cannot be written to")
    return f"{prefix}_text_document"


def build_tokenizer(args: argparse.Namespace) -> Any:
    """Megatron's tokenizer for its flags in ``args``; byte-level where they name none."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as build

    args.tokenizer_type = args.tokenizer_type or BYTE_TOKENIZER
    if args.tokenizer_type == BYTE_TOKENIZER:
        args.vocab_size = args.vocab_size or BYTE_VOCABULARY
        if args.vocab_size < BYTE_VOCABULARY:
            raise InputError(f"--vocab-size {args.vocab_size}: bytes need at least {BYTE_VOCABULARY}")
    args.pad_vocab_size = False  # padding is for the model, and needs its parallel sizes
    try:
        return build(args)
    except (AssertionError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"--tokenizer-type {args.tokenizer_type}: {' '.join(str(error).split())}") from error


def _documents(files: Iterable[Path], counts: Counts) -> Iterator[str]:
    """The text of each file that is UTF-8 and not empty."""
    for file in files:
        try:
            data = file.read_bytes()
        except OSError as error:
            raise InputError(f"{file}: {error.strerror}") from error
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            counts.undecodable += 1
            continue
        if not text:
            counts.empty += 1
            continue
        counts.bytes += len(data)
        yield text


def write_dataset(files: Iterable[Path], prefix: str, tokenizer: Any, byte_level: bool, append_eod: bool) -> Counts:
    """Tokenize ``files`` into ``prefix``.bin and ``prefix``.idx.

    Raises:
        InputError: a file cannot be read, or none holds any text.  No dataset is left behind then.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    counts = Counts()
    partial = {ending: f"{prefix}{ending}.partial" for ending in (".bin", ".idx")}
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    try:
        builder = IndexedDatasetBuilder(partial[".bin"], dtype=dtype)
        for text in _documents(files, counts):
            ids = tokenizer.tokenize(" ".join(map(str, text.encode("utf-8"))) if byte_level else text)
            if append_eod:
                ids = [*ids, tokenizer.eod]
            builder.add_document(ids, [len(ids)])
            counts.documents += 1
            counts.tokens += len(ids)
        if not counts.documents:
            raise InputError(f"no text: {counts.undecodable} files are not UTF-8, {counts.empty} are empty")
        builder.finalize(partial[".idx"])
        for ending, path in partial.items():
            os.replace(path, prefix + ending)
    finally:
        for path in partial.values():
            if os.path.exists(path):
                os.remove(path)
    return counts


def _is_not_about_cuda(record: logging.LogRecord) -> bool:
    return "No CUDA runtime" not in record.getMessage()


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    asks_help = bool({"-h", "--help"} & set(argv))
    parser = _own_parser(add_help=asks_help)
    try:
        if not asks_help:  # what is wrong with the files is said at once: Megatron takes seconds to import
            own, _ = parser.parse_known_args(argv)
            files, prefix = find_files(own.input, own.suffix), _output_prefix(own.output_prefix)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.getLogger("torch.utils.cpp_extension").addFilter(_is_not_about_cuda)
            from megatron.training.arguments import _add_tokenizer_args
        args = _add_tokenizer_args(parser).parse_args(argv)
        tokenizer = build_tokenizer(args)
        byte_level = args.tokenizer_type == BYTE_TOKENIZER
        counts = write_dataset(files, prefix, tokenizer, byte_level, args.append_eod)
    except InputError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    if counts.undecodable or counts.empty:
        print(f"skipped: {counts.undecodable} files that are not UTF-8, {counts.empty} empty files")
    print(f"{prefix}: {counts.documents} documents, {counts.tokens} tokens, {counts.bytes} bytes")
    print(f"a share of --split must be 0 or at least {100 / counts.documents:.2g}%: Megatron splits by whole documents")
    vocabulary = f" --vocab-size {args.vocab_size}" if byte_level else ""
    print(f"train with: --data-path {prefix} --tokenizer-type {args.tokenizer_type}{vocabulary}")


if __name__ == "__main__":
    main()
