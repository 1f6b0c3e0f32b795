"""Gradients of attention: the kernels and the reference alike, from the same cases.

Cases are those of ``test_forward.py``, with cotangents of out and of lse. What no sequence owns is
NaN, in the cotangents too.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from attention_cases import BEST, KERNELS, Case, function_of, make, outside, parametrize

import jax_fa_epilogue as fa
from jax_fa_epilogue import _native, native

TILES = (64, 96, 128, 192, 256)
WIDTHS = (8, 16, 24, 40, 56, 64, 72, 80, 88, 96, 112, 128, 136, 160, 192, 224, 248, 256)  # R30
SIZES = ((1, 1), (64, 128), (239, 1), (300, 3), (113, 203), (1, 300), (129, 129), (200, 70))
WINDOWS = ((5, 0), (0, 5), (20, -1), (-1, 20), (33, 17), (0, 0))
# (query tokens, key tokens) of each sequence.
MIXED = ((127, 40), (129, 300), (0, 70), (1, 1), (130, 0), (5, 129))
USED = {"seqused_q": (100, 129, 0, 1, 64, 5), "seqused_k": (40, 299, 70, 0, 0, 65)}

CASES = [
    *(Case(d, seqlen_q=40, seqlen_k=40, heads=2, causal=True) for d in WIDTHS),
    *(Case(d, dtype="float16", batch=1) for d in TILES),
    *(Case(d, batch=1, causal=True) for d in TILES),
    *(Case(d, w, batch=1) for d, w in ((192, 128), (128, 64), (64, 128), (64, 256), (72, 40))),
    *(Case(heads=h, heads_kv=k, batch=1) for h, k in ((3, 3), (6, 2), (7, 1), (8, 1))),
    *(Case(128, heads=h, heads_kv=k, causal=True, seqlen_q=50) for h, k in ((4, 1), (6, 2))),
    *(Case(128, seqlen_q=m, seqlen_k=n, causal=c) for m, n in SIZES for c in (False, True)),
    *(Case(window=w) for w in WINDOWS),
    *(Case(128, window=w, batch=1, causal=c) for w in ((33, 0), (5, 9)) for c in (False, True)),
    Case(window=(40, 30), seqlen_q=300, seqlen_k=180),
    *(Case(softcap=c, dtype=t) for c in (0.5, 15.0) for t in ("bfloat16", "float16")),
    Case(128, softcap=2.0, causal=True, window=(50, 0)),
    *(Case(scale=s) for s in (0.0, -0.7, 2.0)),
    *(Case(seqused_k=u, causal=c) for u in ((203, 96), (0, 1)) for c in (False, True)),
    *(Case(seqused_q=u, causal=c) for u in ((113, 64), (0, 5)) for c in (False, True)),
    Case(128, seqused_q=(0, 90), seqused_k=(33, 130), window=(60, 20)),
    Case(128, seqlen_q=9, seqlen_k=500, num_splits=3, heads=8),
    Case(batch=40, heads=8, heads_kv=4, seqlen_q=65, seqlen_k=65, causal=True),
    *(Case(d, lengths=MIXED) for d in TILES),
    *(Case(d, lengths=MIXED, causal=True, dtype="float16") for d in (64, 128)),
    Case(128, lengths=MIXED, heads=7, heads_kv=1),
    Case(40, 72, lengths=MIXED, padding=66),
    Case(lengths=MIXED, window=(30, 7), softcap=5.0, padding=3),
    Case(lengths=MIXED, window=(0, -1)),
    *(Case(128, lengths=MIXED, **USED, padding=9, causal=c) for c in (False, True)),
    Case(lengths=MIXED, seqused_q=USED["seqused_q"]),
    Case(lengths=MIXED, seqused_k=USED["seqused_k"], window=(-1, 20)),
    Case(lengths=tuple((256 // n, 256 // n) for n in range(1, 40)), causal=True, heads=2),
    Case(lengths=((0, 0),) * 3, padding=65),
    Case(lengths=((0, 0), (70, 64), (0, 5)), padding=1),
]
# A few more tiles than there are CTAs or clusters: the last ones are split by queries.
SPLIT = [
    Case(128, seqlen_q=1100, seqlen_k=1000, heads=34, heads_kv=17, batch=1),
    Case(128, seqlen_q=1030, seqlen_k=389, heads=34, heads_kv=34, batch=1),
    *(Case(d, seqlen_q=1100, seqlen_k=500, heads=34, heads_kv=17, batch=1) for d in (192, 256)),
    Case(192, 128, seqlen_q=1100, seqlen_k=500, heads=34, heads_kv=17, batch=1, dtype="float16"),
    Case(72, 40, seqlen_q=1200, seqlen_k=129, heads=35, heads_kv=35, dtype="float16"),
    # Less than one round; and with more parts than CTAs.
    Case(128, seqlen_q=4096, seqlen_k=64, heads=4, heads_kv=4, batch=1),
    Case(128, seqlen_q=2048, seqlen_k=128, heads=70, heads_kv=70, batch=1),
    Case(128, seqlen_q=1500, seqlen_k=1, heads=135, heads_kv=135, batch=1, softcap=5.0),
]
DETERMINISTIC = [
    Case(128, causal=True, deterministic=True),
    Case(heads=8, heads_kv=1, deterministic=True),
    Case(window=(20, 3), deterministic=True, seqlen_q=300, seqlen_k=180),
    Case(128, lengths=MIXED, **USED, causal=True, deterministic=True),
    Case(lengths=((0, 0), (300, 64), (0, 5)), padding=1, window=(9, 0), deterministic=True),
    Case(seqused_q=(0, 5), seqused_k=(203, 0), deterministic=True),
]


def cotangents(case, operands, seed=1):
    """Of out and lse, normal; rows outside every sequence hold NaN."""
    q, _, v, descriptors = operands
    rng = np.random.default_rng(seed)
    dout = rng.standard_normal((*q.shape[:-1], v.shape[-1]), np.float32)
    dlse = rng.standard_normal(q.shape[:-1], np.float32)
    rows = outside(q.shape, "q", descriptors)
    dout[rows], dlse[rows] = np.nan, np.nan
    return dout.astype(q.dtype), np.swapaxes(dlse, -1, -2)


def gradients_of(function):
    """Return a compiled (q, k, v, descriptors, dout, dlse) -> dq, dk, dv."""

    @jax.jit
    def pull(q, k, v, descriptors, dout, dlse):
        return jax.vjp(lambda *x: function(*x, descriptors), q, k, v)[1]((dout, dlse))

    return pull


@functools.cache
def pull_of(case):
    """`gradients_of` the case's call, compiled once."""
    return gradients_of(function_of(case))


