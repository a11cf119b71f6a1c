"""The settings of a node's metrics server."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.fill.spec import Spec

OTLP = "OTEL_EXPORTER_OTLP_ENDPOINT"  # in the environment: where metrics go by OTLP


@dataclass(frozen=True, slots=True)
class MetricsSpec(Spec):
    """The settings of a metrics server, from its agent."""

    run_dir: str
    node: int  # number of the node whose ranks it serves
    store: str  # URL of the job store; empty on nodes that do not serve job metrics, which count once
    address: str = "127.0.0.1"  # address to listen on
    port: int = 0  # port to listen on; 0 for none, where metrics only go out by OTLP
    token_file: str = ""  # file with the bearer token that a request must have; empty for none
