"""Models and plans in files: a model as YAML, a plan as JSON or as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron.fill.errors import ConfigError, GraphError
from megatron.fill.given.files import read_json, read_text, read_yaml
from megatron.fill.given.problems import Place, explain
from megatron.fill.wings.graph.cost import Cluster
from megatron.fill.wings.graph.model import ModelGraph, Operator
from megatron.fill.wings.graph.plan import Plan, Stage
from megatron.fill.wings.mainjob.hardware import GpuKind, Network
from megatron.fill.wings.mainjob.parallel import Precision

_MODEL, _PLAN = "a model's operators", "a plan of graph plan --json, or --model and --devices with a text form"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Model(_Strict):
    name: str = Field(min_length=1)
    operators: tuple[Operator, ...] = Field(min_length=1)
    ahead: tuple[Operator, ...] = ()

    def graph(self) -> ModelGraph:
        return ModelGraph(self.name, self.operators, self.ahead)


class _Cluster(_Strict):
    devices: int = Field(ge=1)
    gpu: GpuKind
    network: Network | None
    efficiency: float
    precision: Precision
    memory_bytes: int | None


class _Plan(_Strict):
    model: _Model
    cluster: _Cluster
    batch: int = Field(ge=1)
    sequential: bool
    stages: tuple[Stage, ...]


def load_model(path: Path) -> ModelGraph:
    """Read a model from a YAML file; docs/graph.md lists its fields.

    Raises:
        ConfigError: it cannot be read, or a field is wrong; names the file and the line.
        GraphError: the graph is not valid; names the file.
    """
    read = read_yaml(path, _MODEL)
    with _named(path):
        return _checked(_Model, read.value, lambda place: (read.placed(path, place), place)).graph()


def plan_text(plan: Plan) -> str:
    """The content of a plan's JSON file: the plan with its model and devices, as ``load_plan`` reads it."""
    graph = plan.graph
    defaults = {field.name: field.default for field in fields(Operator)}
    operators, ahead = (
        [{name: value for name, value in asdict(its).items() if value != defaults[name]} for its in some]
        for some in (graph.operators, graph.ahead)
    )
    data = {
        "model": {"name": graph.name, "operators": operators} | ({"ahead": ahead} if ahead else {}),
        "cluster": asdict(plan.cluster),
        "batch": plan.batch,
        "sequential": plan.sequential,
        "stages": [asdict(stage) for stage in plan.stages],
    }
    return json.dumps(data, indent=1) + "\n"


def load_plan(path: Path) -> Plan:
    """Read a plan from a JSON file.

    Raises:
        ConfigError: it cannot be read, or a field is wrong.
        GraphError: the plan is not valid; names the file, the condition, stages and operators.
    """
    with _named(path):
        found = _checked(_Plan, read_json(path, _PLAN), lambda place: (str(path), place))
        cluster = Cluster(**dict(found.cluster))
        return Plan(found.model.graph(), cluster, found.batch, found.stages, found.sequential)


def load_plan_text(path: Path, graph: ModelGraph, cluster: Cluster) -> Plan:
    """Read a plan from a file with its text form.

    Raises:
        ConfigError: it cannot be read.
        GraphError: it is none, or is not valid; names the file.
    """
    with _named(path):
        return Plan.parse(read_text(path, "a plan's text form"), graph, cluster)


def _checked[M: BaseModel](kind: type[M], value: object, where: Callable[[Place], tuple[str, Place]]) -> M:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise ConfigError(explain(error, kind, where)) from error


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Have errors of the graph or the plan name the file that it is from."""
    try:
        yield
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from error
