"""The kernel table and the plans: no plan without a kernel, no kernel without a plan."""

from __future__ import annotations

import collections
import contextlib
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
    for dtype, head_dim, head_dim_v, right, seqlen_q, num_splits in itertools.product(
        DTYPES[:2], range(64, 257, 32), range(64, 257, 32), (-1, 0), (1, 512), (0, 2)
    ):
        with contextlib.suppress(NotImplementedError):  # a pair of widths without a tile
            yield _native.plan_forward(
                dtype=dtype,
                batch=2,
                heads_kv=2,
                qhead_per_khead=1,
                sequences=1 if right else 5000,
                seqlen_q=seqlen_q,
                seqlen_k=512,
                head_dim=head_dim,
                head_dim_v=head_dim_v,
                window_right=right,
                num_splits=num_splits,
                has_cu_seqlens=True,
            )
        with contextlib.suppress(NotImplementedError):
            plan = _native.plan_backward(
                dtype, 2, 2, 1, 1, 512, 512, head_dim, head_dim_v, window_right=right
            )
            yield plan
            yield plan["preprocess"]
            yield plan["postprocess"]


def test_every_plan_names_a_kernel_and_every_kernel_is_reached():
    table = {kernel["name"]: kernel for kernel in _native.kernels()}
    named = set()
    for plan in reachable():
        kernel = table[plan["kernel"]]
        assert all(
            plan[field] == kernel[field] for field in plan.keys() & kernel.keys() - {"built"}
        )
        named |= {plan["kernel"], plan.get("schedule_kernel") or plan["kernel"]}
    assert named == set(table)


def test_names_are_unique_and_say_the_config():
    kernels = _native.kernels()
    assert max(collections.Counter(kernel["name"] for kernel in kernels).values()) == 1
    fields = {
        "epilogue": ("out_dtype", "head_dim", "column_order", "block_m", "blocks_per_sm"),
        "combine": ("out_dtype", "head_dim"),
        "schedule": ("max_threads", "items"),
        "forward": ("dtype", "head_dim", "head_dim_v", "output", "block_m", "block_n", "stages"),
        "backward": ("dtype", "head_dim", "head_dim_v", "block_m", "block_n", "stages"),
        "preprocess": ("dtype",),
        "postprocess": ("dtype", "head_dim", "block_m"),
    }
    for kernel in kernels:
        values = [str(kernel[field]) for field in fields[kernel["operation"]]]
        assert kernel["name"] == "_".join([kernel["operation"], *values])


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
    # The schedule is a part of the forward, and what precedes and follows the backward is of it.
    parts = {"schedule", "preprocess", "postprocess"}
    operations = {kernel["operation"] for kernel in _native.kernels()} - parts
    expected = {f"jax_fa_epilogue_{operation}_v1" for operation in operations}
    assert set(_native.handlers()) == (expected if _native.cuda_built else set())
