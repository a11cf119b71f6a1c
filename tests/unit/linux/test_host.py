"""What a machine says of itself."""

from __future__ import annotations

from megatron.fill.linux import host


def test_free_memory_is_read_anew(tmp_path):
    meminfo = tmp_path / "meminfo"
    for free_kib in (1000, 2000):
        meminfo.write_text(f"MemTotal: 9000 kB\nMemAvailable:    {free_kib} kB\n")
        assert host.free_host_bytes(str(meminfo)) == free_kib * 1024


def test_a_rank_s_reading_of_it_holds_for_a_while(monkeypatch):
    readings = iter((1000, 2000, 3000))
    now_ns = 10**12
    monkeypatch.setattr(host, "free_host_bytes", lambda: next(readings))
    monkeypatch.setattr(host.time, "monotonic_ns", lambda: now_ns)
    free = host.FreeHostMemory()
    assert (free(), free()) == (1000, 1000)
    now_ns += 300_000_000
    assert (free(), free()) == (2000, 2000)
