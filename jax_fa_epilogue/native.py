"""The compiled module: version check, registration of its XLA handlers, and where they can run.

Importing this module registers the handlers, which needs no GPU and no driver and starts no JAX
backend.
"""

from __future__ import annotations

import pathlib
import re

import jax

from jax_fa_epilogue import _native

FORWARD_TARGET = "jax_fa_epilogue_forward_v1"
BACKWARD_TARGET = "jax_fa_epilogue_backward_v1"
EPILOGUE_TARGET = "jax_fa_epilogue_epilogue_v1"
COMBINE_TARGET = "jax_fa_epilogue_combine_v1"
COMPUTE_CAPABILITY = "9.0"

# Marketing names of the devices with that compute capability, for meshes without real devices.
_DEVICE_KINDS = re.compile(r"\bG?H(20|100|200|800)\b")


def running_ffi_api_version() -> tuple[int, int]:
    """XLA FFI API version (major, minor) of the running jaxlib, read off the headers it ships."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    major, minor = (
        int(re.search(rf"^#define XLA_FFI_API_{part} (\d+)", header, re.MULTILINE)[1])
        for part in ("MAJOR", "MINOR")
    )
    return major, minor


def check_ffi_api_version(built: tuple[int, int], running: tuple[int, int]) -> None:
    """Raise ``ImportError`` unless a library built against `built` may be registered in `running`.

    XLA accepts libraries of the same major version and the same or an older minor version. A newer
    one must not be registered at all: it would break the whole CUDA backend, not only this package.
    """
    if built[0] != running[0] or built[1] > running[1]:
        raise ImportError(
            f"jax_fa_epilogue was built for version {built[0]}.{built[1]} of the XLA FFI API, but "
            f"the installed jaxlib has version {running[0]}.{running[1]}. Upgrade jax and jaxlib, "
            "or build jax_fa_epilogue against the installed jaxlib."
        )


def unsupported_here() -> str | None:
    """Why CUDA kernels cannot run on the devices in use; None if they can.

    The devices are those of the context mesh if it tells their kind, else JAX's CUDA devices. On a
    machine without any, code is lowered or exported for another machine, whose devices are taken
    to be supported; the handlers check again when they run.
    """
    if not _native.cuda_built:
        return "this installation of jax_fa_epilogue was built without CUDA"
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform in ("cuda", "gpu"):
        if _DEVICE_KINDS.search(device.device_kind):
            return None
        return f"the mesh has {device.device_kind} devices, which are not of {_needed()}"
    try:
        capability = jax.devices("cuda")[0].compute_capability
    except RuntimeError:
        return None
    if capability != COMPUTE_CAPABILITY:
        return f"the CUDA device has compute capability {capability}; the kernels need {_needed()}"
    return None


def num_multiprocessors() -> int:
    """Multiprocessors of the device in use, for plans; those of an H200 where there is none."""
    try:
        return jax.devices("cuda")[0].core_count
    except RuntimeError:
        return 132


def _needed() -> str:
    return f"compute capability {COMPUTE_CAPABILITY} (Hopper)"


def _register() -> None:
    check_ffi_api_version(tuple(_native.ffi_api_version()), running_ffi_api_version())
    for target, handler in _native.handlers().items():
        jax.ffi.register_ffi_target(target, handler, platform="CUDA")
        jax.ffi.register_ffi_target_as_batch_partitionable(target)


_register()
