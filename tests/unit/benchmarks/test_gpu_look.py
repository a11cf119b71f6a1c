"""What is told of a machine before anything is measured on it."""

from __future__ import annotations

import gzip
import json
import sys

from scripts.benchmarks import gpu_look

LDCONFIG = """3 libs found in cache `/etc/ld.so.cache'
\tlibcudart.so.13 (libc6,x86-64) => /usr/local/cuda/lib/libcudart.so.13
\tlibcuda.so.1 (libc6,x86-64) => /usr/local/nvidia/lib64/libcuda.so.1
\tlibnvidia-ml.so.1 (libc6,x86-64) => /usr/local/nvidia/lib64/libnvidia-ml.so.1
"""


def test_the_driver_s_libraries_or_why_there_are_none():
    assert gpu_look.driver_libraries(LDCONFIG) == [
        "libcuda.so.1 (libc6,x86-64) => /usr/local/nvidia/lib64/libcuda.so.1",
        "libnvidia-ml.so.1 (libc6,x86-64) => /usr/local/nvidia/lib64/libnvidia-ml.so.1",
    ]
    assert gpu_look.driver_libraries("\n".join(LDCONFIG.splitlines()[:2])) == LDCONFIG.splitlines()[:1]
    assert gpu_look.driver_libraries("not there: no ldconfig") == ["not there: no ldconfig"]


def test_the_kernel_s_options_or_why_they_cannot_be_read(tmp_path):
    config = '# CONFIG_MODULES is not set\nCONFIG_USER_NS=y\nCONFIG_SOUND=m\nCONFIG_LSM="landlock,yama"\n'
    (tmp_path / "config.gz").write_bytes(gzip.compress(config.encode()))
    assert gpu_look.kernel_options(tmp_path / "config.gz") == {"USER_NS": "y", "LSM": '"landlock,yama"'}
    assert "No such file" in gpu_look.kernel_options(tmp_path / "none")["why"]
    (tmp_path / "broken").write_bytes((tmp_path / "config.gz").read_bytes()[:-9])
    assert "not there" in gpu_look.kernel_options(tmp_path / "broken")["why"]


def test_nodes_are_told_with_their_modes(tmp_path):
    (tmp_path / "nvidia-caps").mkdir(mode=0o755)
    for name in ("nvidiactl", "nvidia-caps/cap1", "null"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o640)
    found = gpu_look.nodes(tmp_path)
    assert list(found) == [str(tmp_path / name) for name in ("nvidia-caps", "nvidia-caps/cap1", "nvidiactl")]
    assert found[str(tmp_path / "nvidiactl")].startswith("-rw-r----- ")


def test_what_is_told_is_json_and_has_limits_and_paths(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64")
    monkeypatch.setattr(sys, "argv", ["gpu_look.py", "--json", str(tmp_path / "look.json")])
    gpu_look.main()
    found = json.loads((tmp_path / "look.json").read_text(encoding="utf-8"))
    assert found == json.loads(capsys.readouterr().out)
    assert found["library_path"] == "/usr/local/nvidia/lib64"
    assert set(found["limits"]) == set(gpu_look.LIMITS)
    assert all(len(both) == 2 for both in found["limits"].values())
    assert {"libraries", "nodes", "kernel_options", "packages"} <= set(found)
