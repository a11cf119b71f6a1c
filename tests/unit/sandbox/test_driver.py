"""CUDA's start in the sandbox, with a library in its place that needs what a driver might."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from megatron.fill.sandbox.config import Bind, Sandbox
from megatron.fill.sandbox.driver import DriverTrial, why_no_cuda
from tests.support.sandboxed import GUEST, needs

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler (cc)")
SOURCE = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
int cuInit(unsigned flags) {
    char path[99];
    snprintf(path, sizeof path, PATTERN, (int)syscall(SYS_gettid));
    int fd = open(path, O_RDWR);
    return fd < 0 ? 304 : close(fd);
}
int cuGetErrorName(int code, const char **name) { *name = "CUDA_ERROR_OPERATING_SYSTEM"; return code != 304; }
"""


@pytest.fixture
def tried(tmp_path, folder, support):
    """Tries a driver that opens this file, with %d for its thread, to write."""

    def look(pattern: str, *, devices: tuple[str, ...] = ("/dev/null",)) -> str:
        library = tmp_path / "driver" / "libcuda.so.1"
        library.parent.mkdir()
        define = f'-DPATTERN="{pattern}"'
        compiler = ["cc", "-shared", "-fPIC", define, "-x", "c", "-o", str(library), "-"]
        subprocess.run(compiler, input=SOURCE, text=True, check=True)
        sandbox = Sandbox(
            namespaces=support.namespaces,
            directory=str(folder),
            binds=(Bind(str(library.parent)),),
            user=GUEST.uid if GUEST else None,
            group=GUEST.gid if GUEST else None,
            devices=devices,
        )
        return why_no_cuda(DriverTrial(sandbox, str(library)))

    return look


def test_a_driver_that_names_its_threads_starts_behind_all_walls(tried):
    assert tried("/proc/self/task/%d/comm") == ""


def test_without_devices_it_may_not_and_the_wall_is_named(tried, support):
    needs(support, "mount")
    found = tried("/proc/self/task/%d/comm", devices=())
    assert found.startswith("cuInit gives 304 (CUDA_ERROR_OPERATING_SYSTEM) in the sandbox; it starts with this layer ")
    assert found.endswith("left out: proc")


def test_a_driver_that_needs_what_several_layers_hide_is_said_to(tried, support, tmp_path):
    needs(support, "mount")
    hidden = tmp_path / "hidden" / "state"
    hidden.parent.mkdir()
    hidden.touch()
    hidden.chmod(0o666)
    assert tried(str(hidden)).endswith("with any one of its layers left out; it starts without all of them")


def test_a_driver_that_never_starts_is_no_layer_s_fault(tried):
    assert tried("/nowhere").endswith("304 (CUDA_ERROR_OPERATING_SYSTEM), and without a sandbox too")


def test_a_machine_without_the_library_says_so_in_one_line(folder):
    found = why_no_cuda(DriverTrial(Sandbox(directory=str(folder)), "libnothing.so.1"))
    assert "libnothing.so.1" in found
    assert "\n" not in found
