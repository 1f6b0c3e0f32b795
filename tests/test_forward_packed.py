"""The fused forward on packed sequences, and on splits of the keys; as test_forward.py."""

from __future__ import annotations

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from attention_cases import (
    BEST,
    KERNELS,
    Case,
    assert_close,
    call,
    check,
    check_repeats,
    expect,
    function_of,
    make,
    parametrize,
)

import jax_fa_epilogue as fa

# (query tokens, key tokens) of each sequence.
MIXED = ((127, 40), (129, 300), (0, 70), (1, 1), (130, 0), (5, 129))
EQUAL = ((127, 127), (129, 129), (1, 1), (130, 130))
ZIPF = tuple((256 // n, 256 // n) for n in range(1, 40))
USED = {"seqused_q": (100, 129, 0, 1, 64, 5), "seqused_k": (40, 299, 70, 0, 0, 65)}

CASES = [
    *(Case(d, lengths=MIXED) for d in (64, 96, 128, 256)),
    *(Case(d, lengths=MIXED, causal=True, dtype="float16") for d in (64, 128)),
    *(Case(lengths=EQUAL, heads=h, heads_kv=h) for h in (1, 3)),  # R08
    *(Case(128, lengths=MIXED, heads=6, pack_gqa=p, causal=True) for p in (True, False)),
    Case(128, lengths=MIXED, heads=7, heads_kv=1, pack_gqa=True),
    Case(192, 128, lengths=MIXED, causal=True),
    Case(40, 72, lengths=MIXED, padding=66),
    Case(lengths=MIXED, window=(30, 7), softcap=5.0, padding=3),
    Case(lengths=MIXED, window=(0, -1)),
    *(Case(128, lengths=MIXED, **USED, padding=9, causal=c) for c in (False, True)),
    Case(lengths=MIXED, seqused_q=USED["seqused_q"]),
    Case(lengths=MIXED, seqused_k=USED["seqused_k"], window=(-1, 20)),
    Case(lengths=ZIPF, causal=True, heads=2),
    Case(lengths=((0, 0),) * 3, padding=65),
    Case(lengths=((0, 0), (70, 64), (0, 5)), padding=1),
    *(Case(128, seqlen_q=1, seqlen_k=1500, num_splits=n, heads=8) for n in (1, 3, 8, 0)),
    Case(seqlen_q=4, seqlen_k=1000, num_splits=4, causal=True, heads=8, dtype="float16"),
    Case(96, seqlen_q=70, seqlen_k=700, num_splits=3, pack_gqa=False),
    Case(192, 128, seqlen_q=9, seqlen_k=500, num_splits=2, window=(200, 3)),
    Case(256, seqlen_q=200, seqlen_k=300, num_splits=5, softcap=2.0),
    Case(seqlen_q=33, seqlen_k=10, num_splits=7),
    *(Case(128, seqlen_k=300, num_splits=3, seqused_k=u, seqused_q=(9, 113)) for u in ((0, 130),)),
    *(Case(128, lengths=MIXED, num_splits=3, causal=c, padding=2) for c in (False, True)),
    Case(lengths=MIXED, **USED, num_splits=2, dtype="float16"),
]


@parametrize(CASES)
def test_values(case, poison):
    check(case, poison)


def separately(case, operands):
    """Results of a call for each sequence alone, laid out as those of the packed call."""
    q, k, v, descriptors = operands
    total, heads, dim_v = q.shape[0], q.shape[1], v.shape[2]
    out, lse = np.zeros((total, heads, dim_v), q.dtype), np.full((heads, total), -np.inf, "float32")
    cu_q, cu_k = descriptors["cu_seqlens_q"], descriptors["cu_seqlens_k"]
    for i in range(len(cu_q) - 1):
        rows, keys = (slice(cu[i], cu[i + 1]) for cu in (cu_q, cu_k))
        used = descriptors.get("seqused_k")
        if used is not None:
            keys = slice(keys.start, keys.start + used[i])
        alone = {"lengths": None, "seqused_k": None, "seqlen_q": rows.stop - rows.start}
        one = {**vars(case), **alone, "seqlen_k": keys.stop - keys.start}
        results = call(Case(**one), (q[None, rows], k[None, keys], v[None, keys], {}))
        out[rows], lse[:, rows] = np.asarray(results[0][0]), np.asarray(results[1][0])
    return out, lse


# ---- Splits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_splits", [1, 2, 16, 32, 128, 256])
def test_r13_split_counts_agree(num_splits, poison):
    case = Case(128, seqlen_q=1, seqlen_k=4096, batch=1, heads=16, heads_kv=8)
    expected = expect(case, make(case))
    split = Case(**{**vars(case), "num_splits": num_splits})
    out, lse = call(split, make(split), poison)
    assert_close(out, lse, expected, case.dtype)


@pytest.mark.parametrize("used", [None, (1000, 18, 64)], ids=["full", "seqused_k"])
def test_r14_splits_of_packed_queries(used, poison):
    case = Case(
        128,
        lengths=((1, 1328), (5, 18), (129, 463)),
        heads=8,
        causal=True,
        num_splits=4,
        seqused_k=used,
    )
    operands = make(case)
    expected = expect(case, operands)
    out, lse = call(case, operands, poison)
    assert_close(out, lse, expected, case.dtype)
    alone, alone_lse = separately(Case(**{**vars(case), "num_splits": 1}), operands)
    np.testing.assert_allclose(lse, alone_lse, rtol=1e-6, atol=1e-3)
    difference = np.abs(np.asarray(out).astype(np.float32) - alone.astype(np.float32)).max()
    assert difference <= 2 * expected[2] + 1e-5


def test_bits_do_not_depend_on_neighbours():
    """Rule 7, with a fixed number of splits."""
    case = Case(128, seqlen_q=3, seqlen_k=700, batch=3, num_splits=3, heads=8)
    q, k, v, _ = make(case)
    out, lse = call(case, (q, k, v, {}))
    alone = Case(**{**vars(case), "batch": 1})
    for b in range(3):
        one, one_lse = call(alone, (q[b : b + 1], k[b : b + 1], v[b : b + 1], {}))
        np.testing.assert_array_equal(np.asarray(one[0]), np.asarray(out[b]))
        np.testing.assert_array_equal(np.asarray(one_lse[0]), np.asarray(lse[b]))


@pytest.mark.parametrize(
    "keywords",
    [{}, {"causal": True, "window_size": (150, 0)}, {"seqused_k": jnp.array([300, 0])}],
    ids=["plain", "causal", "seqused"],
)
def test_partial_results_combine_to_the_whole(keywords, poison):
    case = Case(128, seqlen_q=70, seqlen_k=400)
    q, k, v, _ = make(case)
    partial = jax.jit(
        functools.partial(
            fa.flash_attention_partials, num_splits=3, implementation=BEST, **keywords
        )
    )
    shapes = jax.eval_shape(partial, q, k, v)
    assert [x.shape for x in shapes] == [(3, 2, 70, 4, 128), (3, 2, 4, 70)]
    with poison(*((x.shape, x.dtype) for x in shapes)):
        parts = partial(q, k, v)
    assert {x.dtype for x in parts} == {jnp.dtype(jnp.float32)}
    # Also where a part is empty, it is 0 and -inf, and not what lay in memory.
    empty = np.isneginf(np.asarray(parts[1])).swapaxes(2, 3)
    assert not np.asarray(parts[0])[empty].any() and np.isfinite(np.asarray(parts[0])).all()
    out, lse = jax.jit(functools.partial(fa.combine, out_dtype=case.dtype))(*parts)
    exact = {"window" if k == "window_size" else k: x for k, x in keywords.items()}
    whole = oracle.attention(q, k, v, **exact)
    rounded = oracle.attention(q, k, v, **exact, round_to=q.dtype)
    expected = whole.out, whole.lse, np.abs(rounded.out - whole.out).max()
    assert_close(out, lse, expected, case.dtype)


def test_chunks_of_keys_combine_to_the_whole():
    """vmap over chunks of the keys gives partial results, too; with the gradient of the whole."""
    case = Case(seqlen_q=5, seqlen_k=256, batch=2)
    q, k, v, _ = make(case)
    expected = expect(case, (q, k, v, {}))

    def whole(q, k, v):
        chunks = [x.reshape(2, 4, 64, 2, 64).swapaxes(0, 1) for x in (k, v)]
        attend = functools.partial(fa.flash_attention, return_lse=True, implementation=BEST)
        out, lse = jax.vmap(attend, (None, 0, 0))(q, *chunks)
        return fa.combine(out.astype(jnp.float32), lse, out_dtype=q.dtype)

    (out, lse), vjp = jax.vjp(jax.jit(whole), *map(jnp.asarray, (q, k, v)))
    np.testing.assert_allclose(lse, expected[1], rtol=1e-6, atol=1e-3)
    # The chunks' results are rounded before they are merged.
    np.testing.assert_allclose(np.asarray(out).astype(np.float64), expected[0], atol=2**-7)
    dout = make(case, seed=1)[0]
    gradients = jax.jit(vjp)((jnp.asarray(dout), jnp.zeros_like(lse)))
    exact = oracle.attention(q, k, v, dout=dout)
    for gradient, want in zip(gradients, (exact.dq, exact.dk, exact.dv), strict=True):
        np.testing.assert_allclose(np.asarray(gradient).astype(np.float64), want, atol=0.03)


def test_gradient_of_partial_results():
    case = Case(seqlen_q=5, seqlen_k=300, batch=1)
    q, k, v, _ = make(case)

    def merged(q, k, v):
        parts = fa.flash_attention_partials(q, k, v, num_splits=2, causal=True, implementation=BEST)
        return fa.combine(*parts)

    def loss(q, k, v):
        out, lse = merged(q, k, v)
        return out.sum() + jnp.sin(lse).sum()

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    lse = np.asarray(jax.jit(merged)(q, k, v)[1])
    ones = np.ones((*q.shape[:3], 64))
    exact = oracle.attention(q, k, v, causal=True, dout=ones, dlse=np.cos(lse))
    for gradient, want in zip(gradients, (exact.dq, exact.dk, exact.dv), strict=True):
        np.testing.assert_allclose(np.asarray(gradient).astype(np.float64), want, atol=0.03)


# ---- Packed sequences ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_splits", [1, 3])
def test_r02_sequence_without_keys(num_splits, poison):
    case = Case(128, lengths=((5, 4), (7, 0), (3, 6)), num_splits=num_splits)
    operands = make(case)
    out, lse = check(case, poison)
    assert not np.asarray(out.astype(jnp.float32))[5:12].any()
    assert np.isneginf(np.asarray(lse)[:, 5:12]).all()
    alone, alone_lse = separately(case, operands)
    # The reference cuts packed and dense sequences into different tiles, the kernels do not.
    tolerance = 0 if KERNELS else 2**-7
    out, alone = np.asarray(out).astype(np.float32), alone.astype(np.float32)
    np.testing.assert_allclose(out, alone, rtol=tolerance)
    np.testing.assert_allclose(lse, alone_lse, rtol=tolerance)


def test_r05_buffer_longer_than_the_sequences(poison):
    lengths = tuple((n, n) for n in (144, 288, 512))
    case = Case(lengths=lengths, padding=2, heads=4, heads_kv=4)
    out, lse = check(case, poison)
    assert not np.asarray(out.astype(jnp.float32))[944:].any()
    assert np.isneginf(np.asarray(lse)[:, 944:]).all()
    function = function_of(case)
    q, k, v, descriptors = make(case)

    def loss(q, k, v):
        return function(q, k, v, descriptors)[0].astype(jnp.float32).sum()

    for gradient in jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v):
        gradient = np.asarray(gradient.astype(jnp.float32))
        assert np.isfinite(gradient).all() and not gradient[944:].any()


@pytest.mark.parametrize("num_splits", [1, 2])
def test_r06_lying_offsets_are_clamped(num_splits, poison):
    """Traced values that raise when concrete; one program for all, as a replayed graph has it."""
    q, k, v = (jnp.asarray(make(Case(batch=1, seqlen_q=9, seqlen_k=9))[i][0]) for i in range(3))

    @jax.jit
    def attend(q, k, v, cu_seqlens, used):
        return fa.flash_attention_varlen(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            max_seqlen_q=5,
            max_seqlen_k=5,
            seqused_k=used,
            num_splits=num_splits,
            return_lse=True,
            implementation=BEST,
        )

    for cu_seqlens, sequences in (
        ((1, 5, 9, 9), [(1, 5), (5, 9)]),
        ((0, 9, 5, 9), [(0, 5)]),
        ((0, 4, 12, 12), [(0, 4), (4, 9)]),
        ((-3, 4, 2**31 - 1, 0), [(0, 4), (4, 9)]),
        ((0, 4, 8, 8), [(0, 4), (4, 8)]),
        ((0, 0, 0, 0), []),
    ):
        cu_seqlens = np.array(cu_seqlens, np.int32)
        with poison((q.shape, q.dtype), ((4, 9), "float32")):
            out, lse = attend(q, k, v, cu_seqlens, np.full(3, 2**31 - 1, np.int32))
        expected, expected_lse = np.zeros(q.shape), np.full((4, 9), -np.inf)
        error = 0
        for begin, end in sequences:
            rows = slice(begin, end)
            part = [np.asarray(x[None, rows]) for x in (q, k, v)]
            exact = oracle.attention(*part)
            rounded = oracle.attention(*part, round_to=q.dtype)
            expected[rows], expected_lse[:, rows] = exact.out[0], exact.lse[0]
            error = max(error, np.abs(exact.out - rounded.out).max())
        assert_close(out, lse, (expected, expected_lse, error), q.dtype)
        nothing_used = np.array([-5, -1, -(2**31)], np.int32)
        assert not np.any(attend(q, k, v, cu_seqlens, nothing_used)[0])


def test_r09_no_tokens():
    case = Case(lengths=((0, 0),))
    q, k, v, descriptors = make(case)
    keywords = {"max_seqlen_q": 0, "max_seqlen_k": 0, "return_lse": True, "implementation": BEST}
    attend = functools.partial(fa.flash_attention_varlen, **keywords)
    out, lse = jax.jit(attend)(q, k, v, *descriptors.values())
    assert out.shape == (0, 4, 64) and lse.shape == (4, 0)


def test_many_sequences_of_one_token():
    """Found on the device; each query sees its one key. The reference takes a ms for each."""
    count, padding = 100_000 if KERNELS else 1_000, 3
    v = jax.random.normal(jax.random.key(0), (count + padding, 1, 64), jnp.bfloat16)
    cu_seqlens = jnp.arange(count + 1, dtype=jnp.int32)
    attend = functools.partial(
        fa.flash_attention_varlen, max_seqlen_q=1, max_seqlen_k=1, implementation=BEST
    )
    out = jax.jit(attend)(v, v, v, cu_seqlens, cu_seqlens)
    assert jnp.array_equal(out[:count], v[:count])
    assert not jnp.any(out[count:])


@pytest.mark.gpu
def test_one_sequence_of_a_million():
    """Among shorter ones; each query sees its own key."""
    lengths = (5, 1_000_000, 131)
    total = sum(lengths)
    v = jax.random.normal(jax.random.key(0), (total, 1, 64), jnp.bfloat16)
    cu_seqlens = jnp.cumsum(jnp.array((0, *lengths), jnp.int32))
    attend = functools.partial(
        fa.flash_attention_varlen,
        max_seqlen_q=1_000_000,
        max_seqlen_k=1_000_000,
        window_size=(0, 0),
        implementation=BEST,
    )
    assert jnp.array_equal(jax.jit(attend)(v, v, v, cu_seqlens, cu_seqlens), v)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 3])
