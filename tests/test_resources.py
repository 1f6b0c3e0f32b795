"""Registers and local memory of every built kernel, read off the installed library."""

import pathlib
import re
import shutil
import subprocess
import sysconfig

import pytest

from jax_fa_epilogue import _native

REGISTERS_PER_SM = 65536
MAX_REGISTERS_PER_THREAD = 255

BUILT = {kernel["name"]: kernel for kernel in _native.kernels() if kernel["built"]}

pytestmark = pytest.mark.skipif(not BUILT, reason="built without CUDA kernels")


def find_cuobjdump():
    """Path of cuobjdump: PATH, else the wheel nvidia-cuda-cuobjdump of any CUDA version."""
    wheels = pathlib.Path(sysconfig.get_path("purelib"), "nvidia")
    candidates = [shutil.which("cuobjdump"), *sorted(wheels.glob("cu*/bin/cuobjdump"))]
    return next((path for path in candidates if path), None)


def kernel_name(mangled):
    """Name in the kernel table of a mangled entry point: its template argument's type has it."""
    length, rest = re.search(r"_kernelINS_(\d+)(\w+)", mangled).groups()
    return rest[: int(length)]


@pytest.fixture(scope="module")
def usage():
    """Table name of each kernel in the library -> its resources, as cuobjdump calls them."""
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        pytest.skip("cuobjdump is not installed")
    command = [cuobjdump, "--dump-resource-usage", _native.__file__]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    entries = re.findall(r"Function (\S+):\n\s*(.*)", text)
    return {
        kernel_name(mangled): {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
        for mangled, line in entries
    }


def test_the_library_holds_the_built_kernels_and_no_others(usage):
    assert set(usage) == set(BUILT)


@pytest.mark.parametrize("name", BUILT)
def test_no_spills_and_registers_within_the_launch_bound(usage, name):
    threads = BUILT[name]["num_threads"] * BUILT[name].get("blocks_per_sm", 1)
    assert usage[name]["STACK"] == 0
    assert usage[name]["LOCAL"] == 0
    assert 0 < usage[name]["REG"] <= min(REGISTERS_PER_SM // threads, MAX_REGISTERS_PER_THREAD)
