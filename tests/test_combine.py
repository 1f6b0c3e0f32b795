"""The combine: merging splits, the same cases on the kernels and on the reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_fa_epilogue as fa

DIGITS = {"bfloat16": 8, "float16": 11, "float32": 19}


def make(splits, shape, head_dim, seed=0, empty=0.2):
    """Partial results (N, *shape, D), where a fifth of the splits saw no key and hold NaN."""
    rng = np.random.default_rng(seed)
    out = rng.standard_normal((splits, *shape, head_dim)).astype(np.float32)
    lse = 5 * rng.standard_normal((splits, *shape)).astype(np.float32)
    missing = rng.random(lse.shape) < empty
    missing[:, ..., -1] = True  # rows without a key in any split
    out[missing], lse[missing] = np.nan, -np.inf
    return out, np.swapaxes(lse, -1, -2).copy()


def call(out_partial, lse_partial, out_dtype=None, poison=None):
    """Results of the second of two calls, in poisoned memory; both must be bitwise equal."""
    operands = jnp.asarray(out_partial), jnp.asarray(lse_partial)
    compiled = jax.jit(functools.partial(fa.combine, out_dtype=out_dtype))
    first = compiled(*operands)
    if poison is None:
        return first
    with poison(*((x.shape, x.dtype) for x in first)):
        second = compiled(*operands)
    for a, b in zip(first, second, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    return second


def check(out_partial, lse_partial, poison, dtype="float32"):
    expected_out, expected_lse = oracle.combine(out_partial, lse_partial)
    out, lse = call(out_partial, lse_partial, dtype, poison)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    error = dict(rtol=2.0 ** -DIGITS[dtype], atol=2e-6)
    np.testing.assert_allclose(np.asarray(out.astype(jnp.float32)), expected_out, **error)
    np.testing.assert_allclose(np.asarray(lse), expected_lse, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 5, 8, 16, 31, 32, 33, 64, 256])
@pytest.mark.parametrize("packed", [False, True])
def test_split_counts(splits, packed, poison):
    check(*make(splits, (37, 3) if packed else (2, 19, 3), 64), poison)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("head_dim", [8, 16, 24, 32, 40, 64, 72, 96, 128, 136, 192, 248, 256])
def test_head_dims(head_dim, dtype, poison):
    check(*make(3, (2, 9, 2), head_dim), poison, dtype)


@pytest.mark.parametrize("seqlen", [1, 2, 7, 8, 9, 16, 63])
@pytest.mark.parametrize("heads", [1, 5, 8])
def test_tails(seqlen, heads, poison):
    check(*make(4, (2, seqlen, heads), 128), poison)


@pytest.mark.parametrize("packed", [False, True])
def test_one_split_is_the_identity(packed):
    out_partial, lse_partial = make(1, (17, 3) if packed else (2, 17, 3), 128, empty=0)
    out_partial = np.nan_to_num(out_partial)
    out, lse = call(out_partial, lse_partial)
    seen = np.isfinite(np.swapaxes(lse_partial[0], -1, -2))[..., None]
    np.testing.assert_array_equal(np.asarray(out), np.where(seen, out_partial[0], 0))
    np.testing.assert_array_equal(np.asarray(lse), lse_partial[0])


def test_very_different_splits():
    """Weights far below the smallest float count nothing, and nothing overflows."""
    values = np.array([1, 2, 3], np.float32)
    weights = np.array([-1e5, 1e5, -1e30], np.float32)
    out, lse = call(
        np.broadcast_to(values.reshape(3, 1, 1, 1, 1), (3, 1, 4, 1, 64)),
        np.broadcast_to(weights.reshape(3, 1, 1, 1), (3, 1, 1, 4)),
    )
    np.testing.assert_array_equal(np.asarray(out), 2)
    np.testing.assert_array_equal(np.asarray(lse), np.float32(1e5))


def test_splits_of_weight_0_may_hold_anything():
    """Also where the weight is 0 only because it underflows."""
    out_partial = np.ones((2, 1, 3, 1, 64), np.float32)
    out_partial[1] = np.nan
    lse_partial = np.array([0, -200], np.float32)[:, None, None, None] + np.zeros((2, 1, 1, 3))
    out, _ = call(out_partial, lse_partial.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(out), 1)


def test_nan_lse_gives_nan():
    out_partial = np.ones((2, 1, 5, 1, 64), np.float32)
    lse_partial = np.zeros((2, 1, 1, 5), np.float32)
    lse_partial[1, 0, 0, 2] = np.nan
    out, lse = (np.asarray(x) for x in call(out_partial, lse_partial))
    np.testing.assert_array_equal(np.isnan(lse[0, 0]), np.arange(5) == 2)
    np.testing.assert_array_equal(np.isnan(out[0, :, 0, 0]), np.arange(5) == 2)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_bits_do_not_depend_on_the_batch(head_dim):
    """Rule 7, also where the kernel treats few queries otherwise than many."""
    splits, batch = 19, 3000
    rng = np.random.default_rng(0)
    out_partial = rng.standard_normal((splits, 1, 3, 2, head_dim)).astype(np.float32)
    lse_partial = rng.standard_normal((splits, 1, 2, 3)).astype(np.float32)
    alone = call(out_partial, lse_partial)
    many = call(np.repeat(out_partial, batch, 1), np.repeat(lse_partial, batch, 1))
    for one, all_of_them in zip(alone, many, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(all_of_them[batch // 2]).tobytes()


@pytest.mark.parametrize("shape", [(0, 5, 2), (2, 0, 2), (2, 5, 0), (0, 2), (5, 0)])
def test_zero_sizes(shape):
    lse_partial = np.zeros((3, *shape), np.float32).swapaxes(-1, -2)
    out, lse = call(np.zeros((3, *shape, 64), np.float32), lse_partial)
    assert out.shape == (*shape, 64)
    assert lse.shape == (*shape[:-2], shape[-1], shape[-2])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_partials_of_16_bits(dtype):
    out_partial, lse_partial = make(3, (2, 9, 2), 64)
    rounded = jnp.asarray(out_partial).astype(dtype)
    out, lse = call(rounded, lse_partial)
    as_float32 = np.asarray(rounded.astype(jnp.float32))
    expected_out, expected_lse = oracle.combine(as_float32, lse_partial)
    assert out.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(out.astype(jnp.float32)), expected_out, rtol=2.0 ** -DIGITS[dtype], atol=1e-5
    )
    np.testing.assert_allclose(np.asarray(lse), expected_lse, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("batch", [65536, 65537])
def test_large_batch(batch):
    """R10: more batch items than a grid axis holds."""
    out_partial = jax.random.normal(jax.random.key(0), (2, batch, 1, 1, 64))
    out, lse = call(out_partial, jnp.zeros((2, batch, 1, 1)))
    np.testing.assert_allclose(out, (out_partial[0] + out_partial[1]) / 2, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse, np.log(2), rtol=1e-6)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """R12: offsets are 64 bits wide."""
    seqlen, heads, head_dim = 262_145, 32, 128
    out_partial = jax.lax.broadcasted_iota(jnp.float32, (2, 1, seqlen, heads, head_dim), 2) % 251
    lse_partial = jnp.zeros((2, 1, heads, seqlen), jnp.float32)
    out, _ = fa.combine(out_partial, lse_partial, out_dtype=jnp.bfloat16)
    equal = jax.jit(lambda out, x: jnp.array_equal(out, x[0].astype(jnp.bfloat16)))
    assert equal(out, out_partial)


@pytest.mark.gpu
def test_launch_failure_is_an_exception():
    """R11: nothing is returned, the message names the kernel, and the next call works."""
    from jax_fa_epilogue import _native

    partials = make(2, (1, 9, 2), 64)
    expected = [np.asarray(x) for x in call(*partials)]
    _native.fail_next_launch()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"combine_f32_64.*cudaError"):
        jax.block_until_ready(call(*partials))
    for before, now in zip(expected, call(*partials), strict=True):
        np.testing.assert_array_equal(before, np.asarray(now))
