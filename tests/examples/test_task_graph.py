from __future__ import annotations

import csv
import gzip
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples.tasks.edges import power_law_graph, read_graph
from examples.tasks.factorization import MatrixFactorization
from examples.tasks.pagerank import PageRank
from megatron.fill.worker import checkpoint
from tests.support.drive import begin, drive, finish, task_of

EXACT = {"tolerance": 1e-13, "max_iterations": 2000}


def write(path: Path, text: str) -> str:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return str(path)


def ranks_of(directory: Path) -> dict[int, float]:
    with (directory / "pagerank.csv").open(newline="") as file:
        return {int(row["node"]): float(row["rank"]) for row in csv.DictReader(file)}


def distance(graph: nx.DiGraph, ranks: dict[int, float], damping: float = 0.85) -> float:
    expected = nx.pagerank(graph, alpha=damping, tol=1e-15, max_iter=5000)
    assert ranks.keys() == expected.keys()
    return sum(abs(expected[node] - ranks[node]) for node in expected)


# --- the graph


def test_the_generated_graph_has_a_power_law():
    graph = power_law_graph(20_000, 200_000, seed=0)
    assert len(set(zip(graph.sources.tolist(), graph.targets.tolist(), strict=True))) == 200_000
    assert not (graph.sources == graph.targets).any()
    for ends in (graph.sources, graph.targets):
        degrees = np.sort(np.bincount(ends, minlength=20_000))
        assert degrees[-1] > 100 * np.median(degrees)  # there are hubs
        assert degrees[0] == 0
    assert power_law_graph(20_000, 200_000, seed=0).checksum == graph.checksum
    assert power_law_graph(20_000, 200_000, seed=1).checksum != graph.checksum


@pytest.mark.parametrize("name", ["edges.txt", "edges.txt.gz"])
def test_a_snap_file_is_read(tmp_path, name):
    text = "# Directed graph\n# FromNodeId\tToNodeId\n30\t-1400\n\n  7 30 # a comment\r\n   \n7\t9223372036854775807"
    graph = read_graph(Path(write(tmp_path / name, text)))
    named = [(int(graph.ids[s]), int(graph.ids[t])) for s, t in zip(graph.sources, graph.targets, strict=True)]
    assert named == [(30, -1400), (7, 30), (7, 2**63 - 1)]
    assert graph.values is None


def test_a_third_column_is_the_edges_value(tmp_path):
    graph = read_graph(Path(write(tmp_path / "rated", "1 2 0.5\n2 3 -4e2\n")))
    assert graph.values is not None
    assert graph.values.tolist() == [0.5, -400.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# one\n1 2\n3 x\n", "line 3: found '3 x'; expected 'from to' as before"),
        ("1 2\n3\n", "line 2: found '3'; expected 'from to' as before"),
        ("1 2\n3 4 5\n", "line 2: found '3 4 5'; expected 'from to' as before"),
        ("1 2 5\n\n3 4\n", "line 3: found '3 4'; expected 'from to value' as before"),
        ("1 2 5\n3 4 nan\n", "line 2: found '3 4 nan'; expected 'from to value'"),
        ("1,2\n3,4\n", "line 1: found '1,2'; expected 'from to' or 'from to value'"),
        ("1 2 3 4\n", "line 1: found '1 2 3 4'; expected 'from to'"),
        ("1 2\n1 9223372036854775808\n", "line 2: found '1 9223372036854775808'; .* int64"),
        ("1 2\n1.5 2\n", "line 2: found '1.5 2'"),
        ("# nothing\n\n", "found no edge; expected lines 'from to'"),
    ],
)
@pytest.mark.parametrize("task_class", [PageRank, MatrixFactorization])
def test_a_wrong_line_is_named(tmp_path, task_class, text, message):
    path = write(tmp_path / "edges.txt", text)
    with pytest.raises(ValueError, match=message) as caught:
        begin(task_class, tmp_path, edges=path)
    assert path in str(caught.value)


@pytest.mark.parametrize("content", [None, b"not gzip", gzip.compress(b"1 2\n" * 1000, mtime=0)[:-9]])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / "edges.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"edges\.gz: cannot be read: .*; expected an edge list"):
        begin(PageRank, tmp_path, edges=str(path))


# --- PageRank


def test_pagerank_equals_networkx(tmp_path):
    pytest.importorskip("scipy", reason="networkx needs it, from the extra tasks")
    drive(PageRank, tmp_path, nodes=500, edges=3000, seed=3, chunk_edges=700, **EXACT)
    graph = power_law_graph(500, 3000, seed=3)
    reference: Any = nx.DiGraph()
    reference.add_nodes_from(range(500))
    reference.add_edges_from(zip(graph.sources.tolist(), graph.targets.tolist(), strict=True))
    assert any(degree == 0 for _, degree in reference.out_degree())  # dangling nodes are there
    assert distance(reference, ranks_of(tmp_path)) < 1e-11


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    edges=st.lists(st.tuples(st.integers(-3, 9), st.integers(-3, 9)), min_size=1, max_size=40),
    chunk=st.integers(1, 50),
    damping=st.sampled_from([0.0, 0.3, 0.85]),
)
def test_pagerank_equals_networkx_on_any_graph(tmp_path, edges, chunk, damping):
    pytest.importorskip("scipy", reason="networkx needs it, from the extra tasks")
    path = write(tmp_path / "edges.txt", "".join(f"{source} {target}\n" for source, target in edges))
    drive(PageRank, tmp_path, edges=path, chunk_edges=chunk, damping=damping, **EXACT)
    assert distance(nx.DiGraph(edges), ranks_of(tmp_path), damping) < 1e-9


