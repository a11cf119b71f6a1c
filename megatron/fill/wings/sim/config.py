"""``CONFIG.yaml`` of ``pipefill simulate``: the simulation's parameters, checked before anything runs.

docs/simulator.md explains every field.  Durations are seconds, or such as ``90s``, ``30m``, ``2h``, ``7d``.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from megatron.fill.given.presets import preset
from megatron.fill.given.quantities import parse_bytes, parse_duration
from megatron.fill.scheduler.policies import DEFAULT_POLICY
from megatron.fill.wings.mainjob.hardware import GIB, GPUS, NETWORKS, GpuKind, Network
from megatron.fill.wings.mainjob.model import MODELS, ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel
from megatron.fill.wings.sim.filljobs.generate import Generator
from megatron.fill.wings.sim.mainjob import MainJob
from megatron.fill.wings.sim.recorded.groups import Reschedule, recorded_groups, rescheduled_groups
from megatron.fill.wings.sim.values import Failures, MainJobRun, RuntimeModel

Seconds = Annotated[
    float,
    BeforeValidator(lambda its: parse_duration(its) if isinstance(its, str) else its),
    Field(ge=0, allow_inf_nan=False),
]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MainJobConfig(_Strict):
    """A main job: described (``model``, ``gpu``, ``network``, ``parallel``), or recorded (``report``, ``gpus``,
    ``reschedule``)."""

    name: str = Field(default="main", min_length=1)
    model: Annotated[ModelSpec, preset(MODELS)] | None = None
    gpu: Annotated[GpuKind, preset(GPUS)] | None = None
    network: Annotated[Network, preset(NETWORKS)] | None = None
    parallel: Parallel | None = None
    efficiency: float = 0.45
    overlap_grad_reduce: float = 0.0
    offload_optimizer: bool = False
    stragglers: dict[int, float] = {}
    memory_reserve: Annotated[int, BeforeValidator(parse_bytes)] = 2 * GIB
    report: Path | None = None
    gpus: int | None = Field(default=None, ge=1)
    reschedule: Reschedule | None = None
    start: Seconds = 0.0
    end: Seconds | None = None

    @model_validator(mode="after")
    def _one_description(self) -> MainJobConfig:
        described = {"model": self.model, "gpu": self.gpu, "network": self.network, "parallel": self.parallel}
        missing = [name for name, value in described.items() if value is None]
        if self.report is None and missing:
            raise ValueError(f"{missing[0]} is missing; expected model, gpu, network and parallel, or report")
        if self.report is not None and len(missing) < len(described):
            raise ValueError("expected a report, or model, gpu, network and parallel; got both")
        if self.report is None and self.gpus is not None:
            raise ValueError("gpus belongs to a report; a described job has as many as tp, pp and dp say")
        if self.report is None and self.reschedule is not None:
            raise ValueError("reschedule belongs to a report; a described job's schedule is in parallel")
        if self.end is not None and self.end <= self.start:
            raise ValueError(f"end is {self.end:g} s: expected later than its start at {self.start:g} s")
        if self.report is None:
            self.described()  # raises an error for impossible values
        return self

    def run(self, folder: Path) -> MainJobRun:
        """Return the main job's devices and bubble cycles.

        Args:
            folder: base folder for the report's path.

        Raises:
            ConfigError: the report cannot be used.
        """
        end_s = inf if self.end is None else self.end
        if self.report is not None and self.reschedule is not None:
            groups = rescheduled_groups(folder / self.report, self.gpus, self.reschedule)
        elif self.report is not None:
            groups = recorded_groups(folder / self.report, self.gpus)
        else:
            groups = self.described().groups()
        groups = tuple(replace(group, name=f"{self.name}/{group.name}") for group in groups)
        return MainJobRun(self.name, groups, self.start, end_s)

    def described(self) -> MainJob:
        """The main job of the analytical model."""
        assert self.model is not None
        assert self.gpu is not None
        assert self.network is not None
        assert self.parallel is not None
        return MainJob(
            self.name,
            self.model,
            self.gpu,
            self.network,
            self.parallel,
            self.efficiency,
            self.memory_reserve,
            self.overlap_grad_reduce,
            offload_optimizer=self.offload_optimizer,
            stragglers=tuple(self.stragglers.items()),
        )


class FillConfig(_Strict):
    """The fill jobs: their kinds, and where they come from (exactly one of ``SOURCES``)."""

    kinds: tuple[str, ...] | None = Field(default=None, min_length=1)  # from catalog or ``profiles``; None for all
    # GPU of the catalog; None for the first main job's that has one.
    gpu: Annotated[GpuKind, preset(GPUS)] | None = None
    # A file of ``pipefill profile --output``, or a run's ``report.json``: measured kinds instead of the catalog's.
    profiles: Path | None = None
    report: Path | None = None
    trace: Path | None = None
    jobs: Path | None = None
    store: str | None = None
    generate: Generator | None = None
    saturate: bool = False  # True for an endless supply of waiting jobs of each kind
    size: Seconds = Field(default=3600.0, gt=0)  # duration of each job of ``jobs`` on an otherwise idle device
    device: str = "cpu"  # device on which the profiles of ``store`` were measured, as ``pipefill profile`` names it
    replay: bool = False  # True for all jobs of ``store`` at their times of submission, instead of the unfinished ones

    @model_validator(mode="after")
    def _one_source(self) -> FillConfig:
        given = [name for name in SOURCES if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"expected exactly one of {', '.join(SOURCES)}; got {' and '.join(given) or 'none'}")
        if self.profiles is not None and self.report is not None:
            raise ValueError("expected profiles or report; got both")
        return self


SOURCES = ("trace", "jobs", "store", "generate", "saturate")
_RUNTIME, _FAILURES = RuntimeModel(), Failures()


class RuntimeConfig(_Strict):
    """Parameters of the runtime: ``RuntimeModel`` in a file's units."""

    reserve_us: float = Field(default=_RUNTIME.reserve_ns / 1000, ge=0, allow_inf_nan=False)
    margin: Annotated[int, BeforeValidator(parse_bytes)] = Field(default=_RUNTIME.margin_bytes, ge=0)
    harvest: float = Field(default=_RUNTIME.harvest, gt=0, le=1)
    step_efficiency: float = Field(default=_RUNTIME.step_efficiency, gt=0, le=1)
    start: Seconds = _RUNTIME.start_s
    checkpoint: Seconds = Field(default=_RUNTIME.checkpoint_s, gt=0)
    tail: bool = _RUNTIME.tail

    def model(self) -> RuntimeModel:
        return RuntimeModel(
            round(self.reserve_us * 1000),
            self.margin,
            self.harvest,
            self.step_efficiency,
            self.start,
            self.checkpoint,
            self.tail,
        )


class FailuresConfig(_Strict):
    """Failures of devices: ``Failures`` in a file's units; none occur without ``mtbf``."""

    mtbf: Seconds | None = Field(default=None, gt=0)
    restart: Seconds = _FAILURES.restart_s
    seed: int = Field(default=_FAILURES.seed, ge=0)

    def model(self) -> Failures:
        return Failures(inf if self.mtbf is None else self.mtbf, self.restart, self.seed)


class SimulationConfig(_Strict):
    duration: Seconds = Field(gt=0)
    main_jobs: tuple[MainJobConfig, ...] = Field(min_length=1)
    fill: FillConfig
    policies: tuple[str, ...] = Field(default=(DEFAULT_POLICY,), min_length=1)
    runtime: RuntimeConfig = RuntimeConfig()
    failures: FailuresConfig = FailuresConfig()
    price_per_gpu_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _names_are_unique(self) -> SimulationConfig:
        names = [job.name for job in self.main_jobs]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two main jobs are named {name!r}; expected different names")
        return self
