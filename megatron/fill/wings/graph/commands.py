"""``pipefill graph``: a model with branches cut into a graph of pipeline stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from megatron.fill.cli.options import check_writable
from megatron.fill.cli.typed import App, Group
from megatron.fill.errors import ConfigError, GraphError

if TYPE_CHECKING:
    from megatron.fill.wings.graph.cost import Cluster
    from megatron.fill.wings.graph.model import ModelGraph
    from megatron.fill.wings.graph.search import Found

_MODEL = "mmt, dlrm, candle, two-tower; a YAML file: docs/graph.md; or module:function."
Gpu = Annotated[str, Option("--gpu", metavar="KIND", help="A kind of GPU: docs/simulator.md.")]
Net = Annotated[str, Option("--network", metavar="KIND", help="What connects them; none: transfers take no time.")]
Memory = Annotated[str | None, Option("--memory", metavar="SIZE", help="Of a device.  [default: what its kind has]")]
Efficiency = Annotated[
    float, Option("--efficiency", metavar="X", min=0.01, max=1, help="Share of the peak that operators reach.")
]
Png = Annotated[Path | None, Option("--png", metavar="FILE", help="Draw stages and timeline into this file.")]
_GPU, _NETWORK, _EFFICIENCY = "a100-80gb", "dgx-a100", 0.45
_FASTER = 0.01  # shorter by at least this share, one data-parallel stage is proposed


def plan(
    model: Annotated[str, Argument(metavar="MODEL", help=_MODEL)],
    devices: Annotated[int, Option(metavar="N", min=1, max=4096, help="How many there are.")],
    batch: Annotated[int, Option(metavar="B", min=1, max=1 << 20, help="Samples of an iteration.")] = 256,
    micro_batches: Annotated[
        int | None, Option(metavar="M", min=1, help="In every stage.  [default: the best for each stage]")
    ] = None,
    gpu: Gpu = _GPU,
    network: Net = _NETWORK,
    memory: Memory = None,
    efficiency: Efficiency = _EFFICIENCY,
    ahead: Annotated[
        bool, Option("--ahead", help="Frozen operators are in no stage: their passes run ahead, in bubbles.")
    ] = False,
    compare: Annotated[
        bool, Option("--compare", help="Also plan a sequential pipeline, and one of layers side by side.")
    ] = False,
    png: Png = None,
    json: Annotated[Path | None, Option(metavar="FILE", help="Write the plan into this file.")] = None,
) -> None:
    """Cut a model into a graph of stages (GraphPipe), so that branches run side by side.

    Prints a line per stage: its devices (DEV); the samples of a microbatch, which is divided over them (BATCH); the
    order of forward and backward passes; samples in flight (FLIGHT); memory of a device; its bubbles (IDLE); the
    stages that it takes from (AFTER); its first and last operator.
    """
    from megatron.fill.linux.files import write_text
    from megatron.fill.wings.graph.baselines import plan_atomic, plan_data_parallel, plan_sequential
    from megatron.fill.wings.graph.draw import draw_plan
    from megatron.fill.wings.graph.files import plan_text
    from megatron.fill.wings.graph.printed import print_comparison, print_faster, print_timeline
    from megatron.fill.wings.graph.search import micro_batches as sizes_of
    from megatron.fill.wings.graph.search import plan_graph

    cluster = _cluster(devices, gpu, network, memory, efficiency)
    sizes = sizes_of(batch, micro_batches)
    check_writable(png=png, json=json)
    graph = _model(model).running_ahead() if ahead else _model(model)
    planners: dict[str, Callable[[ModelGraph, Cluster, int, Sequence[int]], Found]] = {"graph": plan_graph}
    if compare:
        planners |= {"sequential": plan_sequential, "atomic": plan_atomic}
    found, seconds = {}, {}
    for name, planner in planners.items():
        begin = time.monotonic()
        found[name] = planner(graph, cluster, batch, sizes)
        seconds[name] = time.monotonic() - begin
    best = found["graph"]
    for group in best.lined:
        print(f"not series-parallel, so taken one after another: {' '.join(group)}")
    print_timeline(best.timeline)
    replicated = plan_data_parallel(graph, cluster, batch, sizes)
    if replicated is not None and replicated.period_ns < (1 - _FASTER) * best.timeline.period_ns:
        print_faster(replicated, best.timeline)
    if compare:
        print_comparison(found, seconds)
    if png is not None:
        draw_plan(png, best.timeline)
    if json is not None:
        write_text(json, plan_text(best.plan))


def show(
    file: Annotated[Path, Argument(metavar="FILE", help="A plan: of graph plan --json; with --model, its text form.")],
    model: Annotated[str | None, Option(metavar="MODEL", help="As for graph plan.")] = None,
    devices: Annotated[int | None, Option(metavar="N", min=1, max=4096, help="With --model: how many.")] = None,
    gpu: Gpu = _GPU,
    network: Net = _NETWORK,
    memory: Memory = None,
    efficiency: Efficiency = _EFFICIENCY,
    png: Png = None,
    text: Annotated[bool, Option("--text", help="Print the plan's text form, and nothing else.")] = False,
) -> None:
    """Check a plan and show it: one that was made by graph plan, or written by hand in its text form."""
    from megatron.fill.wings.graph.draw import draw_plan
    from megatron.fill.wings.graph.files import load_plan, load_plan_text
    from megatron.fill.wings.graph.printed import print_timeline
    from megatron.fill.wings.graph.timeline import simulate

    if (model is None) != (devices is None):
        raise ConfigError("expected --model and --devices, for a plan's text form, or neither")
    check_writable(png=png)
    if model is None or devices is None:
        given = load_plan(file)
    else:
        given = load_plan_text(file, _model(model), _cluster(devices, gpu, network, memory, efficiency))
    timeline = simulate(given)
    if text:
        print(given)
    else:
        print_timeline(timeline)
    if png is not None:
        draw_plan(png, timeline)


def _cluster(devices: int, gpu: str, network: str, memory: str | None, efficiency: float) -> Cluster:
    from megatron.fill.given.quantities import parse_bytes
    from megatron.fill.wings.graph.cost import Cluster
    from megatron.fill.wings.mainjob.hardware import GPUS, NETWORKS

    if gpu not in GPUS:
        raise ConfigError(f"--gpu is {gpu!r}: expected one of {', '.join(GPUS)}")
    if network != "none" and network not in NETWORKS:
        raise ConfigError(f"--network is {network!r}: expected one of {', '.join(NETWORKS)}, or none")
    try:
        size = None if memory is None else parse_bytes(memory)
    except ValueError as error:
        raise ConfigError(f"--memory is {memory!r}: {error}") from error
    return Cluster(
        devices=devices, gpu=GPUS[gpu], network=NETWORKS.get(network), efficiency=efficiency, memory_bytes=size
    )


def _model(name: str) -> ModelGraph:
    """Return the model: a known one by name, one from a file, or one traced from a module's function."""
    from megatron.fill.wings.graph.zoo import MODELS

    if name in MODELS:
        return MODELS[name]()
    if name.endswith((".yaml", ".yml")):
        from megatron.fill.wings.graph.files import load_model

        return load_model(Path(name))
    if ":" in name:
        from megatron.fill.wings.graph.export import export_model

        return export_model(name)
    raise GraphError(f"MODEL is {name!r}: expected one of {', '.join(MODELS)}, a .yaml file, or module:function")


def add(app: App) -> None:
    described = "Pipelines for models with branches: graphs of stages."
    graphs = App(cls=Group, help=described, rich_markup_mode="markdown")
    graphs.command("plan")(plan)
    graphs.command("show")(show)
    app.add_typer(graphs, name="graph", rich_help_panel="Graph pipelines")
