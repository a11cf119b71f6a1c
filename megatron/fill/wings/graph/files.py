"""Models and plans in files: a model as YAML, a plan as JSON or as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from megatron.fill.errors import ConfigError, GraphError
from megatron.fill.given.files import read_json, read_text, read_yaml
from megatron.fill.given.problems import Place, explain
from megatron.fill.given.quantities import parse_bytes
from megatron.fill.wings.graph.cost import Cluster
from megatron.fill.wings.graph.model import ModelGraph, Operator
from megatron.fill.wings.graph.plan import Plan, Stage
from megatron.fill.wings.mainjob.hardware import GpuKind, Network
from megatron.fill.wings.mainjob.parallel import Precision

_MODEL, _PLAN = "a model's operators", "a plan that pipefill graph plan wrote"


def _bytes(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str) else value


Size = Annotated[float, BeforeValidator(_bytes), Field(ge=0, allow_inf_nan=False)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Operator(_Strict):
    name: str
    inputs: tuple[str, ...] = ()
    forward_flops: Number = 0.0
    backward_flops: Number | None = None
    forward_s: Number | None = None
    backward_s: Number | None = None
    parameters: int = Field(default=0, ge=0)
    lookup: bool = False
    frozen: bool = False
    moved_bytes: Size = 0.0
    output_bytes: Size = 0.0
    kept_bytes: Size | None = None


class _Model(_Strict):
    name: str = Field(min_length=1)
    operators: tuple[_Operator, ...] = Field(min_length=1)
    ahead: tuple[_Operator, ...] = ()

    def graph(self) -> ModelGraph:
        operators, ahead = (tuple(Operator(**dict(one)) for one in some) for some in (self.operators, self.ahead))
        return ModelGraph(self.name, operators, ahead)


class _Cluster(_Strict):
    devices: int = Field(ge=1)
    gpu: GpuKind
    network: Network | None
    efficiency: float
    precision: Precision
    memory_bytes: int | None


class _Stage(_Strict):
    operators: tuple[str, ...]
    devices: tuple[int, ...]
    micro_batch: int
    k: int
    in_flight: int


class _Plan(_Strict):
    model: _Model
    cluster: _Cluster
    batch: int = Field(ge=1)
    sequential: bool
    stages: tuple[_Stage, ...]


def load_model(path: Path) -> ModelGraph:
    """Read a model from a YAML file; docs/graph.md lists its fields.

    Raises:
        ConfigError: it cannot be read, or a field is wrong; names the file and the line.
        GraphError: the graph is not valid; names the file.
    """
    read = read_yaml(path, _MODEL)

    def where(place: Place) -> tuple[str, Place]:
        line = read.line_of(place)
        return str(path) if line is None else f"{path}, line {line}", place

    return _made(path, _checked(_Model, read.value, where).graph)


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan with its model and devices, as ``load_plan`` reads it."""
    graph = plan.graph
    operators, ahead = (
        [
            {name: value for name, value in asdict(its).items() if value != _Operator.model_fields[name].default}
            for its in some
        ]
        for some in (graph.operators, graph.ahead)
    )
    return {
        "model": {"name": graph.name, "operators": operators} | ({"ahead": ahead} if ahead else {}),
        "cluster": asdict(plan.cluster),
        "batch": plan.batch,
        "sequential": plan.sequential,
        "stages": [asdict(stage) for stage in plan.stages],
    }


def load_plan(path: Path) -> Plan:
    """Read a plan from a JSON file.

    Raises:
        ConfigError: it cannot be read, or a field is wrong.
        GraphError: the plan is not valid; names the file, the condition, stages and operators.
    """

    def plan() -> Plan:
        graph = found.model.graph()
        stages = tuple(Stage(**dict(stage)) for stage in found.stages)
        return Plan(graph, Cluster(**dict(found.cluster)), found.batch, stages, found.sequential)

    found = _checked(_Plan, read_json(path, _PLAN), lambda place: (str(path), place))
    return _made(path, plan)


def load_plan_text(path: Path, graph: ModelGraph, cluster: Cluster) -> Plan:
    """Read a plan from a file with its text form.

    Raises:
        ConfigError: it cannot be read.
        GraphError: it is none, or is not valid; names the file.
    """
    return _made(path, lambda: Plan.parse(read_text(path, "a plan's text form"), graph, cluster))


def plan_text(plan: Plan) -> str:
    """The content of a plan's JSON file."""
    return json.dumps(plan_json(plan), indent=1) + "\n"


def _checked[M: BaseModel](kind: type[M], value: object, where: Callable[[Place], tuple[str, Place]]) -> M:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise ConfigError(explain(error, kind, where)) from error


def _made[T](path: Path, make: Callable[[], T]) -> T:
    try:
        return make()
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from error
