"""The network between ranks: its file, the tournament that measures it, what follows from times, and drift."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from megatron.fill.errors import ConfigError, NetworkError
from megatron.fill.wings.configure.commands import network as command
from megatron.fill.wings.configure.draw import draw_network
from megatron.fill.wings.configure.drift import MOST_DAYS, again_days, drifts
from megatron.fill.wings.configure.measure import groups
from megatron.fill.wings.configure.network import Network, Place
from megatron.fill.wings.configure.rounds import rounds
from megatron.fill.wings.configure.samples import Measured, Reduction, Transfer, network_of, spread, write_csv

PLACES = (Place("a", 0), Place("a", 1), Place("b", 0))
NETWORK = Network(
    ranks=PLACES,
    bandwidth_bytes_per_s=((None, 9e9, 1e9), (8e9, None, 2e9), (1.5e9, 2.5e9, None)),
    latency_s=((0.0, 1e-6, 5e-6), (1e-6, 0.0, 5e-6), (5e-6, 5e-6, 0.0)),
    spread=((0.0, 0.01, 0.02), (0.01, 0.0, 0.0), (0.02, 0.02, 0.0)),
    backend="nccl",
    measured_at="2026-01-01T00:00:00+00:00",
)


def test_what_is_saved_is_loaded(tmp_path):
    path = tmp_path / "n.json"
    NETWORK.save(path)
    assert Network.load(path) == NETWORK
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["ranks"][1] == {"host": "a", "local_rank": 1}
    assert data["bandwidth_bytes_per_s"][0] == [None, 9e9, 1e9]
    assert list(data) == ["ranks", "bandwidth_bytes_per_s", "latency_s", "spread", "backend", "measured_at"]


def test_diagonals_may_be_null_or_0(tmp_path):
    path = tmp_path / "n.json"
    NETWORK.save(path)
    data = json.loads(path.read_text(encoding="utf-8"))
    for number in range(3):
        data["bandwidth_bytes_per_s"][number][number] = 0
        data["latency_s"][number][number] = data["spread"][number][number] = None
    path.write_text(json.dumps(data), encoding="utf-8")
    assert Network.load(path) == NETWORK


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ranks", [{"host": "a", "local_rank": 0}], "ranks has 1 entries: expected two or more"),
        ("ranks", "abc", "ranks is 'abc': expected a list"),
        ("ranks", [{"host": "a"}] * 3, r"ranks\[0\] is {'host': 'a'}: expected host and local_rank"),
        ("ranks", [{"host": "a", "local_rank": 0}] * 3, r"ranks\[1\] is a:0, as ranks\[0\]: expected each once"),
        ("ranks", [{"host": "", "local_rank": 0}], r"ranks\[0\].host is '': expected a name"),
        ("ranks", [{"host": "a", "local_rank": -1}], r"ranks\[0\].local_rank is -1: expected 0 or more"),
        ("bandwidth_bytes_per_s", [[None, 1], [1, None]], "bandwidth_bytes_per_s has 2 rows: expected 3"),
        ("bandwidth_bytes_per_s", 1, "bandwidth_bytes_per_s is 1: expected a list of rows"),
        ("bandwidth_bytes_per_s", [1, 2, 3], r"bandwidth_bytes_per_s\[0\] is 1: expected a list"),
        ("latency_s", [[0, 1, 1], [1, 0], [1, 1, 0]], r"latency_s\[1\] has 2 columns: expected 3"),
        ("latency_s", [[0, 1, 1], [1, 0, 0], [1, 1, 0]], r"latency_s\[1\]\[2\] is 0: expected a finite number above 0"),
        ("latency_s", [[0, 1, 1], [1, 0, "1"], [1, 1, 0]], r"latency_s\[1\]\[2\] is '1': expected a finite number"),
        ("latency_s", [[0, 1, 1], [1, 3, 1], [1, 1, 0]], r"latency_s\[1\]\[1\] is 3: expected null or 0"),
        ("spread", [[0, 0, 0], [0, 0, -1], [0, 0, 0]], r"spread\[1\]\[2\] is -1: expected a finite number, 0 or more"),
        ("backend", "mpi", "backend is 'mpi': expected gloo or nccl"),
        ("measured_at", "2026-01-01T00:00:00", "measured_at is '2026-01-01T00:00:00': expected such as"),
        ("measured_at", 5, "measured_at is 5: expected such as"),
        ("seed", 5, "unknown field seed; expected ranks, bandwidth"),
    ],
)
def test_errors_name_file_and_field(tmp_path, field, value, message):
    path = tmp_path / "n.json"
    NETWORK.save(path)
    data = json.loads(path.read_text(encoding="utf-8")) | {field: value}
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"n.json: {message}"):
        Network.load(path)


@pytest.mark.parametrize("text", ["1e999", "NaN"])
def test_what_is_not_finite_is_refused(tmp_path, text):
    path = tmp_path / "n.json"
    NETWORK.save(path)
    path.write_text(path.read_text(encoding="utf-8").replace("9000000000.0", text), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"n\.json: is not JSON"):
        Network.load(path)


def test_a_missing_field_is_named(tmp_path):
    path = tmp_path / "n.json"
    path.write_text('{"ranks": []}', encoding="utf-8")
    with pytest.raises(ConfigError, match="bandwidth_bytes_per_s is missing"):
        Network.load(path)


@pytest.mark.parametrize("sizes", [(2,), (8,), (1, 1), (1, 1, 1), (2, 2, 2, 2), (4, 4, 4), (3, 1, 2), (8, 8), (1,) * 9])
def test_every_pair_meets_once_and_a_host_is_in_one_pair_of_a_round(sizes):
    hosts = [f"host{number}" for number, size in enumerate(sizes) for _ in range(size)]
    found = rounds(hosts)
    assert sorted(pair for together in found for pair in together) == list(combinations(range(len(hosts)), 2))
    for together in found:
        busy = [host for low, high in together for host in {hosts[low], hosts[high]}]
        assert len(busy) == len(set(busy)) > 0


@pytest.mark.parametrize(("nodes", "each"), [(2, 2), (4, 1), (4, 8), (16, 8)])
def test_there_are_no_more_rounds_than_needed(nodes, each):
    hosts = [str(rank // each) for rank in range(nodes * each)]
    assert len(rounds(hosts)) == each * each * (nodes - 1) + each * (each - 1) // 2


def test_the_groups_of_all_reduces():
    assert groups("aabb") == [[(0, 1), (2, 3)], [(0, 2)], [(1, 3)], [(0, 1, 2, 3)]]
    assert groups("abab") == [[(0, 2), (1, 3)], [(0, 1)], [(2, 3)], [(0, 1, 2, 3)]]
    assert groups("abc") == [[(0, 1, 2)]]
    assert groups("aa") == [[(0, 1)]]
    assert groups("aaab") == [[(0, 1, 2)], [(0, 3)], [(0, 1, 2, 3)]]


def timed(bandwidth: float, latency_s: float, sizes: tuple[int, ...] = (8, 1000, 10**6)) -> tuple[Transfer, ...]:
    """Between two ranks; one way has twice the bandwidth."""
    return tuple(
        Transfer(a, b, size, tuple(2 * latency_s + (size - 8) / bandwidth / (1 + a) for _ in range(3)))
        for a, b in ((0, 1), (1, 0))
        for size in sizes
    )


def measured(transfers: tuple[Transfer, ...]) -> Measured:
    reductions = (Reduction((0, 1), 1000, (2e-6, 1e-6, 3e-6)),)
    return Measured(PLACES[:2], transfers, reductions, "gloo", "2026-01-01T00:00:00+00:00")


def test_bandwidth_and_latency_follow_from_the_times():
    found = network_of(measured(timed(1e9, 2e-6)))
    (_, there), (back, _) = found.bandwidth_bytes_per_s
    assert (there, back) == (pytest.approx(1e9), pytest.approx(2e9))
    assert found.latency_s == ((0, pytest.approx(2e-6)), (pytest.approx(2e-6), 0))


def test_spread_is_that_of_the_largest_messages():
    small, large = Transfer(0, 1, 8, (1.0, 1.0, 1.0)), Transfer(0, 1, 80, (2.0, 4.0, 3.0, 5.0, 6.0))
    found = network_of(measured((large, small, replace(small, sender=1, receiver=0), Transfer(1, 0, 9, (2.0,)))))
    assert found.spread == ((0, (5 - 3) / 4), (0, 0))
    assert spread([3.0]) == 0


def test_times_that_make_no_network_are_refused():
    with pytest.raises(NetworkError, match="a:0 to a:1 was measured with 1 sizes of messages"):
        network_of(measured(timed(1e9, 1e-6, sizes=(8,))))
    with pytest.raises(NetworkError, match="a:0 to a:1: 80 bytes were not slower than 8; expected larger sizes"):
        network_of(measured((Transfer(0, 1, 8, (2.0,)), Transfer(0, 1, 80, (1.0,)))))


@pytest.mark.parametrize(("csv", "kept"), [(None, "n.json.csv"), ("given.csv", "given.csv")])
def test_times_that_make_no_network_are_kept(tmp_path, monkeypatch, csv, kept):
    """The measurement itself needs a launcher; what comes after it does not."""
    unlucky = measured((Transfer(0, 1, 8, (2.0,)), Transfer(0, 1, 80, (1.0,))))
    monkeypatch.setattr(command, "_measure", lambda *_: unlucky)
    with pytest.raises(NetworkError, match=f"80 bytes were not slower than 8.* are in {tmp_path / kept}$"):
        command.network(
            measured=None, output=tmp_path / "n.json", png=None, csv=tmp_path / csv if csv else None, compare=None
        )
    assert len((tmp_path / kept).read_text(encoding="utf-8").splitlines()) == 1 + 2 + 1
    assert not (tmp_path / "n.json").exists()


def test_the_csv_has_each_size(tmp_path):
    write_csv(tmp_path / "n.csv", measured(timed(1e9, 2e-6)))
    lines = (tmp_path / "n.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + 6 + 1
    assert lines[1] == "p2p,a:0,a:1,8,3,2e-06,0,4000000"
    assert lines[3].startswith("p2p,a:0,a:1,1000000,3,0.001001992,0,")
    assert lines[7] == "all-reduce,a:0,a:1,1000,3,2e-06,0.5,500000000"  # 2 (n - 1) / n of the bytes


def later(day: int, factor: float) -> Network:
    """A day on which the link from the first to the last rank has another bandwidth."""
    rows: Any = [list(row) for row in NETWORK.bandwidth_bytes_per_s]
    rows[0][2] *= factor
    return replace(
        NETWORK, bandwidth_bytes_per_s=tuple(map(tuple, rows)), measured_at=f"2026-01-{1 + day:02}T00:00:00+00:00"
    )


def test_drift_is_told_by_link():
    worst, *others = drifts(NETWORK, later(5, 0.8))
    assert (str(worst.sender), str(worst.receiver)) == ("a:0", "b:0")
    assert worst.change == pytest.approx(-0.2)
    assert worst.surely == pytest.approx(0.18)
    assert len(others) == 5
    assert {one.change for one in others} == {0.0}


def test_links_are_found_by_their_places():
    turned = replace(
        later(1, 1.0),
        ranks=(Place("c", 0), PLACES[2], PLACES[0]),
        bandwidth_bytes_per_s=((None, 1.0, 1.0), (1.0, None, 3e9), (1.0, 1e9, None)),
    )
    assert [(str(one.sender), str(one.receiver), one.change) for one in drifts(NETWORK, turned)] == [
        ("b:0", "a:0", pytest.approx(1.0)),
        ("a:0", "b:0", 0.0),
    ]


@pytest.mark.parametrize(
    ("factor", "days"), [(0.93, 10.0), (0.88, 5.0), (1.0, MOST_DAYS), (0.99, MOST_DAYS), (0.979, MOST_DAYS)]
)
def test_when_to_measure_again(factor, days):
    """What goes on as it went in five days, beyond a spread of 2%, has changed by 10% in so many days."""
    new = later(5, factor)
    assert again_days(NETWORK, new, drifts(NETWORK, new)) == pytest.approx(days)


@pytest.mark.parametrize(("hour", "again"), [(12, "1.2 hours"), (1, "5.9 minutes")])
def test_when_to_measure_again_has_a_readable_unit(tmp_path, capsys, monkeypatch, hour, again):
    monkeypatch.setenv("COLUMNS", "80")
    NETWORK.save(tmp_path / "old.json")
    new = replace(later(0, 2.04), measured_at=f"2026-01-01T{hour:02}:00:00+00:00")
    new.save(tmp_path / "new.json")
    command.network(measured=tmp_path / "new.json", compare=tmp_path / "old.json")
    said = capsys.readouterr().out
    assert f"Measure again in {again}: before a link changes" in said
    assert max(map(len, said.splitlines())) <= 80


def test_what_cannot_be_compared_is_refused():
    new = later(5, 1.0)
    with pytest.raises(ConfigError, match="one was measured over gloo, the other over nccl"):
        drifts(replace(NETWORK, backend="gloo"), new)
    with pytest.raises(ConfigError, match="no two places in common"):
        drifts(NETWORK, replace(new, ranks=(PLACES[0], Place("x", 0), Place("x", 1))))
    with pytest.raises(ConfigError, match="expected the older one"):
        again_days(new, NETWORK, drifts(new, NETWORK))


def colours(path: Path) -> set[tuple[int, ...]]:
    return set(map(tuple, (imread(path)[:, :, :3] * 255).round().astype(int).reshape(-1, 3).tolist()))


def test_the_picture_has_the_ends_of_both_scales(tmp_path):
    draw_network(tmp_path / "n.png", NETWORK)
    assert {(0xE8, 0xE4, 0xD8), (0xFD, 0xE7, 0x25), (0x44, 0x01, 0x54)} <= colours(tmp_path / "n.png")
