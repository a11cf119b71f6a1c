"""The metrics of a run: their names and values, the endpoint, and what Prometheus itself makes of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron.fill import wings
from megatron.fill.account import Account
from megatron.fill.attached import attached
from megatron.fill.config import FillSettings
from megatron.fill.given.settings import load_settings
from megatron.fill.records.account import AccountWriter, Traced
from megatron.fill.records.agent import write_agent
from megatron.fill.records.rank import rank_file
from megatron.fill.records.segment import begin_segment, read_segments
from megatron.fill.store import open_store
from megatron.fill.types import BrakeEvent
from megatron.fill.wings.operate.agent import MetricsServer
from megatron.fill.wings.operate.spec import OTLP, MetricsSpec
from megatron.fill.work import NewJob, Work
from tests.support.extras import needs
from tests.support.posts import post
from tests.support.segments import write_rank
from tests.support.synthetic import LAST, MS, report_of, synthetic_run
from tests.support.waiting import until

needs("prometheus_client", "metrics")
from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from megatron.fill.wings.operate.metrics import RunMetrics  # noqa: E402
from megatron.fill.wings.operate.serve import handler, link, read_token, traced_iterations  # noqa: E402
from megatron.fill.wings.operate.spans import RunSpans, note_span, sample_every  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(tmp_path) -> Path:
    """The synthetic run with a brake, and a store with three jobs of two users."""
    folder = tmp_path / "run"
    folder.mkdir()
    ranks, workers, jobs = synthetic_run()
    begin_segment(folder, "train", 2)
    records = read_segments(folder)[-1].folder
    named = {job.name: job for job in jobs}
    for record in ranks:
        brakes = [BrakeEvent(LAST, 0.03, 8, LAST + 64, MS)]
        write_rank(rank_file(records, record.info.rank), replace(record, brakes=brakes))
        its = [(named[one.job], one) for one in workers if one.rank == record.info.rank]
        write_agent(records / f"agent{record.info.rank}.jsonl", its)
    store = open_store(folder)
    store.submit([NewJob(name, Work("m:C"), user=user) for name, user in (("a", "ada"), ("b", "ada"), ("c", "bob"))])
    store.close()
    return folder


def text(run: Path) -> str:
    registry = CollectorRegistry()
    registry.register(RunMetrics(MetricsSpec(str(run), 0, str(run))))
    return generate_latest(registry).decode()


def values(text: str) -> dict[str, float]:
    """The samples, by name and labels as they are written."""
    return {
        sample.name + "".join(f" {label}" for _, label in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_figures_are_those_of_the_report(run):
    found, report = values(text(run)), report_of(*synthetic_run())
    for stage in report.stages:
        for kind, seconds in stage.bubble_s.items():
            assert found[f"pipefill_bubble_seconds_total {kind} {stage.stage}"] == pytest.approx(seconds)
        assert found[f"pipefill_harvested_seconds_total {stage.stage}"] == pytest.approx(stage.harvested_s)
        assert found[f"pipefill_fillable_seconds_total {stage.stage}"] == pytest.approx(stage.fillable_s)
    assert found["pipefill_iterations_total"] == LAST
    assert found["pipefill_brakes_total"] == found["pipefill_brake_engaged"] == 1
    assert found["pipefill_jobs queued ada"] == 2
    assert found["pipefill_jobs queued bob"] == 1
    assert found["pipefill_store_up"] == 1
    assert found["pipefill_queue_age_seconds"] >= 0
    assert sum(value for name, value in found.items() if name.startswith("pipefill_attempts_total")) == 3


def test_the_dashboard_and_the_alerts_name_only_what_there_is(run):
    there = set(re.findall(r"pipefill_\w+", text(run)))
    for name in ("dashboard.json", "alerts.yml"):
        asked = set(re.findall(r"\bpipefill_\w+", (ROOT / "docs" / "operate" / name).read_text(encoding="utf-8")))
        assert asked
        assert asked <= there, name
    json.loads((ROOT / "docs" / "operate" / "dashboard.json").read_text(encoding="utf-8"))


def test_many_users_are_one(run):
    store = open_store(run)
    store.submit([NewJob(f"j{at}", Work("m:C"), user=f"u{at}") for at in range(50)])
    store.close()
    families = {family.name: family for family in text_string_to_metric_families(text(run))}
    labels = {sample.labels["user"] for sample in families["pipefill_jobs"].samples}
    assert len(labels) == 21
    assert "others" in labels


def test_a_store_that_does_not_answer_is_said(run):
    for path in run.glob("jobs.db*"):
        path.unlink()
    assert values(text(run))["pipefill_store_up"] == 0


@contextmanager
def served(run: Path, token: bytes = b"") -> Iterator[str]:
    metrics = RunMetrics(MetricsSpec(str(run), 0, str(run)))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(metrics, token))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def get(where: str, path: str = "/metrics", **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(f"http://{where}{path}", headers=headers)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_endpoint_wants_its_token(run):
    with served(run, b"secret") as where:
        assert get(where)[0] == 401
        assert get(where, Authorization="Bearer wrong")[0] == 401
        status, body = get(where, Authorization="Bearer secret")
        assert status == 200
        assert "pipefill_bubble_seconds_total" in body
    with served(run) as where:
        assert get(where)[0] == 200
        assert get(where, "/other") == (404, "expected /metrics\n")


def test_a_token_is_the_first_line_of_its_file(tmp_path):
    (tmp_path / "token").write_text(" secret \nmore\n")
    assert read_token(str(tmp_path / "token")) == b"secret"
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="has no token"):
        read_token(str(tmp_path / "empty"))


def test_a_port_alone_means_this_machine():
    metrics = load_settings(["{metrics: 9400}"], ())["metrics"]
    assert (metrics.address, metrics.port, metrics.token_file) == ("127.0.0.1", 9400, None)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")
def test_promtool_likes_names_alerts_and_configuration(run):
    for arguments, given in (
        (["check", "metrics"], text(run)),
        (["check", "rules", "alerts.yml"], ""),
        (["check", "config", "prometheus.yml"], ""),
    ):
        done = subprocess.run(
            ["promtool", *arguments], cwd=ROOT / "docs" / "operate", input=given, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert not done.stderr, done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")
def test_attempts_before_the_first_scrape_count(tmp_path):
    operate = ROOT / "docs" / "operate"
    panels = json.loads((operate / "dashboard.json").read_text(encoding="utf-8"))["panels"]
    shown = next(panel for panel in panels if panel["title"] == "Attempts that ended, per hour")["targets"][0]["expr"]
    labels = {"instance": "n1", "cause": "exited", "severity": "warning"}
    said = {
        "summary": "20 attempts failed in an hour on n1: exited",
        "action": "pipefill list --store RUN; docs/operate.md#jobs-fail",
    }
    series = 'pipefill_attempts_total{state="failed", cause="exited", instance="n1"}'
    asked = {
        "interval": "30s",
        "input_series": [{"series": series, "values": "_ 20x300"}],
        "alert_rule_test": [
            {
                "eval_time": "20m",
                "alertname": "PipeFillJobsFail",
                "exp_alerts": [{"exp_labels": labels, "exp_annotations": said}],
            },
            {"eval_time": "2h", "alertname": "PipeFillJobsFail"},
        ],
        "promql_expr_test": [
            {
                "expr": shown.replace("$instance", ".*"),
                "eval_time": "20m",
                "exp_samples": [{"labels": '{state="failed", cause="exited"}', "value": 20}],
            }
        ],
    }
    file = tmp_path / "test.yml"
    file.write_text(
        json.dumps({"rule_files": [str(operate / "alerts.yml")], "evaluation_interval": "1m", "tests": [asked]})
    )
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus")
def test_a_real_prometheus_scrapes_it(run, tmp_path):
    (tmp_path / "token").write_text("secret")
    with served(run, b"secret") as where:
        config = {
            "global": {"scrape_interval": "1s"},
            "rule_files": [str(ROOT / "docs" / "operate" / "alerts.yml")],
            "scrape_configs": [
                {
                    "job_name": "pipefill",
                    "authorization": {"credentials_file": str(tmp_path / "token")},
                    "static_configs": [{"targets": [where]}],
                }
            ],
        }
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))
        command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
        log = tmp_path / "prometheus.log"
        with (
            log.open("wb") as stderr,
            subprocess.Popen([*command, "--web.listen-address=127.0.0.1:0"], stderr=stderr) as prometheus,
        ):
            try:

                def answer() -> list:
                    listening = re.search(r'msg="Listening on" address=(\S+)', log.read_text())
                    if not listening:
                        return []
                    status, body = get(listening[1], "/api/v1/query?query=sum(pipefill_bubble_seconds_total)")
                    return json.loads(body)["data"]["result"] if status == 200 else []

                until(lambda: prometheus.poll() is not None or bool(answer()), 30, 0.2)
                total = sum(report_of(*synthetic_run()).total.bubble_s.values())
                assert float(answer()[0]["value"][1]) == pytest.approx(total)
            finally:
                prometheus.terminate()


@contextmanager
def collector(run: Path, **environ: str) -> Iterator[dict[str, list[bytes]]]:
    """A collector to which the run's server sends; what it has been sent, by path."""
    needs("opentelemetry.exporter.otlp.proto.http", "metrics")
    seen: dict[str, list[bytes]] = {}

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["Content-Length"]))
            seen.setdefault(self.path, []).append(sent)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environ = (
        os.environ
        | {OTLP: f"http://127.0.0.1:{server.server_port}", "OTEL_EXPORTER_OTLP_COMPRESSION": "none"}
        | environ
    )
    command = [sys.executable, "-m", "megatron.fill.wings.operate.serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environ) as process:
        assert process.stdin is not None
        process.stdin.write(MetricsSpec(str(run), 0, str(run)).to_json().encode())
        process.stdin.close()
        try:
            yield seen
        finally:
            process.kill()
            server.shutdown()


def test_they_go_out_by_otlp(run):
    with collector(run, OTEL_METRIC_EXPORT_INTERVAL="200") as seen:
        until(lambda: "/v1/metrics" in seen, 30)
        assert set(seen) == {"/v1/metrics"}  # spans are not asked for
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    request = ExportMetricsServiceRequest.FromString(seen["/v1/metrics"][0])
    metrics = {
        one.name: one for its in request.resource_metrics for scope in its.scope_metrics for one in scope.metrics
    }
    points = metrics["pipefill_bubble_seconds"].sum
    total = sum(report_of(*synthetic_run()).total.bubble_s.values())
    assert points.is_monotonic
    assert sum(point.as_double for point in points.data_points) == pytest.approx(total)
    named = {its.key: its.value.string_value for its in request.resource_metrics[0].resource.attributes}
    assert named["service.name"] == "pipefill"


def test_sampled_bubbles_go_out_by_otlp_as_spans(run):
    asked = {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_TRACES_SAMPLER_ARG": "0.5", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with collector(run, **asked) as seen:
        until(lambda: "/v1/traces" in seen, 30)
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest.FromString(seen["/v1/traces"][0])
    spans = [span for its in request.resource_spans for scope in its.scope_spans for span in scope.spans]
    iterations = [span for span in spans if span.name == "iteration"]
    assert iterations
    for its in iterations:
        bubbles = [span for span in spans if span.parent_span_id == its.span_id]
        assert bubbles
        for bubble in bubbles:
            assert bubble.trace_id == its.trace_id
            assert bubble.name.startswith("bubble ")


def sampled(run: Path, every: int) -> list:
    return RunMetrics(MetricsSpec(str(run), 0, str(run)), every).samples()


def test_each_sampled_iteration_is_one_trace_of_all_ranks_with_its_bubbles_and_jobs(run):
    needs("opentelemetry.exporter.otlp.proto.http", "metrics")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    spans = RunSpans(run / "records" / "1", exporter)
    for rank, sample in sampled(run, 2):
        spans.add(rank, sample)
    spans.provider.force_flush()
    made: list[Any] = list(exporter.get_finished_spans())
    found = {
        (span.attributes["pipefill.rank"], span.attributes["pipefill.iteration"]): span
        for span in made
        if span.name == "iteration"
    }
    records, workers, _ = synthetic_run()
    expected = {
        (record.info.rank, its.iteration): its.end_ns - its.start_ns
        for record in records
        for its in record.iterations[:-1]  # the last one may not be complete
        if its.iteration % 2 == 0
    }
    assert {at: span.end_time - span.start_time for at, span in found.items()} == expected
    for record in records:
        for iteration in {iteration for rank, iteration in expected if rank == record.info.rank}:
            whole = found[record.info.rank, iteration]
            below = [span for span in made if span.parent == whole.context]
            its = [one for one in record.bubbles if one.iteration == iteration and not one.forward_only]
            assert sorted(span.end_time - span.start_time for span in below) == sorted(one.duration_ns for one in its)
            assert {span.context.trace_id for span in below} == {whole.context.trace_id}
    traces = {(iteration, span.context.trace_id) for (_, iteration), span in found.items()}
    assert len(traces) == len({iteration for iteration, _ in traces}) == len({trace for _, trace in traces})
    jobs = {span.attributes["pipefill.job"] for span in made if "pipefill.job" in span.attributes}
    assert jobs
    assert jobs <= {worker.job for worker in workers}


def test_an_iteration_is_linked_to_the_span_that_the_training_itself_made_of_it(run):
    """As Megatron with --otel-enabled: a span is current when an iteration begins."""
    needs("opentelemetry.exporter.otlp.proto.http", "metrics")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    noted: deque[Traced] = deque()
    tracer = TracerProvider().get_tracer("megatron")
    own = {}
    for iteration in range(1, 5):
        note_span(2, noted, iteration)  # outside of any span
        with tracer.start_as_current_span("megatron.train.iteration") as span:
            note_span(2, noted, iteration)
            own[iteration] = span.get_span_context()
    assert [one.iteration for one in noted] == [2, 4]
    segment = run / "records" / "1"
    info = synthetic_run()[0][0].info
    AccountWriter(segment, info, Account(), lambda: True, noted).close()
    assert traced_iterations(segment, info.rank + 7) == {}  # it has left none
    known = traced_iterations(segment, info.rank)
    exporter = InMemorySpanExporter()
    spans = RunSpans(segment, exporter)
    for rank, sample in sampled(run, 2):
        if rank.info.rank == info.rank:
            spans.add(rank, sample, known.get(sample.iteration))
    spans.provider.force_flush()
    made: list[Any] = [span for span in exporter.get_finished_spans() if span.name == "iteration"]
    links = {span.attributes["pipefill.iteration"]: [link.context for link in span.links] for span in made}
    assert len(links) > 2
    for iteration, its in links.items():
        expected = [(own[iteration].trace_id, own[iteration].span_id)] if iteration in (2, 4) else []
        assert [(one.trace_id, one.span_id) for one in its] == expected
    assert {span.attributes["pipefill.run"] for span in made} == {str(segment)}


def test_a_sample_waits_one_look_for_an_account_that_is_behind(run):
    segment, info = run / "records" / "1", synthetic_run()[0][0].info

    def traced(*iterations: int) -> None:
        its = deque(Traced(iteration, "a" * 32, "b" * 16) for iteration in iterations)
        AccountWriter(segment, info, Account(), lambda: True, its).close()

    samples = [(rank, sample) for rank, sample in sampled(run, 2) if rank.info.rank == info.rank]
    numbers = [sample.iteration for _, sample in samples]
    assert len(numbers) > 3
    found, behind = link(segment, [], samples)  # nobody traces
    assert ([sample.iteration for _, sample, _ in found], behind) == (numbers, [])
    traced(*numbers[:2])
    found, behind = link(segment, [], samples)
    assert [(sample.iteration, step is not None) for _, sample, step in found] == [(at, True) for at in numbers[:2]]
    assert behind == samples[2:]
    traced(*numbers[:3])
    found, behind = link(segment, behind, [])
    assert [(sample.iteration, step is not None) for _, sample, step in found] == [
        (at, at == numbers[2]) for at in numbers[2:]
    ]
    assert behind == []


def test_samples_are_told_once_and_none_unless_asked_for(run):
    metrics = RunMetrics(MetricsSpec(str(run), 0, str(run)), 1)
    first = metrics.samples()
    assert len({(rank.info.rank, sample.iteration) for rank, sample in first}) == len(first) > 0
    assert metrics.samples() == []
    assert sampled(run, 0) == []


@pytest.mark.parametrize(
    ("environ", "every"),
    [
        ({}, 0),
        ({"OTEL_TRACES_EXPORTER": "none"}, 0),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, 100),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_TRACES_SAMPLER_ARG": "0.25"}, 4),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_TRACES_SAMPLER_ARG": "0"}, 0),
    ],
)
def test_the_environment_asks_for_spans(environ, every):
    assert sample_every(environ) == 0  # without a collector
    assert sample_every(environ | {OTLP: "http://localhost:4318"}) == every