def call(case, operands, poison=None, function=None):
    """Gradients of the second of two calls, in poisoned memory.

    With ``deterministic``, and always where the reference runs, both calls are bitwise equal.
    """
    operands = jax.tree.map(jnp.asarray, operands)
    pull = pull_of(case) if function is None else gradients_of(function)
    first = pull(*operands)
    if poison is None:
        return first
    # The accumulator of dQ is as large as dQ in float32.
    with poison(*((x.shape, x.dtype) for x in first), (first[0].shape, jnp.float32)):
        second = pull(*operands)
    if case.deterministic or not KERNELS:
        assert_bitwise(first, second)
    return second


def assert_bitwise(first, second):
    for a, b in zip(first, second, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def expect(case, operands):
    """The oracle's dq, dk, dv, and the largest error of each in 16-bit arithmetic."""
    q, k, v, descriptors, dout, dlse = operands
    attend = oracle.attention if case.lengths is None else oracle.attention_varlen
    keywords = {**descriptors, **case.mask, "scale": case.scale, "softcap": case.softcap}
    keywords |= {"dout": dout, "dlse": dlse}
    exact = attend(q, k, v, **keywords)
    rounded = attend(q, k, v, **keywords, round_to=jnp.dtype(case.dtype))
    return errors(exact, rounded, jnp.dtype(case.dtype))


def errors(exact, rounded, dtype):
    """Each gradient and how far it is from the one in 16-bit arithmetic."""
    pairs = [(getattr(exact, name), getattr(rounded, name)) for name in ("dq", "dk", "dv")]
    return [(a, np.abs(a - b.astype(dtype).astype(np.float64)).max(initial=0)) for a, b in pairs]


def assert_close(gradients, expected, dtype):
    """FlashAttention's tolerance: twice the error of the same computation in 16 bits."""
    names = ("dq", "dk", "dv")[: len(expected)]
    for name, got, (want, error) in zip(names, gradients, expected, strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        got = np.asarray(got).astype(np.float64)
        assert np.isfinite(got).all(), name
        difference = np.abs(got - want).max(initial=0)
        assert difference <= 2 * error + 1e-4, (name, difference, error)


def assert_zero_outside(case, gradients, descriptors):
    """Exactly zero where no sequence is."""
    for side, arrays in (("q", gradients[:1]), ("k", gradients[1:])):
        for x in arrays:
            rows = outside(x.shape, side, descriptors)
            assert not np.asarray(x.astype(jnp.float32))[rows].any()


def check(case, poison=None, use=("out", "lse")):
    """Compare the gradients through the results in `use` with the oracle; returns them."""
    operands = make(case)
    dout, dlse = cotangents(case, operands)
    dout = dout if "out" in use else np.zeros_like(dout)
    dlse = dlse if "lse" in use else np.zeros_like(dlse)
    operands = (*operands, dout, dlse)
    gradients = call(case, operands, poison)
    assert_close(gradients, expect(case, operands), case.dtype)
    assert_zero_outside(case, gradients, operands[3])
    return gradients


@parametrize(CASES, step=17)
def test_values(case, poison):
    check(case, poison)


@parametrize(DETERMINISTIC, step=6)
def test_values_of_the_deterministic_mode(case, poison):
    check(case, poison)


@parametrize(SPLIT, step=8)
def test_split_tiles(case, poison):
    """Parts are added in order: the default mode's dK and dV are the same bits as well."""
    if native.num_multiprocessors() != 132:
        pytest.skip("the cases are split on 132 multiprocessors")
    plan = _native.plan_backward(
        dtype={"bfloat16": "bf16", "float16": "f16"}[case.dtype],
        batch=case.batch,
        heads_kv=case.heads_kv,
        qhead_per_khead=case.heads // case.heads_kv,
        sequences=1,
        seqlen_q=case.seqlen_q,
        seqlen_k=case.seqlen_k,
        head_dim=case.dim,
        head_dim_v=case.dim_v or case.dim,
        num_sms=132,
    )
    assert plan["parts"] > 1
    gradients = check(case, poison)
    operands = make(case)
    again = call(case, (*operands, *cotangents(case, operands)))
    assert_bitwise(gradients[1:], again[1:])


@pytest.mark.parametrize("use", [("out",), ("lse",)], ids="".join)
@parametrize([Case(batch=1), Case(128, lengths=MIXED, causal=True)])
def test_through_one_result_alone(case, use, poison):
    """R20: dlse costs nothing extra, but is not forgotten; without dout, dv is exactly 0."""
    *_, dv = check(case, poison, use)
    assert np.any(dv) == ("out" in use)


@pytest.mark.parametrize("argument", range(3), ids="qkv")
def test_gradient_for_one_operand(argument):
    case = Case(batch=1, causal=True)
    q, k, v, _ = make(case)
    attend = functools.partial(fa.flash_attention, causal=True, implementation=BEST)

    def loss(*x):
        return jnp.sum(jnp.sin(attend(*x).astype(jnp.float32)))

    alone = jax.jit(jax.grad(loss, argument))(q, k, v)
    every = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    np.testing.assert_allclose(
        np.asarray(alone, np.float32), np.asarray(every[argument], np.float32), atol=2**-7
    )


def test_alignment_as_in_jax(poison):
    """Top-left, with lengths and a residual that has a gradient."""
    case = Case(batch=2, seqlen_q=70, seqlen_k=150)
    lengths = {"seqused_q": np.array([70, 33]), "seqused_k": np.array([20, 150])}
    operands = make(case)
    dout, dlse = cotangents(case, operands)

    def function(q, k, v, descriptors):
        out, lse = fa.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            query_seq_lengths=lengths["seqused_q"],
            key_value_seq_lengths=lengths["seqused_k"],
            return_residual=True,
            implementation=BEST,
        )
        return out, jnp.swapaxes(lse, 1, 2)

    gradients = call(case, (*operands, dout, dlse), poison, function)
    keywords = {"causal": True, "top_left": True, "dout": dout, "dlse": dlse, **lengths}
    exact, rounded = (
        oracle.attention(*operands[:3], **keywords, round_to=dtype)
        for dtype in (None, jnp.dtype(case.dtype))
    )
    expected = errors(exact, rounded, jnp.dtype(case.dtype))
    assert_close(gradients, expected, case.dtype)


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_lying_descriptors(deterministic):
    """Rule 9: traced offsets and lengths that lie act like those that they are clamped to."""
    q, k, v, _ = make(Case(batch=1, seqlen_q=9, seqlen_k=9))
    q, k, v = (x[0] for x in (q, k, v))
    dout, dlse = np.ones_like(q), np.ones((4, 9), np.float32)

    @jax.jit
    def pull(cu_seqlens, used):
        attend = functools.partial(
            fa.flash_attention_varlen,
            max_seqlen_q=5,
            max_seqlen_k=5,
            deterministic=deterministic,
            return_lse=True,
            implementation=BEST,
        )

        def function(q, k, v):
            return attend(q, k, v, cu_seqlens, cu_seqlens, seqused_k=used)

        return jax.vjp(function, q, k, v)[1]((dout, dlse))

    used = np.full(3, 2**31 - 1, np.int32)
    for lying, honest in (
        ((0, 9, 5, 9), (0, 5, 5, 5)),
        ((-3, 4, 2**31 - 1, 0), (0, 4, 9, 9)),
        ((0, 4, 12, 12), (0, 4, 9, 9)),
    ):
        got, want = (pull(np.array(x, np.int32), used) for x in (lying, honest))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (a, b)), atol=2**-7)
            assert np.any(b)
    for gradient in pull(np.array((0, 5, 9, 9), np.int32), np.array([-5, -1, -(2**31)], np.int32)):
        assert not np.any(gradient)