def test_pagerank_reports(tmp_path):
    machine = begin(PageRank, tmp_path, nodes=3000, edges=9000)
    work = finish(machine)
    context = machine.task.context
    result = context.result
    assert result["converged"] is True
    assert sum(work) == result["iterations"] * 9000 == context.total_work
    ranks = ranks_of(tmp_path)
    assert sum(ranks.values()) == pytest.approx(1)
    assert list(ranks) == sorted(ranks)
    assert [rank for _, rank in result["top"]] == sorted(ranks.values(), reverse=True)[:10]
    assert all(ranks[node] == rank for node, rank in result["top"])
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert {path.name for path in tmp_path.iterdir()} == {"pagerank.csv", "result.json"}


def test_pagerank_says_when_it_did_not_converge(tmp_path):
    task = drive(PageRank, tmp_path, nodes=100, edges=500, max_iterations=2)
    assert task.context.result["converged"] is False
    assert task.context.result["iterations"] == 2
    assert len(ranks_of(tmp_path)) == 100


def test_pagerank_repeats(tmp_path):
    once = drive(PageRank, tmp_path / "once", nodes=300, edges=2000)
    machine = begin(PageRank, tmp_path / "thrice", nodes=300, edges=2000, repeat=3)
    work = sum(finish(machine))
    assert once.context.total_work is not None
    assert work == machine.task.context.total_work == 3 * once.context.total_work
    assert torch.equal(task_of(machine, PageRank).ranks, once.ranks)
    assert ranks_of(tmp_path / "once") == ranks_of(tmp_path / "thrice")


def test_pagerank_goes_on_for_ever(tmp_path):
    machine = begin(PageRank, tmp_path, nodes=30, edges=100, repeat=0, chunk_edges=100)
    for _ in range(3000):
        machine.run_next_step()
    assert machine.task.context.total_work is None
    machine.stop()


@pytest.mark.parametrize("stride", [1, 7, 31])
def test_pagerank_resumes_exactly(tmp_path, stride):
    args = {"nodes": 2500, "edges": 9000, "chunk_edges": 4000, "repeat": 2}
    whole = drive(PageRank, tmp_path / "whole", **args)
    directory = tmp_path / "parts"
    state, done = None, False
    work = 0.0
    rounds = 0
    while not done:
        machine = begin(PageRank, directory, state, **args)
        try:
            for _ in range(stride + rounds % 3):  # varied, as writing the file begins anew each time
                work += machine.run_next_step()
        except StopIteration:
            done = True
        rounds += 1
        checkpoint.save(directory, machine.state_dict() or {})
        machine.stop()
        state = checkpoint.load(directory)
    assert torch.equal(task_of(machine, PageRank).ranks, whole.ranks)
    assert machine.task.context.result == whole.context.result
    assert work == whole.context.total_work == machine.task.context.total_work
    assert ranks_of(directory) == ranks_of(tmp_path / "whole")


@pytest.mark.parametrize("task_class", [PageRank, MatrixFactorization])
def test_the_checkpoint_of_another_graph_is_refused(tmp_path, task_class):
    state = begin(task_class, tmp_path, nodes=50, edges=200).task.state_dict()
    with pytest.raises(ValueError, match="the checkpoint is of another graph"):
        begin(task_class, tmp_path, state, nodes=50, edges=200, seed=1)


# --- matrix factorisation


def errors_of(directory: Path, **args) -> list[float]:
    machine = begin(MatrixFactorization, directory, **args)
    found: list[float] = []
    for epoch in range(1, args["epochs"] + 1):
        while machine.task.context.result.get("epoch", 0) < epoch:
            machine.run_next_step()
        found.append(machine.task.context.result["rmse"])
    assert finish(machine) == []
    return found


def test_the_error_falls_with_every_epoch(tmp_path):
    errors = errors_of(tmp_path, nodes=2000, edges=20_000, epochs=12, batch_edges=512)
    assert all(later < earlier for earlier, later in pairwise(errors))
    assert errors[-1] < 0.45 * errors[0]


def test_a_files_values_are_learnt(tmp_path):
    rows, columns = np.random.default_rng(0).normal(size=(2, 60))
    text = "".join(f"{u} {100 + v} {1000 + 50 * rows[u] * columns[v]:.4f}\n" for u in range(60) for v in range(60))
    path = write(tmp_path / "rated", text)
    errors = errors_of(tmp_path, edges=path, epochs=20, batch_edges=128, factors=4, regularization=0.001)
    assert 20 < errors[0] < 50  # in the file's units, where the standard deviation is 50
    assert errors[-1] < 5


