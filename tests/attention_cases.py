"""Calls of attention as test cases: operands, the call on the best implementation, what it gives.

On a device with kernels the calls are made with ``implementation="cuda"``, so that a case that no
kernel covers fails; elsewhere the same calls run the reference.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_fa_epilogue as fa
from jax_fa_epilogue import native

KERNELS = jax.default_backend() == "gpu" and native.unsupported_here() is None
BEST = "cuda" if KERNELS else None


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `lengths` are those of packed sequences, (query tokens, key tokens) each."""

    dim: int = 64
    dim_v: int | None = None  # None: dim
    seqlen_q: int = 113
    seqlen_k: int = 203
    batch: int = 2
    heads: int = 4
    heads_kv: int = 2
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    seqused_q: tuple[int, ...] | None = None
    seqused_k: tuple[int, ...] | None = None
    num_splits: int = 1
    pack_gqa: bool | None = None
    lengths: tuple[tuple[int, int], ...] | None = None
    padding: int = 0  # tokens after the last sequence, on both sides
    deterministic: bool = False

    def __str__(self):
        default = Case()
        fields = dataclasses.asdict(self).items()
        changed = [
            f"{k}={len(v) if k == 'lengths' else v}" for k, v in fields if v != getattr(default, k)
        ]
        return "-".join(changed).replace(" ", "") or "default"

    @property
    def mask(self):
        """Keywords of the mask, as the oracle takes them."""
        return {"causal": self.causal, "window": self.window}


def parametrize(cases, step=5):
    """All cases for the kernels; each fifth elsewhere: the reference has tests of its own."""
    everywhere = set(cases[::step])
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(case, id=str(case), marks=() if case in everywhere else pytest.mark.gpu)
            for case in cases
        ],
    )


def make(case, seed=0, garbage=np.nan):
    """q, k, v and descriptors; what no sequence owns holds `garbage`."""
    rng = np.random.default_rng(seed)
    dim_v = case.dim if case.dim_v is None else case.dim_v
    if case.lengths is None:
        rows_q, rows_k = (case.batch, case.seqlen_q), (case.batch, case.seqlen_k)
    else:
        rows_q, rows_k = ((sum(x) + case.padding,) for x in zip(*case.lengths, strict=True))
    shapes = (
        (*rows_q, case.heads, case.dim),
        (*rows_k, case.heads_kv, case.dim),
        (*rows_k, case.heads_kv, dim_v),
    )
    q, k, v = (rng.standard_normal(s, np.float32) for s in shapes)
    descriptors = {}
    if case.lengths is not None:
        for side, lengths in zip("qk", zip(*case.lengths, strict=True), strict=True):
            descriptors[f"cu_seqlens_{side}"] = np.cumsum((0, *lengths)).astype(np.int32)
    for side, used in (("q", case.seqused_q), ("k", case.seqused_k)):
        if used is not None:
            descriptors[f"seqused_{side}"] = np.array(used, np.int32)
    for side, arrays in (("q", (q,)), ("k", (k, v))):
        rows = outside(arrays[0].shape, side, descriptors)
        for x in arrays:
            x[rows] = garbage
    return *(x.astype(jnp.dtype(case.dtype)) for x in (q, k, v)), descriptors


def outside(shape, side, descriptors):
    """Which rows, (B, S) or (T,), no sequence owns."""
    used, starts = descriptors.get(f"seqused_{side}"), descriptors.get(f"cu_seqlens_{side}")
    if starts is None:
        limit = shape[1] if used is None else used[:, None]
        return np.broadcast_to(np.arange(shape[1]) >= limit, shape[:2])
    lengths = np.diff(starts) if used is None else used
    rows = np.ones(shape[0], bool)
    for start, length in zip(starts, lengths, strict=False):
        rows[start : start + length] = False
    return rows


def function_of(case):
    """(q, k, v, descriptors) -> out, lse."""
    keywords = {
        "causal": case.causal,
        "window_size": case.window,
        "softcap": case.softcap,
        "softmax_scale": case.scale,
        "num_splits": case.num_splits,
        "pack_gqa": case.pack_gqa,
        "deterministic": case.deterministic,
        "return_lse": True,
        "implementation": BEST,
    }
    if case.lengths is None:
        return lambda q, k, v, descriptors: fa.flash_attention(q, k, v, **descriptors, **keywords)
    longest_q, longest_k = (max(x) for x in zip(*case.lengths, strict=True))
    return lambda q, k, v, descriptors: fa.flash_attention_varlen(
        q, k, v, **descriptors, max_seqlen_q=longest_q, max_seqlen_k=longest_k, **keywords
    )


def prepare(case, operands):
    """The compiled call with its operands on the device, so that only results take memory in it."""
    operands = jax.tree.map(jnp.asarray, operands)
    return functools.partial(jax.jit(function_of(case)), *operands)


def call(case, operands, poison=None):
    """Results of the second of two calls, in poisoned memory; both must be bitwise equal."""
    prepared = prepare(case, operands)
    first = prepared()
    if poison is None:
        return first
    with poison(*((x.shape, x.dtype) for x in first)):
        second = prepared()
    for a, b in zip(first, second, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    return second


def expect(case, operands):
    """The oracle's out and lse, and the largest error of the same computation in 16 bits."""
    q, k, v, descriptors = operands
    attend = oracle.attention if case.lengths is None else oracle.attention_varlen
    keywords = {**descriptors, **case.mask, "scale": case.scale, "softcap": case.softcap}
    exact = attend(q, k, v, **keywords)
    rounded = attend(q, k, v, **keywords, round_to=jnp.dtype(case.dtype))
    return exact.out, exact.lse, np.abs(rounded.out - exact.out).max(initial=0)


def assert_close(out, lse, expected, dtype):
    """FlashAttention's tolerance: twice the error of 16-bit arithmetic, and 1e-3 for lse."""
    expected_out, expected_lse, error = expected
    assert out.dtype == dtype and out.shape == expected_out.shape
    assert lse.dtype == jnp.float32 and lse.shape == expected_lse.shape
    out, lse = np.asarray(out).astype(np.float64), np.asarray(lse)
    assert np.isfinite(out).all()
    difference = np.abs(out - expected_out).max(initial=0)
    assert difference <= 2 * error + 1e-5, (difference, error)
    empty = expected_lse == -np.inf
    np.testing.assert_array_equal(lse == -np.inf, empty)
    np.testing.assert_allclose(lse[~empty], expected_lse[~empty], rtol=1e-6, atol=1e-3)
    # Exactly zero, not only nearly: (..., H, S) -> (..., S, H).
    assert not out[np.swapaxes(empty, -1, -2)].any()


def check(case, poison=None, seed=0):
    """Compare a call with the oracle; returns its results."""
    operands = make(case, seed)
    out, lse = call(case, operands, poison)
    assert_close(out, lse, expect(case, operands), case.dtype)
    return out, lse


def check_repeats(case):
    """300 calls give the same bits, while matrix products keep the device busy in between."""
    operands = make(case)
    prepared = prepare(case, operands)
    load = jax.jit(lambda x: jax.lax.fori_loop(0, 4, lambda _, x: x @ x / 64, x))
    busy = jnp.ones((4096, 4096), jnp.bfloat16)
    equal = jax.jit(lambda a, b: jnp.all(a[0] == b[0]) & jnp.all(a[1] == b[1]))
    first = prepared()
    assert_close(*first, expect(case, operands), case.dtype)
    same = []
    for _ in range(300):
        busy = load(busy)
        same.append(equal(prepared(), first))
    assert np.all(jax.device_get(same))
