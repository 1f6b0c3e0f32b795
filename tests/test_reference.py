"""The reference against the oracle and ``jax.nn``; its transforms are in another file."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from attention_operands import dense_operands, normal, packed_operands, with_gradients
from jax.test_util import check_grads

import jax_fa_epilogue as fa
from jax_fa_epilogue import reference

NAMES = ("out", "lse", "dq", "dk", "dv")


def assert_close(actual, expected, tolerance=2e-5):
    """Compare out, lse and gradients; -inf has to be at the same places."""
    for name, x, reference_x in zip(NAMES, actual, expected, strict=False):
        x = np.asarray(x, np.float64)
        scale = np.abs(reference_x[np.isfinite(reference_x)]).max(initial=1.0)
        np.testing.assert_allclose(x, reference_x, rtol=0, atol=tolerance * scale, err_msg=name)


def fields(result):
    return [getattr(result, name) for name in NAMES]


# ---- Dense ---------------------------------------------------------------------------------------

DENSE = {
    "plain": ((2, 5, 7, 2, 2, 16, 16), {}),
    "gqa, widths": ((2, 5, 7, 6, 2, 16, 8), {"causal": True}),
    "rows without keys": ((2, 7, 3, 2, 1, 16, 24), {"causal": True}),
    "many tiles": ((1, 150, 530, 2, 1, 16, 16), {"causal": True, "softcap": 2.0}),
    "many tiles, more queries": ((1, 530, 150, 2, 1, 16, 16), {"window_size": (9, -1)}),
    # Sizes with which a range of tiles that is one key or row too short loses a whole tile.
    "window": ((1, 300, 600, 1, 1, 8, 8), {"window_size": (45, 85), "softmax_scale": -0.3}),
    "window, scale 0": ((2, 9, 11, 2, 1, 8, 8), {"window_size": (0, 2), "softmax_scale": 0.0}),
    "decode": ((3, 1, 300, 4, 1, 16, 16), {"causal": True}),
}


@pytest.mark.parametrize(("shape", "keywords"), DENSE.values(), ids=DENSE)
def test_dense(shape, keywords):
    operands = dense_operands(0, *shape)
    q, k, v, dout, dlse = operands
    function = functools.partial(reference.flash_attention, return_lse=True, **keywords)
    names = {"softmax_scale": "scale", "window_size": "window"}
    expected = oracle.attention(
        q, k, v, dout=dout, dlse=dlse, **{names.get(n, n): x for n, x in keywords.items()}
    )
    assert_close(with_gradients(function)(*operands), fields(expected))


@pytest.mark.parametrize("which", ["q", "both"])
def test_dense_seqused(which):
    q, k, v, dout, dlse = operands = dense_operands(2, 4, 140, 300, 2, 1, 16, 16)
    used = {
        "seqused_q": jnp.array([140, 0, 7, 131]),
        "seqused_k": jnp.array([3, 300, 0, 270]) if which != "q" else None,
    }

    def function(q, k, v, used):
        return reference.flash_attention(q, k, v, causal=True, return_lse=True, **used)

    expected = oracle.attention(q, k, v, causal=True, dout=dout, dlse=dlse, **used)
    assert_close(with_gradients(function)(*operands, used), fields(expected))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dense_16_bits(dtype):
    """Within twice the error that XLA makes in the same precision, on out and all gradients."""
    q, k, v, dout, dlse = dense_operands(3, 1, 70, 70, 2, 1, 64, 64, dtype)
    dlse = 0 * dlse
    function = functools.partial(reference.flash_attention, causal=True, return_lse=True)
    results = with_gradients(function)(q, k, v, dout, dlse)
    assert [x.dtype for x in results] == [dtype, jnp.float32, dtype, dtype, dtype]

    def plain(q, k, v):
        logits = jnp.einsum("bqhd,bkgd->bhqk", q, k, preferred_element_type=jnp.float32) / 8
        logits = jnp.where(np.tril(np.ones((70, 70), bool)), logits, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=-1).astype(dtype)
        return jnp.einsum("bhqk,bkgd->bqhd", weights, v), dlse

    theirs = with_gradients(plain)(q, k, v, dout, dlse)
    exact = fields(oracle.attention(q, k, v, causal=True, dout=dout, dlse=dlse))
    for name, x, x_xla, x_exact in zip(NAMES, results, theirs, exact, strict=True):
        error = np.abs(np.asarray(x, np.float64) - x_exact).max()
        allowed = 2 * np.abs(np.asarray(x_xla, np.float64) - x_exact).max() + 1e-5
        assert error <= (1e-4 if name == "lse" else allowed), name


def test_static_hints_change_nothing():
    q, k, v, *_ = dense_operands(4, 1, 9, 9, 2, 1, 8, 8)
    plain = reference.flash_attention(q, k, v)
    hints = reference.flash_attention(q, k, v, num_splits=3, pack_gqa=True, deterministic=True)
    np.testing.assert_array_equal(plain, hints)


@pytest.mark.parametrize("num_splits", [1, 3, 256])
def test_partials(num_splits):
    operands = q, k, v, dout, dlse = dense_operands(5, 2, 4, 400, 2, 1, 8, 16)
    used = jnp.array([400, 200])
    keywords = {"causal": True, "softcap": 3.0, "seqused_k": used}

    out, lse = reference.flash_attention_partials(q, k, v, num_splits=num_splits, **keywords)
    assert out.dtype == lse.dtype == jnp.float32
    chunk = {1: 512, 3: 256, 256: 128}[num_splits]
    for n in range(min(num_splits, 5)):
        expected = oracle.attention(q, k, v, keys=(n * chunk, (n + 1) * chunk), **keywords)
        assert_close((out[n], lse[n]), (expected.out, expected.lse))
    assert np.isneginf(lse[4:]).all()
    assert not np.any(out[4:])

    def merged(q, k, v):
        return reference.combine(
            *reference.flash_attention_partials(q, k, v, num_splits=num_splits, **keywords)
        )

    if num_splits < 256:
        expected = oracle.attention(q, k, v, dout=dout, dlse=dlse, **keywords)
        assert_close(with_gradients(merged)(*operands), fields(expected))


# ---- Packed --------------------------------------------------------------------------------------


PACKED = {
    "padding, empty sequences": ([5, 0, 7, 3, 0], [4, 6, 0, 9, 0], {"causal": True}),
    "one long sequence": ([1, 300, 2], [2, 500, 1], {"causal": True}),
    "many short sequences": ([1, 2, 3, 0] * 40, [3, 2, 0, 1] * 40, {"window_size": (1, 1)}),
    "softcap": ([200, 70], [130, 300], {"softcap": 1.5}),
}


@pytest.mark.parametrize(("lengths_q", "lengths_k", "keywords"), PACKED.values(), ids=PACKED)
def test_packed(lengths_q, lengths_k, keywords):
    cu_q, cu_k = (np.cumsum([0, *lengths]) for lengths in (lengths_q, lengths_k))
    operands = packed_operands(6, cu_q[-1] + 3, cu_k[-1] + 2, 4, 2, 8, 16)
    q, k, v, dout, dlse = operands

    longest = {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}

    def function(q, k, v, cu_q, cu_k):
        return reference.flash_attention_varlen(
            q, k, v, cu_q, cu_k, return_lse=True, **longest, **keywords
        )

    actual = with_gradients(function)(*operands, cu_q, cu_k)
    if "window_size" in keywords:
        keywords = {"window": keywords["window_size"]}
    expected = oracle.attention_varlen(q, k, v, cu_q, cu_k, dout=dout, dlse=dlse, **keywords)
    assert_close(actual, fields(expected))


TOTAL, LONGEST = 40, 17


@jax.jit
def any_descriptors(q, k, v, dout, dlse, cu_q, cu_k, used_q, used_k):
    def function(q, k, v):
        return reference.flash_attention_varlen(
            q,
            k,
            v,
            cu_q,
            cu_k,
            seqused_q=used_q,
            seqused_k=used_k,
            max_seqlen_q=LONGEST,
            max_seqlen_k=TOTAL,
            causal=True,
            return_lse=True,
        )

    results, vjp = jax.vjp(function, q, k, v)
    return *results, *vjp((dout, dlse))


def clamped(cu_seqlens, used, longest):
    """Return the sequences (start, length) that traced descriptors mean, whatever they hold."""
    bounds, highest = [], -(2**31)
    for offset in cu_seqlens:
        highest = max(highest, int(offset))
        bounds.append(min(max(highest, 0), TOTAL))
    lengths = [
        min(end - begin, longest, max(int(n), 0))
        for begin, end, n in zip(bounds, bounds[1:], used, strict=False)
    ]
    return np.array(bounds), np.array(lengths)


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(
    *(st.lists(st.integers(-5, TOTAL + 9), min_size=5, max_size=5) for _ in range(2)),
    *(st.lists(st.integers(-2, TOTAL + 5), min_size=4, max_size=4) for _ in range(2)),
    st.booleans(),
)
@hypothesis.example(
    *([2**31 - 1, -(2**31), 5, 2**31 - 1, 0],) * 2, *([2**31 - 1, 3, -7, 4],) * 2, False
)
def test_any_traced_descriptors(cu_q, cu_k, used_q, used_k, tell_the_truth):
    """Descriptors that hold anything mean the clamped ones, and sorted ones mean themselves."""
    if tell_the_truth:
        cu_q, cu_k = sorted(cu_q), sorted(cu_k)
    q, k, v, dout, dlse = operands = packed_operands(7, TOTAL, TOTAL, 2, 1, 8, 8)
    descriptors = [jnp.asarray(x, jnp.int32) for x in (cu_q, cu_k, used_q, used_k)]
    bounds_q, lengths_q = clamped(cu_q, used_q, LONGEST)
    bounds_k, lengths_k = clamped(cu_k, used_k, TOTAL)
    expected = oracle.attention_varlen(
        q,
        k,
        v,
        bounds_q,
        bounds_k,
        seqused_q=lengths_q,
        seqused_k=lengths_k,
        causal=True,
        dout=dout,
        dlse=dlse,
    )
    assert_close(any_descriptors(*operands, *descriptors), fields(expected))


# ---- What must have no influence -----------------------------------------------------------------


def test_poison_dense():
    """Bitwise the same results with NaN and with 0 past the lengths and in unused cotangents."""
    q, k, v, dout, dlse = dense_operands(8, 3, 70, 128, 4, 2, 8, 8)
    used_q, used_k = jnp.array([70, 0, 33]), jnp.array([32, 96, 0])

    @with_gradients
    def function(q, k, v, used_q, used_k):
        return reference.flash_attention(
            q, k, v, causal=True, seqused_q=used_q, seqused_k=used_k, return_lse=True
        )

    def fill(value):
        past_q = jnp.arange(70) >= used_q[:, None]
        past_k = jnp.arange(128) >= used_k[:, None]
        # Item 0 has more queries than keys: its first rows see none.
        empty = past_q | (jnp.arange(70) < (used_q - used_k)[:, None])
        return (
            jnp.where(empty[..., None, None], value, q),
            *(jnp.where(past_k[..., None, None], value, x) for x in (k, v)),
            jnp.where(empty[..., None, None], value, dout),
            jnp.where(empty[:, None], value, dlse),
        )

    zeros, poisoned = (function(*fill(value), used_q, used_k) for value in (0.0, jnp.nan))
    for name, x, y in zip(NAMES, zeros, poisoned, strict=True):
        assert not np.isnan(y).any(), name
        np.testing.assert_array_equal(x, y, err_msg=name)


def test_logits_that_overflow():
    """Every logit is -inf though the row sees keys: it is empty, whatever its cotangents hold."""
    q, k, v, dout, dlse = dense_operands(30, 1, 2, 3, 1, 1, 8, 8)
    q, k = q.at[:, 0].set(1e30), jnp.full_like(k, -1e30)
    out, lse, *gradients = with_gradients(
        functools.partial(reference.flash_attention, return_lse=True)
    )(q, k, v, dout.at[:, 0].set(jnp.nan), dlse.at[..., 0].set(jnp.nan))
    assert not np.any(out[:, 0])
    assert np.isneginf(lse[..., 0]).all()
    assert not np.any(gradients[0][:, 0])
    assert not any(np.isnan(x).any() for x in (out, lse, *gradients))


def test_poison_packed():
    """Results of a sequence stay bitwise the same when all others, and the padding, hold NaN."""
    cu_q, cu_k = jnp.array([0, 9, 9, 20, 31]), jnp.array([0, 5, 12, 30, 30])
    operands = packed_operands(9, 34, 33, 2, 1, 8, 8)

    @with_gradients
    def function(q, k, v):
        return reference.flash_attention_varlen(
            q, k, v, cu_q, cu_k, max_seqlen_q=11, max_seqlen_k=18, return_lse=True
        )

    clean = function(*operands)
    for b in (0, 2):
        rows = (slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1]))

        def keep(x, axis, rows):
            index = (slice(None),) * axis + (rows,)
            return jnp.full_like(x, jnp.nan).at[index].set(x[index])

        q, k, v, dout, dlse = operands
        poisoned = function(
            keep(q, 0, rows[0]),
            keep(k, 0, rows[1]),
            keep(v, 0, rows[1]),
            keep(dout, 0, rows[0]),
            keep(dlse, 1, rows[0]),
        )
        for name, axis, side in zip(NAMES, (0, 1, 0, 0, 0), (0, 0, 0, 1, 1), strict=True):
            index = NAMES.index(name)
            part = (slice(None),) * axis + (rows[side],)
            np.testing.assert_array_equal(clean[index][part], poisoned[index][part], err_msg=name)
    # Sequences 1 and 3 have only keys or only queries, and rows past the last belong to none.
    out, lse, dq, dk, dv = clean
    for x in (out[20:], dq[20:], dk[5:12], dv[5:12], dk[30:], dv[30:]):
        assert not np.any(x)
    assert np.isneginf(lse[:, 20:]).all()


# ---- dot_product_attention -----------------------------------------------------------------------

JAX_NN = {
    "window": {"local_window_size": (3, 1)},
    "window, one number": {"local_window_size": 2, "is_causal": True},
    "lengths": {"query_seq_lengths": [9, 4], "key_value_seq_lengths": [11, 3], "scale": 0.7},
    "bias": {"bias": (2, 1, 9, 11), "is_causal": True},
    "mask": {"mask": (1, 4, 9, 1), "bias": (9, 11), "key_value_seq_lengths": [11, 3]},
}


@pytest.mark.parametrize("keywords", JAX_NN.values(), ids=JAX_NN)
def test_dot_product_attention(keywords):
    """Agrees with jax.nn, values and gradients, wherever every row sees a key."""
    q, k, v, dout, _ = dense_operands(10, 2, 9, 11, 4, 2, 8, 8)
    keywords = dict(keywords)
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        if name in keywords:
            keywords[name] = jnp.array(keywords[name], jnp.int32)
    bias = normal(11, keywords.pop("bias"))[0] if "bias" in keywords else None
    mask = None
    if "mask" in keywords:
        mask = jnp.ones(keywords.pop("mask"), bool)

    def run(function):
        @jax.jit
        def both(q, k, v, bias):
            return function(q, k, v, bias, mask, return_residual=True, **keywords)

        (out, lse), vjp = jax.vjp(both, q, k, v, bias)
        return out, lse, *jax.tree.leaves(vjp((dout, jnp.zeros_like(lse))))

    ours, theirs = run(reference.dot_product_attention), run(jax.nn.dot_product_attention)
    used = jnp.arange(9) < keywords.get("query_seq_lengths", jnp.array([9, 9]))[:, None]
    for name, x, y in zip((*NAMES, "dbias"), ours, theirs, strict=False):
        if name == "lse":  # jax.nn leaves a number where a row is padding
            x, y = (jnp.where(used[..., None], z, 0.0) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5, err_msg=name)


def test_dot_product_attention_without_batch():
    q, k, v, *_ = packed_operands(12, 9, 11, 4, 2, 8, 16)
    out, lse = reference.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    expected = oracle.attention(q[None], k[None], v[None], causal=True, top_left=True)
    assert_close((out, lse.T), (expected.out[0], expected.lse[0]))


def test_bias_and_mask_with_empty_rows():
    """Rows emptied by a mask, by lengths or by a bias of -inf: 0 and -inf, and no NaN anywhere."""
    q, k, v, dout, dlse = dense_operands(13, 2, 150, 20, 2, 1, 8, 8)
    bias, mask = normal(14, (2, 2, 150, 20), (2, 2, 150, 20))
    bias = bias.at[0, :, 140].set(-jnp.inf).at[:, 1, :, 3].set(-jnp.inf)
    mask = (mask > 0).at[1, 0, 7].set(False)
    used_q, used_k = jnp.array([150, 145]), jnp.array([20, 13])

    def function(q, k, v, bias):
        out, lse = reference.dot_product_attention(
            q,
            k,
            v,
            bias,
            mask,
            query_seq_lengths=used_q,
            key_value_seq_lengths=used_k,
            return_residual=True,
        )
        return out, jnp.swapaxes(lse, 1, 2)

    expected = oracle.attention(
        q,
        k,
        v,
        bias=bias,
        mask=mask,
        seqused_q=used_q,
        seqused_k=used_k,
        top_left=True,
        dout=dout,
        dlse=dlse,
    )
    results, vjp = jax.vjp(jax.jit(function), q, k, v, bias)
    *gradients, dbias = vjp((dout, dlse))
    assert_close((*results, *gradients), fields(expected))
    np.testing.assert_allclose(dbias, expected.dbias, atol=2e-5)
    assert np.isneginf(expected.lse[0, :, 140]).all()

    past_q = (jnp.arange(150) >= used_q[:, None])[..., None, None]
    past_k = (jnp.arange(20) >= used_k[:, None])[..., None, None]
    poisoned = [jnp.where(p, jnp.nan, x) for p, x in ((past_q, q), (past_k, k), (past_k, v))]
    again, vjp = jax.vjp(jax.jit(function), *poisoned, bias)
    for x, y in zip((*results, *gradients, dbias), (*again, *vjp((dout, dlse))), strict=True):
        np.testing.assert_array_equal(x, y)


# ---- Zero sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(0, 3, 5), (2, 0, 5), (2, 3, 0), (2, 0, 0)], ids=str)
def test_zero_sizes_dense(sizes):
    batch, seqlen_q, seqlen_k = sizes
    operands = dense_operands(15, batch, seqlen_q, seqlen_k, 4, 2, 8, 16)
    function = functools.partial(reference.flash_attention, causal=True, return_lse=True)
    out, lse, *gradients = with_gradients(function)(*operands)
    assert out.shape == (batch, seqlen_q, 4, 16)
    assert np.isneginf(lse).all()
    assert not any(np.any(x) for x in (out, *gradients))
    partials = fa.flash_attention_partials(*operands[:3], num_splits=2)
    assert [x.shape for x in partials] == [(2, *out.shape), (2, *lse.shape)]
    biased = reference.dot_product_attention(*operands[:3], jnp.zeros((seqlen_q, seqlen_k)))
    assert biased.shape == out.shape
    assert not np.any(biased)


@pytest.mark.parametrize(
    ("batch", "total_q", "total_k"), [(0, 0, 0), (0, 3, 4), (1, 0, 4), (1, 3, 0)], ids=str
)
def test_zero_sizes_packed(batch, total_q, total_k):
    operands = packed_operands(16, total_q, total_k, 2, 1, 8, 8)
    cu_q = np.array([0, *[total_q] * batch])
    cu_k = np.array([0, *[total_k] * batch])

    @with_gradients
    def function(q, k, v):
        return reference.flash_attention_varlen(
            q, k, v, cu_q, cu_k, max_seqlen_q=total_q, max_seqlen_k=total_k, return_lse=True
        )

    out, lse, *gradients = function(*operands)
    assert out.shape == (total_q, 2, 8)
    assert np.isneginf(lse).all()
    assert not any(np.any(x) for x in (out, *gradients))


def test_large_batch():
    q, k, v, dout, _ = dense_operands(17, 65537, 1, 1, 1, 1, 8, 8, jnp.bfloat16)
    out, vjp = jax.vjp(reference.flash_attention, q, k, v)
    np.testing.assert_array_equal(out, v)
    np.testing.assert_array_equal(vjp(dout)[2], dout)


# ---- Derivatives, numerically --------------------------------------------------------------------


def test_check_grads_attention():
    q, k, v, *_ = dense_operands(18, 1, 4, 6, 2, 1, 8, 8)
    function = functools.partial(
        reference.flash_attention, softcap=1.5, window_size=(3, 1), return_lse=True
    )
    check_grads(jax.jit(function), (q, k, v), order=1, modes=["rev"], rtol=2e-2, atol=2e-2)


def test_check_grads_combine():
    out, lse = normal(19, (3, 4, 2, 8), (3, 2, 4))
    absent = jnp.array([[1, 0, 0, 1], [0, 0, 1, 1]], bool)  # in split 1, by head and row

    def function(out, lse):
        out, lse = reference.combine(out, lse.at[1].set(jnp.where(absent, -jnp.inf, lse[1])))
        return jnp.sin(out), lse

    check_grads(jax.jit(function), (out, lse), order=2, modes=["rev"], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("cu_seqlens", [None, np.array([0, 2, 3])], ids=["dense", "packed"])
def test_check_grads_epilogue(cu_seqlens):
    acc, row_max, row_sum = normal(20, (2, 2, 6, 16), (2, 2, 6), (2, 2, 6))
    row_sum = jnp.abs(row_sum) + 0.5
    keywords = {
        "qhead_per_khead": 2,
        "cu_seqlens": cu_seqlens,
        "total_q": None if cu_seqlens is None else 5,
        "out_dtype": jnp.float32,
        "fp8_permuted_columns": True,
    }

    def unnormalised(acc, row_max, row_sum):
        out, lse = reference.epilogue(acc, row_max=row_max, row_sum=row_sum, **keywords)
        return out, jnp.where(lse == -jnp.inf, 0.0, lse)

    operands = (acc, row_max, row_sum)
    check_grads(jax.jit(unnormalised), operands, order=2, modes=["rev"], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("form", ["lse", "row_max and row_sum"])
def test_epilogue_empty_rows_have_no_gradient(form):
    acc = jnp.full((1, 1, 3, 8), jnp.nan).at[0, 0, 0].set(1.0)
    zero = jnp.zeros((1, 1, 3))
    if form == "lse":
        statistics = {"lse": zero.at[..., 1:].set(-jnp.inf)}
    else:
        statistics = {
            "row_max": zero.at[..., 1].set(-jnp.inf),
            "row_sum": zero.at[..., 0].set(2.0).at[..., 1].set(3.0),
        }
    function = functools.partial(reference.epilogue, out_dtype=jnp.float32)
    (out, lse), vjp = jax.vjp(lambda acc, s: function(acc, **s), acc, statistics)
    assert np.isneginf(lse[..., 1:]).all()
    assert not np.any(out[:, 1:])
    gradients = jax.tree.leaves(vjp((jnp.full_like(out, jnp.nan).at[:, 0].set(1.0), zero + 1.0)))
    for x in gradients:
        assert np.isfinite(x).all()
        assert np.any(x[:, :, 0])
        assert not np.any(x[:, :, 1:])