def by_numpy(table: np.ndarray, index: np.ndarray, changes: np.ndarray) -> None:
    counts = np.bincount(index, minlength=len(table))[index]
    np.add.at(table, index, changes / counts[:, None])


def test_an_epoch_equals_what_numpy_computes(tmp_path):
    machine = begin(MatrixFactorization, tmp_path, nodes=200, edges=2000, batch_edges=300, epochs=1)
    task = task_of(machine, MatrixFactorization)
    rows, columns = (table.numpy().astype(float) for table in (task.rows, task.columns))
    sources, targets, values = (getattr(task, name).numpy() for name in ("_sources", "_targets", "_values"))
    finish(machine)
    squares = 0.0
    for begin_at in range(0, 2000, 300):
        batch = slice(begin_at, begin_at + 300)
        of, to = rows[sources[batch]], columns[targets[batch]]
        errors = values[batch] - (of * to).sum(1)
        squares += errors @ errors
        gain = (0.5 * errors / (1 + (of * of).sum(1) + (to * to).sum(1)))[:, None]
        by_numpy(rows, sources[batch], gain * to - 0.005 * of)
        by_numpy(columns, targets[batch], gain * of - 0.005 * to)
    assert np.allclose(task.rows.numpy(), rows, atol=1e-5)
    assert np.allclose(task.columns.numpy(), columns, atol=1e-5)
    assert task.context.result["rmse"] == pytest.approx(task._scale * math.sqrt(squares / 2000), rel=1e-5)


def test_it_never_diverges(tmp_path):
    edges = "".join(f"{i % 7} {i} {10**6 * (i % 50 == 0)}\n" for i in range(500))  # hubs and outliers
    path = write(tmp_path / "rated", edges)
    errors = errors_of(tmp_path, edges=path, epochs=100, batch_edges=100, learning_rate=0.99)
    assert all(map(math.isfinite, errors))
    assert errors[-1] < errors[0]


def test_equal_values_are_no_trouble(tmp_path):
    path = write(tmp_path / "rated", "1 2 3\n2 3 3\n")
    assert errors_of(tmp_path, edges=path, epochs=50)[-1] < 0.1


def test_factorisation_counts_edges_and_resumes_exactly(tmp_path):
    args: dict[str, Any] = {"nodes": 300, "edges": 2000, "batch_edges": 300, "epochs": 4}
    machine = begin(MatrixFactorization, tmp_path / "whole", **args)
    assert sum(finish(machine)) == machine.task.context.total_work == 8000
    directory = tmp_path / "parts"
    state = None
    for steps in (3, 7, 9):
        part = begin(MatrixFactorization, directory, state, **args)
        for _ in range(steps):
            part.run_next_step()
        checkpoint.save(directory, part.state_dict() or {})
        part.run_next_step()
        state = checkpoint.load(directory)
    part = begin(MatrixFactorization, directory, state, **args)
    finish(part)
    ours, whole = task_of(part, MatrixFactorization), task_of(machine, MatrixFactorization)
    assert torch.equal(ours.rows, whole.rows)
    assert torch.equal(ours.columns, whole.columns)
    assert part.task.context.result == machine.task.context.result


def test_without_epochs_it_goes_on(tmp_path):
    machine = begin(MatrixFactorization, tmp_path, nodes=20, edges=50, epochs=None)
    for _ in range(50):
        machine.run_next_step()
    assert machine.task.context.total_work is None
    assert machine.task.context.result["epoch"] == 50


@pytest.mark.parametrize(
    ("task_class", "args", "message"),
    [
        (PageRank, {"edges": 0}, "edges is 0: expected a whole number of at least 1"),
        (PageRank, {"edges": 2.5}, "edges is 2.5: expected a whole number"),
        (PageRank, {"edges": 100, "nodes": 10}, "edges is 100: expected 1 to 22, a quarter of all pairs"),
        (PageRank, {"chunk_edges": 0}, "chunk_edges is 0: expected a whole number of at least 1"),
        (PageRank, {"damping": 1}, "damping is 1: expected a number of at least 0 and below 1"),
        (PageRank, {"tolerance": -1e-3}, "tolerance is -0.001: expected a number of at least 0"),
        (PageRank, {"repeat": -1}, "repeat is -1: expected a whole number of at least 0"),
        (MatrixFactorization, {"factors": 0}, "factors is 0: expected"),
        (MatrixFactorization, {"learning_rate": 1.5}, "learning_rate is 1.5: expected"),
        (MatrixFactorization, {"batch_edges": True}, "batch_edges is True: expected"),
        (MatrixFactorization, {"epochs": -2}, "epochs is -2: expected"),
    ],
)
def test_wrong_arguments(tmp_path, task_class, args, message):
    with pytest.raises(ValueError, match=message):
        begin(task_class, tmp_path, **args)
