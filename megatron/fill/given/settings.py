"""The settings of ``--fill-settings``, which a site writes once in a file, or a user as YAML on the command line."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron.fill.errors import ConfigError
from megatron.fill.given.files import read_yaml
from megatron.fill.given.jobs import matching
from megatron.fill.given.plainyaml import PlainYamlError, parse_yaml
from megatron.fill.given.problems import Place, explain, shown
from megatron.fill.given.quantities import checked_prices
from megatron.fill.types import Prices, Quota

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
FLAG = "--fill-settings"
MOST_AMOUNT = 10**9  # largest value in its unit: more is a slip

Amount = Annotated[float, Field(ge=0, le=MOST_AMOUNT, allow_inf_nan=False)]
Above0 = Annotated[float, Field(gt=0, le=MOST_AMOUNT, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=MOST_AMOUNT)]
_Prices = Annotated[Prices, AfterValidator(lambda prices: checked_prices(prices, "{main: 3.96, side: 0.18}"))]


def setting(default: Any, text: str, metavar: str | None = None, **limits: Any) -> Any:
    """Return a setting's field, with its help text; ``metavar`` is for a flag that is no switch or choice."""
    return Field(default, description=text, json_schema_extra={"metavar": metavar}, **limits)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Metrics(_Section):
    """The address of a node's metrics endpoint; a number stands for its port."""

    port: int = Field(ge=1, le=65535)
    address: Annotated[str, matching(r"\S+", "an address such as 127.0.0.1")] = "127.0.0.1"
    token_file: Annotated[str, matching(r".*\S.*", "a file with the token")] | None = None

    @model_validator(mode="before")
    @classmethod
    def _port(cls, value: object) -> object:
        return {"port": value} if isinstance(value, int | str) else value

    @model_validator(mode="after")
    def _checked(self) -> Metrics:
        if self.token_file is None and self.address not in _LOOPBACK:
            raise ValueError(f"others reach {self.address}; expected a token_file with it")
        if importlib.util.find_spec("prometheus_client") is None:
            raise ValueError("prometheus_client is missing; expected: pip install 'pipefill[metrics]'")
        return self


class UsersQuota(_Section):
    """The most that the jobs of each user may take, as in ``types.Quota``."""

    jobs: Count | None = None
    device_hours: Above0 | None = None
    days: Above0 = 30.0

    @model_validator(mode="after")
    def _checked(self) -> UsersQuota:
        if self.jobs is None and self.device_hours is None:
            raise ValueError("it limits nothing; expected jobs, device_hours or both")
        return self


class SiteSettings(_Section):
    """Settings that a site decides once, and most users leave alone: policy, limits, and what PipeFill derives."""

    user: Annotated[str, matching(r".*\S.*", "the name of a user")] | None = setting(
        None, "user that the jobs run as; needs root (default: nobody where the training is root's)"
    )
    network: bool = setting(False, "let jobs use the machine's network; else they have a localhost of their own")
    strict: bool = setting(
        False, "do not train at all where a layer of the sandbox cannot be built; else a message names it"
    )
    allow: tuple[Annotated[str, matching(r".*\S.*", "a pattern such as 'package.*'")], ...] = setting(
        (),
        "list of patterns: run only tasks whose module:Class matches one of them, such as 'megatron.fill.sidetask.*'; "
        "the word command stands for commands, env:NAME for a variable that tasks may set (default: everything)",
    )
    max_processes: int = setting(
        256, "processes and threads of a job; one with more is stopped as FAILED", ge=8, le=MOST_AMOUNT
    )
    max_files: int = setting(1024, "open files of each process of a job", ge=64, le=MOST_AMOUNT)
    max_output_mib: Above0 = setting(
        64.0, "output of a job in MiB; one that prints more is stopped as FAILED, its first and last 512 KiB are kept"
    )
    grace_ms: Above0 = setting(500.0, "time that a step may run on after its bubble before its process is paused")
    max_overruns: Count = setting(
        3, "steps that may run on for longer than grace_ms before the job is stopped as FAILED"
    )
    lease_seconds: float = setting(
        30.0, "time that the store keeps a job for a silent agent", ge=1, le=MOST_AMOUNT, allow_inf_nan=False
    )
    warmup_iterations: Count = setting(5, "iterations in which a bubble is observed before it is filled")
    guard_us: Amount | None = setting(
        None, "time kept free at the end of every predicted bubble (default: 2000 on a time-sliced GPU, else 0)"
    )
    min_bubble_us: Amount | None = setting(
        None, "shortest predicted bubble that is filled (default: 5000 on a time-sliced GPU, else 1000)"
    )
    baseline_seconds: Amount = setting(
        0.0,
        "time after the last iteration for which each rank's jobs run alone, to measure the fill efficiency; on the "
        "CPU the ranks of a node take turns",
    )
    price: _Prices | None = setting(
        None,
        "{main: M, side: S}: what an hour costs, in any currency, for the saving in the report: of all that the "
        "training runs on, and of one of the cheaper devices that the jobs would otherwise run on",
    )
    metrics: Metrics | None = setting(
        None,
        "a port: each node then answers GET /metrics there, for Prometheus, on 127.0.0.1 only; or {port: P, address: "
        "0.0.0.0, token_file: FILE}, which answers to requests with the bearer token in that file (docs/operate.md)",
    )
    dcgm_job_mapping: Annotated[str, matching(r"/.*", "the absolute path of a folder")] | None = setting(
        None,
        "the folder that dcgm-exporter reads with --hpc-job-mapping-dir: while a job runs on a GPU, its name is in the "
        "GPU's file there, so that power and activity are labelled by job (docs/operate.md)",
    )
    quota: UsersQuota | None = setting(
        None,
        "{jobs: N, device_hours: H, days: D}: the most that the jobs of each user may take of the store's trainings: N "
        "that run at a time, H device-hours in D days (30); the others wait, and say so",
    )
    trace_iterations: Count = setting(3, "last iterations that trace.json holds")

    @property
    def users_quota(self) -> Quota | None:
        """The setting ``quota``, for agents and records."""
        return None if self.quota is None else Quota(**self.quota.model_dump())


def load_settings(given: Sequence[str], others: Sequence[str]) -> dict[str, Any]:
    """Return the values of ``--fill-settings``, each a YAML file or, beginning with ``{``, YAML itself; later ones win.

    ConfigError if a file cannot be read, or a setting does not exist, is a flag (``others``) or has a wrong value.
    """
    values: dict[str, Any] = {}
    for text in given:
        found = _load(text, others)
        values |= {name: getattr(found, name) for name in found.model_fields_set}
    return values


def _load(text: str, others: Sequence[str]) -> SiteSettings:
    expected = "a YAML file with settings, or {name: value, ...}"
    if not text.strip():
        raise ConfigError(f"{FLAG} is {text!r}: expected {expected}")
    inline = text.lstrip().startswith("{")
    try:
        read = parse_yaml(text) if inline else read_yaml(text, expected)
    except PlainYamlError as error:
        raise ConfigError(f"{FLAG} {shown(text)}: {error}") from error
    data = {} if read.value is None else read.value  # a file with comments alone
    place_of_all = FLAG if inline else text

    def where(place: Place) -> tuple[str, Place]:
        return place_of_all if inline else read.placed(text, place), place

    if not isinstance(data, dict):
        raise ConfigError(f"{place_of_all}: found {shown(data)}; expected a mapping of settings")
    for name in data:
        if name in others:
            raise ConfigError(f"{where([name])[0]}: {name} is a flag; expected --fill-{name.replace('_', '-')} instead")
    try:
        return SiteSettings.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error, SiteSettings, where)) from error