def test_repeats_bitwise_under_load(num_splits):
    """R07: 300 runs while another stream keeps the device busy; a slow warp leaves no stale O."""
    lengths = tuple((n, n) for n in (1, 63, 65, 200))
    case = Case(128, heads=16, heads_kv=16, lengths=lengths, num_splits=num_splits)
    check_repeats(case)


@pytest.mark.gpu
def test_one_program_for_all_lengths():
    """Twenty calls of one compiled decode function, command buffers on; compiled once."""
    traces = []

    @jax.jit
    def decode(q, k, v, seqused_k):
        traces.append(1)
        for _ in range(4):
            q = fa.flash_attention(q, k, v, seqused_k=seqused_k, causal=True, implementation=BEST)
        return q

    case = Case(128, seqlen_q=1, seqlen_k=3000, batch=4, heads=8)
    q, k, v, _ = make(case)
    rng = np.random.default_rng(1)
    for _ in range(20):
        lengths = rng.integers(0, 3001, 4).astype(np.int32)
        out, expected = decode(q, k, v, lengths), q
        for _ in range(4):
            attended = oracle.attention(expected, k, v, causal=True, seqused_k=lengths)
            expected = attended.out.astype(q.dtype)
        np.testing.assert_allclose(
            np.asarray(out).astype(np.float32), expected.astype(np.float32), atol=2e-3, rtol=2**-6
        )
    assert len(traces) == 1


