"""What is passed to the CUDA driver is what CUDA's own header names, and the calls are as it declares them."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.fill.rank import freewaits, signals
from scripts.benchmarks.micro import accelerator

NAMED = {
    "CU_STREAM_NON_BLOCKING": (signals._NON_BLOCKING, freewaits._NON_BLOCKING),
    "CU_EVENT_DISABLE_TIMING": (signals._NO_TIMING,),
    "CU_STREAM_CAPTURE_STATUS_NONE": (signals._CAPTURE_NONE,),
    "CU_MEMHOSTREGISTER_DEVICEMAP": (signals._MAPPED, accelerator._MAPPED),
    "(CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_PORTABLE)": (freewaits._MAPPED,),
    "CU_STREAM_WAIT_VALUE_GEQ": (freewaits._GEQ,),
    "CU_STREAM_WAIT_VALUE_EQ": (accelerator._EQUAL,),
}
# With the version in the name that is called, in which the header's macro must end.
CALLED = {
    "cuStreamIsCapturing": "CUstream, CUstreamCaptureStatus *",
    "cuCtxGetStreamPriorityRange": "int *, int *",
    "cuStreamCreateWithPriority": "CUstream *, unsigned int, int",
    "cuEventCreate": "CUevent *, unsigned int",
    "cuEventRecord": "CUevent, CUstream",
    "cuStreamWaitEvent": "CUstream, CUevent, unsigned int",
    "cuLaunchHostFunc": "CUstream, CUhostFn, void *",
    "cuMemHostRegister_v2": "void *, size_t, unsigned int",
    "cuMemHostGetDevicePointer_v2": "CUdeviceptr *, void *, unsigned int",
    "cuStreamWriteValue64_v2": "CUstream, CUdeviceptr, cuuint64_t, unsigned int",
    "cuStreamWriteValue32_v2": "CUstream, CUdeviceptr, cuuint32_t, unsigned int",
    "cuStreamWaitValue32_v2": "CUstream, CUdeviceptr, cuuint32_t, unsigned int",
}


def header() -> Path:
    """CUDA's header: that of a toolkit, or the one that comes with Triton."""
    found = importlib.util.find_spec("triton")
    places = [] if found is None or found.origin is None else [Path(found.origin).parent / "backends/nvidia/include"]
    for place in [*sorted(Path("/usr/local").glob("cuda*/include")), *places]:
        if (place / "cuda.h").is_file():
            return place
    pytest.skip("there is no cuda.h here: neither a CUDA toolkit nor Triton")


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler (cc)")
def test_the_driver_is_called_as_its_header_says() -> None:
    lines = ["#include <cuda.h>", "#include <stddef.h>"]
    lines += [f'_Static_assert({name} == {value}, "{name}");' for name, values in NAMED.items() for value in values]
    for name, parameters in CALLED.items():
        plain = name.removesuffix("_v2")
        lines.append(f"CUresult (*our_{plain})({parameters}) = {plain};")
        lines.append("#define SHOWN(name) #name\n#define SHOWS(name) SHOWN(name)")
        lines.append(f'_Static_assert(sizeof SHOWS({plain}) == sizeof "{name}", "{plain} is {name}");')
        lines.append("#undef SHOWN\n#undef SHOWS")
    command = ["cc", "-fsyntax-only", "-Wall", "-Werror", "-I", str(header()), "-x", "c", "-"]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