def test_values_far_below_zero(poison):
    """Logits of -46341 where lse is the only bound: no overflow of exp(logit - lse)."""
    q = np.full((1, 70, 1, 128), 64, jnp.bfloat16)
    k = np.full((1, 150, 1, 128), -64, jnp.bfloat16)
    v = make(Case(128, batch=1, seqlen_k=150, heads_kv=1))[2]
    case = Case(128, batch=1, heads=1, heads_kv=1, causal=True)
    dout, dlse = cotangents(case, (q, k, v, {}))
    gradients = call(case, (q, k, v, {}, dout, dlse), poison)
    exact = oracle.attention(q, k, v, causal=True, dout=dout, dlse=dlse)
    for got, want in zip(gradients, (exact.dq, exact.dk, exact.dv), strict=True):
        got = np.asarray(got).astype(np.float64)
        # Near 46341 a float32 has steps of 0.004, and so have the weights.
        np.testing.assert_allclose(got, want, atol=2e-2 * max(1, np.abs(want).max()))


# ---- Reported faults ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dim", "causal"),
    [
        (64, True),
        pytest.param(64, False, marks=pytest.mark.gpu),
        *(pytest.param(d, c, marks=pytest.mark.gpu) for d in (128, 256) for c in (False, True)),
    ],
)
def test_r03_no_queries_beside_keys(dim, causal, poison):
    lengths = ((0, 200), (130, 150), (70, 90), (0, 40))
    case = Case(dim, lengths=lengths, heads_kv=1, causal=causal)
    _, dk, dv = check(case, poison)
    for x in (dk, dv):
        x = np.asarray(x.astype(jnp.float32))
        assert not x[:200].any() and not x[440:480].any() and x[200:440].any()


