"""Train a small model with two towers as a graph pipeline, and fill its bubbles with the jobs of ``--fill-jobs``.

    pipefill graph plan examples/graph/two_towers.yaml --devices 4 --batch 8 --micro-batches 8 --network none \
        --json plan.json
    RANKS=4 SCRIPT=examples/graph/train_two_towers.py scripts/train_local.sh --graph-plan plan.json \
        --train-iters 100 --lr 1e-3 --fill-jobs examples/jobs.yaml

The flags are Megatron's own, and ``--graph-plan``.  The plan decides how many ranks there are, what each has, and the
batch.  To train a model of your own as a graph, write another ``Towers``:
``megatron/fill/wings/graph/running/graphs.py`` says what is asked of it.  The data is made up: the patches say where a
sequence of tokens begins, the sound by how much it goes up.
"""

from __future__ import annotations

import argparse
import os
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import build_module
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import set_global_variables

from megatron.fill.errors import ConfigError
from megatron.fill.wings.graph.files import load_plan
from megatron.fill.wings.graph.running.graphs import GraphRun

PATCH = 48  # numbers of a patch, or of a moment of sound
_LAYER = re.compile(r"(vision|audio|language)\.(\d+)")

Batch = Mapping[str, torch.Tensor]


def lengths(args: Namespace) -> dict[str, int]:
    """Positions of each tower: as many patches as tokens, and half as many moments of sound; the last has them all."""
    sizes = {"vision": args.seq_length, "audio": args.seq_length // 2}
    return sizes | {"language": args.seq_length + sum(sizes.values())}


class _Layer(torch.nn.Module):
    """A layer of a transformer, and before the first one of a tower what makes its input."""

    def __init__(self, tower: str, number: int, config: Any) -> None:
        super().__init__()
        args = get_args()
        self.tower = tower
        self.begins = number == 0
        if self.begins and tower == "language":
            self.embedding = torch.nn.Embedding(args.padded_vocab_size, config.hidden_size)
        elif self.begins:
            self.projection = torch.nn.Linear(PATCH, config.hidden_size)
        if self.begins:
            self.positions = torch.nn.Parameter(torch.randn(lengths(args)[tower], 1, config.hidden_size) * 0.02)
        self.layer = build_module(get_gpt_layer_local_spec(), config=config, layer_number=number + 1)

    def forward(self, inputs: Sequence[torch.Tensor], batch: Batch) -> torch.Tensor:
        if not self.begins:
            (hidden,) = inputs
        elif self.tower == "language":
            hidden = torch.cat([*inputs, self.embedding(batch["tokens"]).transpose(0, 1)]) + self.positions
        else:
            taken = batch[self.tower].to(self.projection.weight.dtype)
            hidden = self.projection(taken).transpose(0, 1) + self.positions
        output, _ = self.layer(hidden, attention_mask=None)
        return output


class _Loss(torch.nn.Module):
    """Cross entropy of the next tokens."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head = torch.nn.Linear(config.hidden_size, get_args().padded_vocab_size)

    def forward(self, inputs: Sequence[torch.Tensor], batch: Batch) -> torch.Tensor:
        labels = batch["labels"]
        hidden = inputs[0][-labels.shape[1] :].transpose(0, 1)
        return torch.nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), labels.flatten())


class Towers:
    """``vision.N`` and ``audio.N`` into ``language.N``, N from 0, then ``loss``: towers of any number of layers."""

    def __init__(self, names: Sequence[str]) -> None:
        found = [match for name in names if (match := _LAYER.fullmatch(name))]
        self._layers = {
            tower: max((int(one[2]) + 1 for one in found if one[1] == tower), default=0)
            for tower in ("vision", "audio", "language")
        }

    def inputs(self, name: str) -> tuple[str, ...] | None:
        if name == "loss":
            return (self._end("language"),)
        match = _LAYER.fullmatch(name)
        if match is None:
            return None
        tower, number = match[1], int(match[2])
        if number:
            return (f"{tower}.{number - 1}",)
        return (self._end("vision"), self._end("audio")) if tower == "language" else ()

    def _end(self, tower: str) -> str:
        return f"{tower}.{max(0, self._layers[tower] - 1)}"

    def build(self, name: str, config: Any) -> torch.nn.Module:
        match = _LAYER.fullmatch(name)
        return _Loss(config) if match is None else _Layer(match[1], int(match[2]), config)

    def shape(self, name: str, args: Namespace) -> tuple[int, int, int]:
        return lengths(args)[name.partition(".")[0]], args.micro_batch_size, args.hidden_size


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of tokens that go up by a step, each with patches and sound that say from where and by how much."""

    def __init__(self, size: int, args: Namespace) -> None:
        self._size, self._args = size, args

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        args, sizes = self._args, lengths(self._args)
        random = torch.Generator().manual_seed(args.seed * 1_000_003 + at)
        start, step = (int(torch.randint(1, 9, (), generator=random)) for _ in range(2))
        tokens = (start + step * torch.arange(args.seq_length + 1)) % args.vocab_size
        found = {"tokens": tokens[:-1], "labels": tokens[1:]}
        for name, says in (("vision", start), ("audio", step)):
            found[name] = 0.1 * torch.randn(sizes[name], PATCH, generator=random)
            found[name][:, says] += 1
        return found


def datasets_provider(sizes: Sequence[int]) -> tuple[Sequences | None, ...]:
    return tuple(Sequences(size, get_args()) if size else None for size in sizes)


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # every rank makes the data


def add_graph_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("graph", "train a graph of stages")
    group.add_argument("--graph-plan", type=Path, required=True, metavar="FILE", help="of pipefill graph plan --json")
    small = {"hidden_size": 128, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 255}
    parser.set_defaults(**small, tokenizer_type="NullTokenizer", attention_dropout=0.0, hidden_dropout=0.0)
    parser.set_defaults(eval_iters=0, eval_interval=100_000)
    return parser


def main() -> None:
    args = parse_args(add_graph_arguments)
    plan = load_plan(args.graph_plan)
    run = GraphRun(plan, Towers(list(plan.graph.by_name)), int(os.environ.get("WORLD_SIZE", "1")))
    run.apply(args)
    if args.num_layers is not None:
        raise ConfigError(f"--num-layers is {args.num_layers}; expected none: the plan has the towers' layers")
    args.num_layers = len(plan.stages)  # Megatron checks that stages have as many each
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    validate_args(args)
    # The spread of the first weights depends on it.
    args.num_layers = sum(_LAYER.fullmatch(name) is not None for name in plan.graph.by_name)
    set_global_variables(args)
    try:
        pretrain(
            pretrain_cfg_container_from_args(args),
            datasets_provider,
            ModelType.encoder_or_decoder,
            run.forward_step,
            model_provider=run.model_provider,
            get_embedding_ranks=lambda ranks: ranks[:1],
        )
    finally:  # it may exit, on a signal or after --exit-interval
        run.report()


if __name__ == "__main__":
    from megatron.fill.app.launch import launch

    launch(main)
