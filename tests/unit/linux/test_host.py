"""What a machine says of itself."""

from __future__ import annotations

from megatron.fill.linux.host import FreeHostMemory


def test_free_memory_is_read_anew_unless_a_reading_may_hold_for_a_while(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    1000 kB\n")
    fresh, resting = FreeHostMemory(meminfo=str(meminfo)), FreeHostMemory(rest_s=3600, meminfo=str(meminfo))
    assert (fresh(), resting()) == (1000 * 1024, 1000 * 1024)
    with meminfo.open("r+") as file:
        file.write("MemTotal: 9000 kB\nMemAvailable:    2000 kB\n")
    assert (fresh(), resting()) == (2000 * 1024, 1000 * 1024)