def test_r05_buffer_longer_than_the_sequences(poison):
    lengths = tuple((n, n) for n in (144, 288, 512))
    case = Case(lengths=lengths, padding=2, heads=4, heads_kv=4)
    for x in check(case, poison):
        assert not np.asarray(x.astype(jnp.float32))[944:].any()


@pytest.mark.parametrize(("heads", "batch"), [(3, 2), pytest.param(1, 1, marks=pytest.mark.gpu)])
def test_r08_last_tile_ends_at_the_sequence(heads, batch, poison):
    case = Case(seqlen_q=129, seqlen_k=129, heads=heads, heads_kv=heads, batch=batch)
    together = check(dataclasses.replace(case, deterministic=True), poison)
    operands = make(case)
    dout, dlse = cotangents(case, operands)
    alone = Case(seqlen_q=129, seqlen_k=129, heads=1, heads_kv=1, batch=1, deterministic=True)
    for b, h in np.ndindex(batch, heads):
        one = (x[b : b + 1, :, h : h + 1] for x in operands[:3])
        gradients = call(
            alone, (*one, {}, dout[b : b + 1, :, h : h + 1], dlse[b : b + 1, h : h + 1])
        )
        assert_bitwise((x[b, :, h] for x in together), (x[0, :, 0] for x in gradients))


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 0},
        {"seqlen_q": 0},
        {"seqlen_k": 0, "seqlen_q": 3},
        {"heads": 0, "heads_kv": 0},
        {"lengths": ((0, 0),)},
        {"lengths": ((0, 3), (0, 0))},
    ],
    ids=str,
)
def test_r09_empty_axes(sizes, poison):
    case = Case(**sizes)
    operands = make(case)
    gradients = call(case, (*operands, *cotangents(case, operands)), poison)
    for x, gradient in zip(operands, gradients, strict=False):
        assert gradient.shape == x.shape and not np.any(gradient)