@pytest.mark.parametrize("ratio", ["much", "-1", "2", "nan"])
def test_a_ratio_that_is_none_is_said(ratio):
    with pytest.raises(ValueError, match="expected a number from 0 to 1"):
        sample_every({OTLP: "http://localhost:4318", "OTEL_TRACES_EXPORTER": "otlp", "OTEL_TRACES_SAMPLER_ARG": ratio})


def test_the_agent_starts_it_again():
    server = MetricsServer(MetricsSpec("/nonexistent", 0, ""))  # ends at once
    server.keep()
    first = server._process
    assert first is not None
    first.wait()
    server.keep()
    assert server._process is not None
    assert server._process.pid != first.pid
    server._process.kill()
    server._process.wait()


@pytest.mark.parametrize(
    ("given", "environ", "served"),
    [
        ({"place": 0, "rank": 0}, {}, None),
        ({"place": 1, "metrics": {"port": 9400}}, {OTLP: "http://localhost:4318"}, None),
        ({"place": 0, "rank": 0}, {OTLP: "http://localhost:4318"}, {"store": "jobs.db"}),
        ({"place": 0, "node": 2, "metrics": {"port": 9400}}, {}, {"node": 2, "port": 9400}),
    ],
)
def test_one_agent_of_a_node_has_the_server_where_it_is_asked_for(tmp_path, monkeypatch, given, environ, served):
    monkeypatch.delenv(OTLP, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with post(tmp_path, **given) as at:
        spec = replace(at.context.spec, store="jobs.db")
        found = [one for module in wings.modules("agent") for one in module.attendants(spec, at.context.control)]
    expected = [] if served is None else [replace(MetricsSpec(str(tmp_path), 0, ""), **served)]
    assert [one._spec for one in found if isinstance(one, MetricsServer)] == expected


def test_a_rank_notes_the_spans_that_the_environment_asks_for(monkeypatch):
    monkeypatch.setattr(attached, "spans", None)
    monkeypatch.setenv(OTLP, "http://localhost:4318")
    info = synthetic_run()[0][0].info
    for exporter, noted in (("none", False), ("otlp", True)):
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", exporter)
        for module in wings.modules("rank"):
            module.attend(FillSettings(), info, deque())
        assert (attached.spans is not None) is noted
