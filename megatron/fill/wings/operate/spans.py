"""The bubbles of sampled iterations as spans, which go to a collector by OTLP.

An iteration is one trace, whatever node and rank its spans come from: its number is made of the run's folder, the start
of the training and the iteration.  Each rank has a span of the iteration in it, and below that one of each bubble.
Where Megatron traces itself, that span has a link to Megatron's own of the same iteration.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.fill.records.account import Traced
from megatron.fill.records.live import LiveRank
from megatron.fill.records.sampling import Sample
from megatron.fill.wings.operate.spec import OTLP

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_EXPORTER, _RATIO = "OTEL_TRACES_EXPORTER", "OTEL_TRACES_SAMPLER_ARG"  # OpenTelemetry's own names
_USUAL_RATIO = 0.01


def sample_every(environ: Mapping[str, str]) -> int:
    """Return of how many iterations one is sampled; 0 unless a collector is named and OTEL_TRACES_EXPORTER asks for it.

    ValueError if OTEL_TRACES_SAMPLER_ARG is no ratio.
    """
    if environ.get(_EXPORTER) != "otlp" or not environ.get(OTLP):
        return 0
    given = environ.get(_RATIO, _USUAL_RATIO)
    try:
        ratio = float(given)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise ValueError(f"{_RATIO} is {given!r}; expected a number from 0 to 1")
    return round(1 / ratio) if ratio else 0


def note_span(every: int, latest: deque[Traced], iteration: int) -> None:
    """Note in ``latest`` the span of the training's own trace in which a sampled iteration begins, if there is one.

    Called in the rank's own process, on the training's own thread.  Megatron's is that of ``--otel-enabled``, beyond
    0.19; any other that is current will do.
    """
    if iteration % every:
        return
    trace = sys.modules.get("opentelemetry.trace")  # without it nobody traces here
    if trace is not None:
        its = trace.get_current_span().get_span_context()
        if its.is_valid:
            latest.append(Traced(iteration, f"{its.trace_id:032x}", f"{its.span_id:016x}"))


class RunSpans:
    """Makes spans of sampled iterations.

    Args:
        segment: folder of the records of this start of the training.
        exporter: takes the spans; None to send them to the collector that the environment names.

    Raises:
        ImportError: OpenTelemetry's SDK is not installed.
    """

    def __init__(self, segment: Path, exporter: SpanExporter | None = None) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import RandomIdGenerator, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        class Numbers(RandomIdGenerator):
            trace = 1

            def generate_trace_id(self) -> int:
                return self.trace

        self._segment = segment.resolve()
        self._numbers = Numbers()
        # The iterations are sampled already.
        self.provider = TracerProvider(ALWAYS_ON, id_generator=self._numbers)
        self.provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
        self._tracer = self.provider.get_tracer("pipefill")

    def add(self, rank: LiveRank, sample: Sample, traced: Traced | None = None) -> None:
        """Send the spans of an iteration of a rank; ``traced`` is the training's own span of it, if that is known."""
        from opentelemetry.trace import Link, SpanContext, set_span_in_context

        text = f"{self._segment} {sample.iteration}"
        self._numbers.trace = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16]) or 1
        unix_ns = time.time_ns() - time.monotonic_ns()
        info = rank.info
        links = [Link(SpanContext(int(traced.trace, 16), int(traced.span, 16), is_remote=True))] if traced else []
        whole = self._tracer.start_span(
            "iteration",
            start_time=unix_ns + sample.start_ns,
            attributes={
                "pipefill.iteration": sample.iteration,
                "pipefill.rank": info.rank,
                "pipefill.stage": info.stage,
                "pipefill.filling": sample.filling,
                "pipefill.run": str(self._segment),
            },
            links=links,
        )
        context = set_span_in_context(whole)
        for bubble in sample.bubbles:
            attributes: dict[str, str | int | float] = {"pipefill.rank": info.rank, "pipefill.kind": bubble.kind}
            if bubble.job:
                attributes |= {"pipefill.job": bubble.job, "pipefill.harvested_seconds": bubble.harvested_ns / 1e9}
            span = self._tracer.start_span(
                f"bubble {bubble.kind}", context, start_time=unix_ns + bubble.start_ns, attributes=attributes
            )
            span.end(unix_ns + bubble.end_ns)
        whole.end(unix_ns + sample.end_ns)