@pytest.mark.parametrize(
    "batch", [pytest.param(65536, marks=pytest.mark.gpu), 65537 if KERNELS else 4097]
)
def test_r10_large_batch(batch):
    q, k, v, dout = jax.random.normal(jax.random.key(0), (4, batch, 1, 1, 64), jnp.bfloat16)
    attend = functools.partial(fa.flash_attention, implementation=BEST)
    dq, dk, dv = jax.jit(lambda *x: jax.vjp(attend, *x[:3])[1](x[3]))(q, k, v, dout)
    assert jnp.array_equal(dv, dout)
    # The only weight is 1 whatever the logit is.
    assert jnp.abs(dq).max() < 1e-2 and jnp.abs(dk).max() < 1e-2


@pytest.mark.gpu
def test_r12_more_than_2_to_the_31_elements():
    """Offsets are 64 bits wide: each row sees its own key alone."""
    shape = (1, 524_289, 32, 128)
    dout = jax.lax.broadcasted_iota(jnp.bfloat16, shape, 1) % 251
    dout += jnp.arange(32, dtype=jnp.bfloat16)[:, None]
    attend = functools.partial(fa.flash_attention, window_size=(0, 0), implementation=BEST)
    ones = jnp.ones_like(dout)

    @jax.jit
    def correct(ones, dout):
        dq, dk, dv = jax.vjp(attend, ones, ones, ones)[1](dout)
        return jnp.array_equal(dv, dout) & ~jnp.any(dq) & ~jnp.any(dk)

    assert correct(ones, dout)


