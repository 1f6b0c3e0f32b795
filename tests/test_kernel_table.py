"""The kernel table and the plans: no plan without a kernel, no kernel without a plan."""

from __future__ import annotations

import collections
import itertools

import pytest

from jax_fa_epilogue import _native

DTYPES = ("bf16", "f16", "f32")


def reachable():
    for dtype, head_dim, fp8 in itertools.product(DTYPES, range(8, 257, 8), (False, True)):
        if not (fp8 and head_dim % 16):
            yield _native.plan_epilogue(dtype, 2, 2, 1, 128, head_dim, fp8_permuted_columns=fp8)
        if not fp8:
            yield _native.plan_combine(dtype, 2, 2, 128, head_dim, 3)


def test_every_plan_names_a_kernel_and_every_kernel_is_reached():
    table = {kernel["name"]: kernel for kernel in _native.kernels()}
    named = set()
    for plan in reachable():
        kernel = table[plan["kernel"]]
        assert all(plan[field] == kernel[field] for field in plan.keys() & kernel.keys())
        named.add(plan["kernel"])
    assert named == set(table)


def test_names_are_unique_and_say_the_config():
    kernels = _native.kernels()
    assert max(collections.Counter(kernel["name"] for kernel in kernels).values()) == 1
    for kernel in kernels:
        fields = ["operation", "out_dtype", "head_dim"]
        if kernel["operation"] == "epilogue":
            fields += ["column_order", "block_m", "blocks_per_sm"]
        assert kernel["name"] == "_".join(str(kernel[field]) for field in fields)


def test_default_build_has_every_kernel():
    kernels = _native.kernels()
    if not _native.cuda_built:
        assert not any(kernel["built"] for kernel in kernels)
        pytest.skip("built without CUDA")
    missing = [kernel["name"] for kernel in kernels if not kernel["built"]]
    if len(missing) and len(missing) < len(kernels):
        pytest.skip(f"built with a KERNELS filter, without {len(missing)} kernels")
    assert not missing


def test_handlers_exist_exactly_with_cuda():
    expected = {"jax_fa_epilogue_epilogue_v1", "jax_fa_epilogue_combine_v1"}
    assert set(_native.handlers()) == (expected if _native.cuda_built else set())
