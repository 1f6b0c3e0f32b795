"""The fused forward on dense operands: the kernels and the reference alike, from the same cases."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from attention_cases import (
    BEST,
    Case,
    assert_close,
    call,
    check,
    check_repeats,
    expect,
    make,
    parametrize,
    prepare,
)

import jax_fa_epilogue as fa

TILES = (64, 96, 128, 192, 256)
WIDTHS = (8, 16, 24, 40, 56, 64, 72, 80, 88, 96, 112, 128, 136, 160, 192, 224, 248, 256)  # R30
SIZES = ((1, 1), (64, 128), (239, 1), (799, 3), (113, 203), (1, 300), (129, 129), (200, 70))
WINDOWS = ((5, 0), (0, 5), (20, -1), (-1, 20), (33, 17), (0, 0))

CASES = [
    *(Case(d, seqlen_q=40, seqlen_k=40, heads=2, causal=True) for d in WIDTHS),
    *(Case(d, dtype="float16", batch=1) for d in TILES),
    *(Case(d, batch=1, causal=True) for d in TILES),
    *(Case(d, w, batch=1) for d, w in ((192, 128), (128, 64), (64, 128), (64, 256), (72, 40))),
    *(Case(d, w, batch=1, dtype="float16", causal=True) for d, w in ((192, 128), (64, 256))),
    *(Case(heads=h, heads_kv=k, batch=1) for h, k in ((3, 3), (6, 2), (7, 1), (8, 1))),
    *(
        Case(128, heads=h, heads_kv=k, pack_gqa=p, causal=True, seqlen_q=50)
        for h, k in ((4, 1), (6, 2), (7, 1))
        for p in (True, False)
    ),
    *(Case(128, seqlen_q=m, seqlen_k=n, causal=c) for m, n in SIZES for c in (False, True)),
    *(Case(window=w) for w in WINDOWS),
    *(Case(128, window=w, batch=1, causal=c) for w in ((33, 0), (5, 9)) for c in (False, True)),
    Case(window=(40, 30), seqlen_q=300, seqlen_k=180),
    Case(window=(2, -1), pack_gqa=True, seqlen_q=9, seqlen_k=200),
    *(Case(softcap=c, dtype=t) for c in (0.5, 15.0) for t in ("bfloat16", "float16")),
    Case(128, softcap=2.0, causal=True, window=(50, 0)),
    *(Case(scale=s) for s in (0.0, -0.7, 2.0)),
    *(Case(seqused_k=u, causal=c) for u in ((203, 96), (0, 1)) for c in (False, True)),
    *(Case(seqused_q=u, causal=c) for u in ((113, 64), (0, 5)) for c in (False, True)),
    Case(128, seqused_q=(0, 90), seqused_k=(33, 130), window=(60, 20)),
    Case(128, seqused_q=(7, 3), seqused_k=(203, 129), pack_gqa=True, seqlen_q=8, causal=True),
    Case(256, seqused_k=(1, 81), causal=True, seqlen_q=70),
    Case(batch=40, heads=8, heads_kv=4, seqlen_q=65, seqlen_k=65, causal=True),
]


@parametrize(CASES)
def test_values(case, poison):
    check(case, poison)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_values_of_long_sequences(dim, causal, poison):
    check(Case(dim, batch=1, seqlen_q=1024, seqlen_k=1023, causal=causal), poison)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True])
def test_values_of_very_long_sequences(dtype, causal, poison):
    """4096 x 4096, against XLA in float32 and, for the tolerance, in 16 bits."""
    case = Case(128, batch=1, seqlen_q=4096, seqlen_k=4096, dtype=dtype, causal=causal)
    operands = make(case)
    out, lse = call(case, operands, poison)

    @jax.jit
    def naive(q, k, v):
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        k, v = (jnp.repeat(x, 2, axis=1) for x in (k, v))
        logits = jnp.einsum("bhqd,bhkd->bhqk", q, k, precision="highest") / 128**0.5
        if causal:
            logits = jnp.where(jnp.tri(4096, dtype=bool), logits, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=-1)
        result = jnp.einsum("bhqk,bhkd->bqhd", weights, v, precision="highest")
        return result, jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)

    q, k, v = (jnp.asarray(x) for x in operands[:3])
    exact, exact_lse = naive(*(x.astype(jnp.float32) for x in (q, k, v)))
    exact = np.asarray(exact, np.float64)
    rounded = np.asarray(naive(q, k, v)[0]).astype(np.float64)
    expected = exact, np.asarray(exact_lse), np.abs(rounded - exact).max()
    assert_close(out, lse, expected, dtype)


# ---- What is read and written --------------------------------------------------------------------


def keys_read(function, seqlen_q, seqlen_k, **keywords):
    """Return the mask (Sq, Sk): K = 0 and a one-hot V make the output the mean of what is seen."""
    q = jnp.asarray(np.random.default_rng(0).normal(size=(1, seqlen_q, 1, 64)), jnp.bfloat16)
    k = jnp.zeros((1, seqlen_k, 1, 64), jnp.bfloat16)
    v = jnp.eye(seqlen_k, 64, dtype=jnp.bfloat16)[None, :, None]
    function = jax.jit(functools.partial(function, implementation=BEST, **keywords))
    return np.asarray(function(q, k, v).astype(jnp.float32))[0, :, 0, :seqlen_k] > 0


@pytest.mark.parametrize("window", [(3, 2), (0, -1), (-1, 0), (7, -1)], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(200, 60), (60, 60), (5, 60)])
def test_masks_in_both_alignments(window, seqlen_q, seqlen_k):
    seen = keys_read(fa.flash_attention, seqlen_q, seqlen_k, window_size=window)
    np.testing.assert_array_equal(seen, oracle.visible_keys(seqlen_q, seqlen_k, window))
    # jax.nn has no unbounded side beside a bounded one.
    reach = tuple(seqlen_q + seqlen_k if side < 0 else side for side in window)
    seen = keys_read(fa.dot_product_attention, seqlen_q, seqlen_k, local_window_size=reach)
    expected = oracle.visible_keys(seqlen_q, seqlen_k, window, top_left=True)
    np.testing.assert_array_equal(seen, expected)


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_columns_keep_their_place(dim):
    """A permutation inside a row would leave every norm right: give each element its own value."""
    q, k = (jnp.zeros((1, n, 2, 64), jnp.bfloat16) for n in (70, 1))
    v = jnp.broadcast_to(jnp.arange(dim, dtype=jnp.bfloat16), (1, 1, 2, dim))
    out = jax.jit(functools.partial(fa.flash_attention, implementation=BEST))(q, k, v)
    np.testing.assert_array_equal(
        np.asarray(out.astype(jnp.float32)), np.broadcast_to(np.arange(dim), out.shape)
    )


@pytest.mark.parametrize("case", [Case(seqused_k=(32, 96)), Case(128, seqused_q=(5, 0))], ids=str)
def test_lengths_out_of_range_are_clamped(case, poison):
    """Rule 9: traced lengths that lie act like those that do not."""
    q, k, v, descriptors = make(case, garbage=1.0)
    (name,) = descriptors
    rows = q.shape[1] if name == "seqused_q" else k.shape[1]
    lying = call(case, (q, k, v, {name: np.array([-7, 2**31 - 1], np.int32)}), poison)
    honest = call(case, (q, k, v, {name: np.array([0, rows], np.int32)}))
    for a, b in zip(lying, honest, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_repeats_bitwise_under_load(causal):
    """R07: 300 runs while another stream keeps the device busy; a slow warp leaves no stale O."""
    case = Case(128, heads=16, heads_kv=16, seqlen_q=200, seqlen_k=200, causal=causal)
    check_repeats(case)


# ---- Reported faults ----------------------------------------------------------------------------


def test_r01_rows_without_keys(poison):
    case = Case(seqlen_q=5, seqlen_k=2, batch=1, heads=2, causal=True)
    out, lse = check(case, poison)
    assert not np.asarray(out.astype(jnp.float32))[:, :3].any()
    assert np.isneginf(np.asarray(lse)[..., :3]).all()
    q, k, v, _ = make(case)
    attend = functools.partial(
        fa.flash_attention, causal=True, return_lse=True, implementation=BEST
    )
    gradients = jax.jit(lambda *x: jax.vjp(attend, *x)[1]((out, jnp.ones_like(lse))))(q, k, v)
    assert not np.any(gradients[0][:, :3])
    assert not any(np.isnan(np.asarray(x.astype(jnp.float32))).any() for x in gradients)


@pytest.mark.parametrize("seqlen_q", [1, 70])
def test_r04_keys_past_seqused_may_be_nan(seqlen_q, poison):
    case = Case(seqlen_q=seqlen_q, seqlen_k=128, heads=8, seqused_k=(32, 96))
    with_nan = check(case, poison)
    with_zeros = call(case, make(case, garbage=0.0))
    for a, b in zip(with_nan, with_zeros, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    q, k, v, descriptors = make(case)
    gradients = jax.jit(
        jax.grad(
            lambda q, k, v: (
                fa.flash_attention(q, k, v, **descriptors, implementation=BEST)
                .astype(jnp.float32)
                .sum()
            ),
            (0, 1, 2),
        )
    )(q, k, v)
    assert all(np.isfinite(np.asarray(x.astype(jnp.float32))).all() for x in gradients)


@pytest.mark.parametrize(("heads", "batch"), [(3, 2), (1, 1), (1, 3)])
def test_r08_last_tile_ends_at_the_sequence(heads, batch, poison):
    """129 rows: neighbours are those of a call with the sequence or the head alone."""
    case = Case(seqlen_q=129, seqlen_k=129, heads=heads, heads_kv=heads, batch=batch)
    out, lse = check(case, poison)
    q, k, v, _ = make(case)
    alone = Case(seqlen_q=129, seqlen_k=129, heads=1, heads_kv=1, batch=1)
    for b, h in np.ndindex(batch, heads):
        one, one_lse = call(alone, (*(x[b : b + 1, :, h : h + 1] for x in (q, k, v)), {}))
        np.testing.assert_array_equal(np.asarray(out[b, :, h]), np.asarray(one[0, :, 0]))
        np.testing.assert_array_equal(np.asarray(lse[b, h]), np.asarray(one_lse[0, 0]))


@pytest.mark.parametrize(
    "sizes", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0, "seqlen_q": 3}, {"heads": 0}], ids=str
)
def test_r09_empty_axes(sizes):
    if "heads" in sizes:
        sizes = {"heads": 0, "heads_kv": 0}
    case = Case(**sizes)
    q, k, v, _ = make(case)
    out, lse = call(case, (q, k, v, {}))
    assert out.shape == q.shape and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert not np.any(out) and np.isneginf(np.asarray(lse)).all()

    def loss(q, k, v):
        return fa.flash_attention(q, k, v, implementation=BEST).astype(jnp.float32).sum()

    for x, gradient in zip((q, k, v), jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v), strict=True):
        assert gradient.shape == x.shape and not np.any(gradient)


@pytest.mark.parametrize("batch", [65536, 65537])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_r10_large_batch(batch, num_splits):
    q, k, v = jax.random.normal(jax.random.key(0), (3, batch, 1, 1, 64), jnp.bfloat16)
    attend = functools.partial(
        fa.flash_attention, num_splits=num_splits, return_lse=True, implementation=BEST
    )
    out, _ = jax.jit(attend)(q, k, v)
    assert jnp.array_equal(out, v)
    dv = jax.jit(lambda q, k, v, dout: jax.vjp(lambda v: attend(q, k, v)[0], v)[1](dout)[0])
    assert jnp.array_equal(dv(q, k, v, q), q)


@pytest.mark.gpu
def test_r11_launch_failure_is_an_exception():
    """Nothing is returned, the message names the kernel, and the next call works."""
    from jax_fa_epilogue import _native

    prepared = prepare(Case(128), make(Case(128)))
    before = [np.asarray(x) for x in prepared()]
    _native.fail_next_launch()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"forward_bf16_128.*cudaError"):
        jax.block_until_ready(prepared())
    for a, b in zip(before, prepared(), strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))


@pytest.mark.gpu
def test_r12_more_than_2_to_the_31_elements():
    """Offsets are 64 bits wide: each row sees its own key alone."""
    shape = (1, 524_289, 32, 128)
    v = jax.lax.broadcasted_iota(jnp.bfloat16, shape, 1) % 251
    v += jnp.arange(32, dtype=jnp.bfloat16)[:, None]
    attend = functools.partial(fa.flash_attention, window_size=(0, 0), implementation=BEST)
    out = jax.jit(attend)(jnp.ones_like(v), jnp.ones_like(v), v)
    assert jax.jit(jnp.array_equal)(out, v)


def test_r15_packed_heads_have_their_own_limits():
    """Bottom line of PackGQA: all settings agree with K and V repeated, forward and backward."""
    case = Case(seqlen_q=192, seqlen_k=192, heads=8, batch=1, causal=True)
    q, k, v, _ = make(case)
    dout = make(case, seed=1)[0]
    expected = expect(case, (q, k, v, {}))
    for pack_gqa in (True, False, None):
        attend = functools.partial(
            fa.flash_attention, causal=True, pack_gqa=pack_gqa, implementation=BEST, return_lse=True
        )
        results = jax.jit(
            lambda *x, f=attend: (f(*x), jax.vjp(lambda *y: f(*y)[0], *x)[1](jnp.asarray(dout)))
        )(q, k, v)
        assert_close(*results[0], expected, case.dtype)
        exact = oracle.attention(q, k, v, causal=True, dout=dout)
        for gradient, want in zip(results[1], (exact.dq, exact.dk, exact.dv), strict=True):
            np.testing.assert_allclose(
                np.asarray(gradient).astype(np.float64), want, rtol=2**-6, atol=0.02
            )
    repeated = Case(seqlen_q=192, seqlen_k=192, heads=8, heads_kv=8, batch=1, causal=True)
    out, lse = call(repeated, (q, *(np.repeat(x, 4, axis=2) for x in (k, v)), {}))
    assert_close(out, lse, expected, case.dtype)


@pytest.mark.parametrize(("heads", "heads_kv"), [(3, 2), (33, 2), (2, 4)])
def test_r16_heads_that_do_not_divide(heads, heads_kv):
    with pytest.raises(ValueError, match=f"{heads} heads and k has {heads_kv}"):
        check(Case(heads=heads, heads_kv=heads_kv))


@pytest.mark.parametrize("used", [False, True], ids=["full", "seqused"])
@pytest.mark.parametrize("window", [(2, 0), (0, 2)], ids=str)
def test_r22_one_sided_windows(window, used):
    lengths = {"seqused_q": np.array([6]), "seqused_k": np.array([6])} if used else {}
    size = 8 if used else 6
    seen = keys_read(fa.flash_attention, size, size, window_size=window, **lengths)[:6]
    assert seen.sum(axis=1).tolist() == ([1, 2] + [3] * 4 if window[0] else [3] * 4 + [2, 1])
    np.testing.assert_array_equal(seen[:, :6], oracle.visible_keys(6, 6, window))


@pytest.mark.parametrize(
    ("seqlen_q", "bottom_right", "top_left"), [(1, [4], [1]), (2, [3, 4], [1, 2])]
)
def test_r23_alignment_of_causal_masks(seqlen_q, bottom_right, top_left):
    seen = keys_read(fa.flash_attention, seqlen_q, 4, causal=True)
    assert seen.sum(axis=1).tolist() == bottom_right
    seen = keys_read(fa.dot_product_attention, seqlen_q, 4, is_causal=True)
    assert seen.sum(axis=1).tolist() == top_left


def test_r24_softcap():
    """In one process, each cap is its own; and the derivative of lse by the logit."""
    q = jnp.zeros((1, 1, 1, 64), jnp.bfloat16).at[..., 0].set(20)
    k = jnp.zeros((1, 1, 1, 64), jnp.bfloat16).at[..., 0].set(1)

    def lse(q, softcap):
        keywords = {"softmax_scale": 1.0, "return_lse": True, "implementation": BEST}
        return fa.flash_attention(q, k, k, softcap=softcap, **keywords)[1][0, 0, 0]

    for softcap, expected in ((15.0, 13.05092), (30.0, 17.48348), (0.0, 20.0)):
        np.testing.assert_allclose(jax.jit(lse, static_argnums=1)(q, softcap), expected, atol=2e-5)
    slope = jax.jit(jax.grad(lse), static_argnums=1)(q, 15.0)[0, 0, 0, 0]
    np.testing.assert_allclose(np.float32(slope), 0.24299, rtol=2**-8)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("seqlen_k", [1, 300])
def test_r25_very_low_logits(seqlen_k, num_splits):
    q = jnp.full((1, 1, 1, 128), 64, jnp.bfloat16)
    k = jnp.full((1, seqlen_k, 1, 128), -64, jnp.bfloat16)
    v = make(Case(128, batch=1, seqlen_k=seqlen_k, heads_kv=1))[2]
    attend = functools.partial(
        fa.flash_attention, num_splits=num_splits, return_lse=True, implementation=BEST
    )
    out, lse = jax.jit(attend)(q, k, v)
    # Near 46341 a float32 has steps of 0.004, and so have the weights of parts that are merged.
    mean = v.astype(np.float64).mean(axis=1)[:, None]
    np.testing.assert_allclose(np.asarray(out).astype(np.float64), mean, rtol=2**-7, atol=4e-4)
    np.testing.assert_allclose(lse, -46340.95 + np.log(seqlen_k), rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("factor", [8.0, 2.0**15], ids=["growing", "large"])
@pytest.mark.parametrize("seqlen_q", [64, 200])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_are_independent_of_large_logits(dim, seqlen_q, factor):
    """Large logits, and a maximum that grows from block to block, take a way of their own: rows
    beside them keep their bits."""
    case = Case(dim, batch=1, heads=2, heads_kv=2, seqlen_q=seqlen_q, seqlen_k=600)
    q, k, v = make(case)[:3]
    k = (k.astype(np.float32) * np.linspace(3, 1, 600)[:, None, None]).astype(k.dtype)
    large = np.arange(seqlen_q) % 3 == 0
    mixed = np.where(large[:, None, None], q.astype(np.float32) * factor, q).astype(q.dtype)
    attend = jax.jit(functools.partial(fa.flash_attention, return_lse=True, implementation=BEST))
    for alone, beside in zip(attend(q, k, v), attend(mixed, k, v), strict=True):
        axis = 1 if alone.ndim == 4 else 2
        alone, beside = (np.compress(~large, np.asarray(x), axis=axis) for x in (alone, beside))
        assert alone.tobytes() == beside.tobytes()


@pytest.mark.parametrize("exponent", [10, 17, 24, 28])
def test_large_logits(exponent):
    """Keys of three distinct logits: the greatest has all the weight, and ties share it."""
    q = jnp.full((1, 16, 1, 64), 1, jnp.bfloat16).at[:, ::2].set(-1)
    factor = np.float32([1.75, 2.0, 1.0])[np.arange(140) % 3]
    k = jnp.zeros((1, 140, 1, 64)).at[0, :, 0, 0].set(factor * 2.0**exponent)
    v = jnp.zeros((1, 140, 1, 64)).at[0, :, 0, 0].set(np.arange(140) % 3)
    k, v = k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    attend = functools.partial(
        fa.flash_attention, softmax_scale=1.0, return_lse=True, implementation=BEST
    )
    out, lse = jax.jit(attend)(q, k, v)
    sign = np.where(np.arange(16) % 2 == 0, -1.0, 1.0)
    np.testing.assert_array_equal(
        np.asarray(out, np.float32)[0, :, 0, 0], np.where(sign > 0, 1.0, 2.0)
    )
    top = np.where(sign > 0, 2.0, -1.0) * 2.0**exponent
    np.testing.assert_allclose(lse[0, 0], top, rtol=0.01)


@pytest.mark.parametrize("dim", [12, 264])
def test_r30_other_head_dimensions_are_refused(dim):
    with pytest.raises(ValueError, match=rf"q has head dimension {dim}; allowed are 8, 16"):
        check(Case(dim))