def test_r15_packed_heads_have_their_own_limits():
    """Gradients with K and V repeated, summed over the group, and for each setting of pack_gqa."""
    case = Case(seqlen_q=192, seqlen_k=192, heads=8, batch=1, causal=True)
    operands = make(case)
    operands = (*operands, *cotangents(case, operands))
    expected = expect(case, operands)
    for pack_gqa in (True, False, None):
        changed = dataclasses.replace(case, pack_gqa=pack_gqa)
        assert_close(call(changed, operands), expected, case.dtype)
    q, k, v, *rest = operands
    k, v = (np.repeat(x, 4, axis=2) for x in (k, v))
    dq, dk, dv = call(dataclasses.replace(case, heads_kv=8), (q, k, v, *rest))
    dk, dv = (x.astype(jnp.float32).reshape(1, 192, 2, 4, 64).sum(3) for x in (dk, dv))
    # Each head's own gradient is rounded before the sum.
    assert_close([dq], expected[:1], case.dtype)
    for got, (want, error) in zip((dk, dv), expected[1:], strict=True):
        assert np.abs(np.asarray(got) - want).max() <= 8 * error


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_r19_cotangent_of_the_kernel_before(deterministic):
    """5000 steps whose dout a slow kernel has just written; a launch that does not wait is seen."""
    case = Case(128, batch=1, seqlen_q=256, seqlen_k=256, heads=16, heads_kv=16)
    q, k, v = map(jnp.asarray, make(case)[:3])
    attend = functools.partial(
        fa.flash_attention, deterministic=deterministic, return_lse=True, implementation=BEST
    )
    weight = jax.random.normal(jax.random.key(1), (128, 128), jnp.bfloat16)

    def loss(q, k, v, factor):
        out, lse = attend(q, k, v)
        for _ in range(3):
            out = out @ weight / 11
        return factor * (jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(lse)))

    gradient = jax.grad(loss, (0, 1, 2))

    @jax.jit
    def differing(q, k, v):
        first = gradient(q, k, v, 1.0)

        def step(count, factor):
            # The factor is 1, which the compiler does not know.
            again = gradient(q, k, v, factor)
            # In any order of additions dQ differs by roundings; stale data differ by more.
            tolerance = 0.0 if deterministic else 2**-6
            wrong = [
                jnp.any(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)) > tolerance)
                for a, b in zip(first, again, strict=True)
            ]
            return count + functools.reduce(jnp.logical_or, wrong), None

        return jax.lax.scan(step, jnp.int32(0), jnp.ones(5000))[0]

    assert differing(q, k, v) == 0


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 7), (7, 5)])
def test_r20_gradient_of_lse_alone(seqlen_q, seqlen_k, poison):
    """dQ = scale * P K, dK = scale * P^T Q, dV = 0; rows that see nothing have gradient 0."""
    case = Case(batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads=2, heads_kv=2, causal=True)
    dq, _, dv = check(case, poison, use=("lse",))
    empty = max(0, seqlen_q - seqlen_k)
    assert not np.any(dv) and not np.any(dq[:, :empty])
    assert np.all(np.any(dq[:, empty:], axis=-1))


