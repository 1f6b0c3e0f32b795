"""Fixtures and markers that all tests share; sets up JAX before it is imported."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

_FLAG = "--xla_force_host_platform_device_count=8"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()
if not any(map(os.path.exists, ("/dev/nvidiactl", "/proc/driver/nvidia/version"))):
    # An installed CUDA plugin cannot start without a driver, and then cannot compile either.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from jax_fa_epilogue import _native  # noqa: E402


def _no_kernels() -> str | None:
    """Why CUDA kernels cannot run here; None if they can."""
    if not _native.cuda_built:
        return "built without CUDA"
    try:
        capability = jax.devices("cuda")[0].compute_capability
    except RuntimeError:
        return "no CUDA device"
    return None if capability == "9.0" else f"CUDA device of compute capability {capability}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where no kernel can run."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and (reason := _no_kernels()):
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA device of SM 9.0: {reason}"))


@pytest.fixture
def poison() -> Callable[..., contextlib.AbstractContextManager[None]]:
    """Context in which device memory as large as the given results, (shape, dtype), is full of NaN.

    XLA takes the memory of results from what was freed last, so that a result which a kernel does
    not write is seen as NaN.
    """

    @contextlib.contextmanager
    def leave_nan(*results: tuple[Sequence[int], str]) -> Iterator[None]:
        blocks = [
            jax.block_until_ready(jnp.full(shape, jnp.nan, dtype)) for shape, dtype in results
        ]
        for block in blocks:
            block.delete()
        yield

    return leave_nan


@pytest.fixture(scope="session")
def cpu_devices() -> np.ndarray:
    """Eight CPU devices, as (2, 4)."""
    return np.array(jax.devices("cpu")[:8]).reshape(2, 4)