@pytest.mark.gpu
def test_twenty_layers_in_one_program():
    """A decode step recorded once and replayed with other lengths, against a program per layer."""
    case = Case(128, seqlen_q=1, seqlen_k=700, batch=4, heads=8)
    (q, *_), caches = make(case), []
    for layer in range(20):
        keys = jax.random.split(jax.random.key(layer))
        caches.append([jax.random.normal(key, (4, 700, 2, 128), q.dtype) for key in keys])

    def attend(q, k, v, lengths):
        return q + fa.flash_attention(q, k, v, seqused_k=lengths, causal=True, implementation=BEST)

    @jax.jit
    def step(q, caches, lengths):
        for k, v in caches:
            q = attend(q, k, v, lengths)
        return q

    rng = np.random.default_rng(2)
    for _ in range(5):
        lengths = rng.integers(0, 701, 4).astype(np.int32)
        expected = q
        for k, v in caches:
            expected = jax.jit(attend)(expected, k, v, lengths)
        np.testing.assert_array_equal(step(q, caches, lengths), expected)


@pytest.mark.gpu
def test_r12_cache_of_more_than_2_to_the_31_elements():
    """The last sequence lies beyond; two caches, so that k and v are not one array."""
    batch, seqlen, heads_kv, dim = 9, 262_145, 8, 128
    used = 3000

    def cache(seed):
        last = jax.random.normal(jax.random.key(seed), (seqlen, heads_kv, dim), jnp.bfloat16)
        return jnp.zeros((batch, seqlen, heads_kv, dim), jnp.bfloat16).at[-1].set(last)

    k, v = jax.jit(cache, static_argnums=0)(1), jax.jit(cache, static_argnums=0)(2)
    q = jax.random.normal(jax.random.key(0), (batch, 1, 4 * heads_kv, dim), jnp.bfloat16)
    lengths = jnp.full((batch,), used, jnp.int32).at[-1].set(seqlen)
    attend = functools.partial(fa.flash_attention, causal=True, implementation=BEST)
    out = jax.jit(attend)(q, k, v, seqused_k=lengths)
    # That sequence alone takes other splits, so that only the values agree.
    alone = jax.jit(attend)(q[-1:], k[-1:], v[-1:])
    error = jnp.abs(out[-1:].astype(jnp.float32) - alone.astype(jnp.float32)).max()
    assert error <= 2**-7 * jnp.abs(alone.astype(jnp.float32)).max()
    assert not jnp.any(out[:-1])


@pytest.mark.gpu
def test_splits_take_bounded_memory():
    """Partial results: at most twice the output and 64 MiB; in a process with a peak of its own."""
    program = """
import jax, jax.numpy as jnp
import jax_fa_epilogue as fa
device = jax.devices()[0]
q = jax.block_until_ready(jnp.ones((4, 1, 64, 256), jnp.bfloat16))
k = jax.block_until_ready(jnp.ones((4, 32768, 2, 256), jnp.bfloat16))
attend = jax.jit(lambda q, k: fa.flash_attention(q, k, k, implementation="cuda"))
plan = fa.plan(q, k, k)
compiled = attend.lower(q, k).compile()
before = device.memory_stats()["bytes_in_use"]
out = jax.block_until_ready(compiled(q, k))
peak = device.memory_stats()["peak_bytes_in_use"]
print(plan.num_splits, peak - before, out.nbytes)
"""
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    num_splits, taken, out_bytes = map(int, result.stdout.split())
    assert num_splits > 1
    assert taken <= 3 * out_bytes + (64 << 20)