@pytest.mark.parametrize("heads_kv", [2, pytest.param(16, marks=pytest.mark.gpu)])
def test_r21_semaphores_are_reset(heads_kv, poison):
    """Deterministic calls within one loop and one after another, all bitwise equal."""
    count, seqlen = (100, 512) if KERNELS else (2, 40)
    case = Case(
        128,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        heads=16,
        heads_kv=heads_kv,
        causal=True,
        deterministic=True,
    )
    operands = make(case)
    operands = jax.tree.map(jnp.asarray, (*operands, *cotangents(case, operands)))
    pull = pull_of(case)
    first = call(case, operands, poison)

    @jax.jit
    def differing(operands, first):
        def step(count, zero):
            again = pull(operands[0] + zero, *operands[1:])
            wrong = [jnp.any(a != b) for a, b in zip(first, again, strict=True)]
            return count + functools.reduce(jnp.logical_or, wrong), None

        return jax.lax.scan(step, jnp.int32(0), jnp.zeros(count, case.dtype))[0]

    assert differing(operands, first) == 0
    for _ in range(count):
        assert_bitwise(first, pull(*operands))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case(128, causal=True, deterministic=True, heads=16, seqlen_q=700, seqlen_k=700),
        Case(window=(200, 0), deterministic=True, heads=16, seqlen_q=900, seqlen_k=500),
        Case(128, lengths=MIXED, **USED, heads=16, causal=True, deterministic=True),
    ],
    ids=str,
)
def test_deterministic_repetitions_under_load(case):
    """1000 repetitions while matrix products keep the device busy in between."""
    operands = make(case)
    operands = jax.tree.map(jnp.asarray, (*operands, *cotangents(case, operands)))
    pull = functools.partial(pull_of(case), *operands)
    load = jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda _, x: x @ x / 64, x))
    busy = jnp.ones((2048, 2048), jnp.bfloat16)
    equal = jax.jit(lambda a, b: functools.reduce(jnp.logical_and, map(jnp.array_equal, a, b)))
    first, same = pull(), []
    for _ in range(1000):
        busy = load(busy)
        same.append(equal(pull(), first))
    assert np.all(jax.device_get(same))


@pytest.mark.parametrize("in_axes", [(0, None, None), (None, 0, 0)], ids=str)
def test_r26_vmap(in_axes):
    """Gradient of a vmap, vmap of a gradient and jacrev equal a loop in Python."""
    case = Case(batch=2, seqlen_q=16, seqlen_k=16, heads=2, causal=True)
    copies = [make(case, seed)[:3] for seed in range(3)]
    operands = [
        np.stack(x) if axis == 0 else x[0]
        for x, axis in zip(zip(*copies, strict=True), in_axes, strict=True)
    ]
    attend = functools.partial(fa.flash_attention, causal=True, implementation=BEST)

    def loss(q, k, v):
        return jnp.sum(jnp.sin(attend(q, k, v).astype(jnp.float32)))

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    each = [
        gradient(*(x[i] if axis == 0 else x for x, axis in zip(operands, in_axes, strict=True)))
        for i in range(3)
    ]
    stacked = [np.stack(x).astype(np.float32) for x in zip(*each, strict=True)]
    mapped = jax.jit(jax.vmap(gradient, in_axes))(*operands)
    summed = jax.jit(jax.grad(lambda *x: jax.vmap(loss, in_axes)(*x).sum(), (0, 1, 2)))(*operands)
    for a, b, want, axis in zip(mapped, summed, stacked, in_axes, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), want, rtol=2**-6, atol=2**-6)
        want = want if axis == 0 else want.sum(0)
        np.testing.assert_allclose(np.asarray(b, np.float32), want, rtol=2**-6, atol=2**-5)


def test_r26_jacrev():
    """The cotangents alone are mapped."""
    case = Case(batch=1, seqlen_q=5, seqlen_k=9, heads=2)
    q, k, v, _ = make(case)

    def corner(q):
        out = fa.flash_attention(q, k, v, implementation=BEST)
        return out.astype(jnp.float32)[0, :3, 0, 0]

    jacobian = jax.jit(jax.jacrev(corner))(q)
    row = jax.jit(jax.grad(lambda q, i: corner(q)[i]))
    for i in range(3):
        np.testing.assert_allclose(
            np.asarray(jacobian[i], np.float32), np.asarray(row(q, i), np.float32), atol=2**-8
        )
