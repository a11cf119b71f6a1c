"""A node's metrics server: ``python -m megatron.fill.wings.operate.serve``, with its settings on standard input.

Its agent starts it.  It answers ``GET /metrics`` in Prometheus' formats, and sends the same by OTLP where
``OTEL_EXPORTER_OTLP_ENDPOINT`` names a collector; with ``OTEL_TRACES_EXPORTER=otlp``, sampled bubbles as spans, too.
"""

from __future__ import annotations

import hmac
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from prometheus_client import CollectorRegistry, MetricsHandler

from megatron.fill.errors import FillError
from megatron.fill.linux import host
from megatron.fill.records.account import Traced, read_account
from megatron.fill.records.live import LiveRank
from megatron.fill.records.sampling import Sample
from megatron.fill.records.segment import last_segment
from megatron.fill.wings.operate.metrics import RunMetrics
from megatron.fill.wings.operate.spans import RunSpans, sample_every
from megatron.fill.wings.operate.spec import OTLP, MetricsSpec

logger = logging.getLogger("pipefill.metrics")

_AGAIN_S = 30.0  # time between two attempts to listen
_LOOK_S = 10.0  # time between two looks for sampled iterations; records are as old


def handler(metrics: RunMetrics, token: bytes) -> type[BaseHTTPRequestHandler]:
    """Return the class that answers requests; with a token, only to those that have it."""
    of_run = CollectorRegistry()
    of_run.register(metrics)

    class Handler(MetricsHandler):
        registry = of_run
        timeout = 10  # for a client that sends nothing

        def do_GET(self) -> None:
            given = self.headers.get("Authorization", "").encode()
            if token and not hmac.compare_digest(given, b"Bearer " + token):
                self._refuse(401, "the header Authorization: Bearer TOKEN")
            elif self.path.partition("?")[0] != "/metrics":
                self._refuse(404, "/metrics")
            else:
                super().do_GET()

        def _refuse(self, status: int, expected: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/plain")
            if status == 401:
                self.send_header("WWW-Authenticate", "Bearer")
            self.end_headers()
            self.wfile.write(f"expected {expected}\n".encode())

    return Handler


def read_token(path: str) -> bytes:
    """Return the token of a file, its first line; empty without a file.

    OSError if the file cannot be read, ValueError if it has no token.
    """
    if not path:
        return b""
    token = Path(path).read_bytes().partition(b"\n")[0].strip()
    if not token:
        raise ValueError(f"{path} has no token in its first line")
    return token


def listen(spec: MetricsSpec, metrics: RunMetrics) -> ThreadingHTTPServer:
    """Return a server that listens; while the port is taken, try again.

    Raises:
        OSError, ValueError: the token cannot be read.
    """
    answers, said = handler(metrics, read_token(spec.token_file)), False
    while True:
        try:
            return ThreadingHTTPServer((spec.address, spec.port), answers)
        except OSError as error:
            if not said:
                logger.warning("%s:%d: %s; tried again until it is free", spec.address, spec.port, error)
            said = True
            time.sleep(_AGAIN_S)


def push(metrics: RunMetrics) -> None:
    """Send all metrics by OTLP from now on, as often as ``OTEL_METRIC_EXPORT_INTERVAL`` says."""
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.metrics import CallbackOptions, Observation
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    except ImportError as error:
        logger.warning("%s: %s needs pip install 'pipefill[metrics]'", error, OTLP)
        return
    provider = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())])
    meter = provider.get_meter("pipefill")

    def observe(name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda options: [Observation(one.value, one.labels) for one in metrics.family(name).samples]

    for family in metrics.collect():
        make = meter.create_observable_counter if family.type == "counter" else meter.create_observable_gauge
        make(family.name, [observe(family.name)], description=family.documentation)


def trace(metrics: RunMetrics, segment: Path) -> None:
    """Send the bubbles of sampled iterations as spans from now on."""
    try:
        spans = RunSpans(segment)
    except ImportError as error:
        logger.warning("%s: spans need pip install 'pipefill[metrics]'", error)
        return
    waiting: list[tuple[LiveRank, Sample]] = []
    while True:
        try:
            linked, waiting = link(segment, waiting, metrics.samples())
            for rank, sample, traced in linked:
                spans.add(rank, sample, traced)
        except Exception:  # a record that cannot be read now must not end them for good
            logger.exception("spans cannot be sent now")
        time.sleep(_LOOK_S)


def link(
    segment: Path, waiting: Sequence[tuple[LiveRank, Sample]], new: Sequence[tuple[LiveRank, Sample]]
) -> tuple[list[tuple[LiveRank, Sample, Traced | None]], list[tuple[LiveRank, Sample]]]:
    """Return samples with the training's own spans of them, and those of ``new`` that wait for theirs.

    The accounts, which name the spans, are other files than the samples', and may be behind; by the next look they are
    not, so no sample waits twice.  Those of ``waiting`` waited at the last look.
    """
    traced = {number: traced_iterations(segment, number) for number in {rank.info.rank for rank, _ in (*waiting, *new)}}
    linked, behind = [(rank, sample, traced[rank.info.rank].get(sample.iteration)) for rank, sample in waiting], []
    for rank, sample in new:
        its = traced[rank.info.rank]
        if its and sample.iteration > max(its):
            behind.append((rank, sample))
        else:
            linked.append((rank, sample, its.get(sample.iteration)))
    return linked, behind


def traced_iterations(segment: Path, rank: int) -> dict[int, Traced]:
    """Return the spans of the training's own trace that a rank ran in, by iteration; none if they cannot be read."""
    with suppress(FillError):
        account = read_account(segment, rank)
        return {one.iteration: one for one in account.traced} if account is not None else {}
    return {}


def main() -> None:
    parent = os.getppid()
    host.die_with_parent(parent)
    spec = MetricsSpec.from_json(sys.stdin.read())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s metrics: %(message)s")
    try:
        every = sample_every(os.environ)
    except ValueError as error:
        logger.warning("no spans are sent: %s", error)
        every = 0
    if "service.name=" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        os.environ.setdefault("OTEL_SERVICE_NAME", "pipefill")  # the SDK's own default is unknown_service
    metrics = RunMetrics(spec, every)
    if os.environ.get(OTLP):
        push(metrics)
    if every:
        segment = last_segment(Path(spec.run_dir)).folder
        threading.Thread(target=trace, args=(metrics, segment), name="spans", daemon=True).start()
    if spec.port:
        listen(spec, metrics).serve_forever()
    threading.Event().wait()


if __name__ == "__main__":
    main()
