"""The settings of a node's metrics server."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.fill.spec import Spec

OTLP = "OTEL_EXPORTER_OTLP_ENDPOINT"  # in the environment: where metrics go by OTLP


@dataclass(frozen=True, slots=True)
class MetricsSpec(Spec):
    """The settings of a metrics server, from its agent.

    Attributes:
        node: number of the node, of whose ranks it tells.
        store: URL of the job store; empty on nodes that do not tell of jobs, so that they count once.
        address: address to listen on.
        port: port to listen on; 0 for none, where metrics only go out by OTLP.
        token_file: file with the bearer token that a request must have; empty for none.
    """

    run_dir: str
    node: int
    store: str
    address: str = "127.0.0.1"
    port: int = 0
    token_file: str = ""
