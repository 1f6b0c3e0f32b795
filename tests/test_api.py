"""The contract through the public functions: each rule about errors has a call that breaks it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_fa_epilogue as fa


def zeros(*shape, dtype=jnp.bfloat16):
    return jnp.zeros(shape, dtype)


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def dense(heads=4, heads_kv=2, dim=8, dim_v=8, dtype=jnp.bfloat16):
    """Return q, k, v of ``flash_attention``."""
    return (
        zeros(2, 5, heads, dim, dtype=dtype),
        zeros(2, 7, heads_kv, dim, dtype=dtype),
        zeros(2, 7, heads_kv, dim_v, dtype=dtype),
    )


def packed(cu_q=(0, 4, 9), cu_k=(0, 3, 9), dtype=jnp.bfloat16):
    """Return the operands of ``flash_attention_varlen`` with 9 tokens on each side."""
    shapes = (9, 4, 8), (9, 2, 8), (9, 2, 8)
    return *(zeros(*shape, dtype=dtype) for shape in shapes), np.array(cu_q), np.array(cu_k)


flash_attention = fa.flash_attention
partials = functools.partial(fa.flash_attention_partials, num_splits=2)
varlen = functools.partial(fa.flash_attention_varlen, max_seqlen_q=9, max_seqlen_k=9)
attend = fa.dot_product_attention
ACC = zeros(2, 3, 8, 16, dtype=jnp.float32)
ROWS = zeros(2, 3, 8, dtype=jnp.float32)
PARTS = zeros(3, 2, 5, 4, 8, dtype=jnp.float32), zeros(3, 2, 4, 5, dtype=jnp.float32)


def epilogue(acc=ACC, lse=ROWS, **keywords):
    return fa.epilogue(acc, lse=lse, **keywords)


def float8(*shape):
    return jnp.zeros(shape, jnp.float8_e4m3fn)


# ---- Wrong calls ---------------------------------------------------------------------------------

# Each: the call, and what its message has to name (a regular expression).
VALUE_ERRORS = {
    "q without batch": (lambda: flash_attention(*(x[0] for x in dense())), r"q has shape"),
    "batches differ": (lambda: flash_attention(dense()[0], *(x[:1] for x in dense()[1:])), r"k.*2"),
    "lengths of k and v": (lambda: flash_attention(*dense()[:2], dense()[2][:, :6]), r"v.*7"),
    "widths of q and k": (lambda: flash_attention(*dense()[:1], *dense(dim=16)[1:]), r"k.*8"),
    "3 and 2 heads": (lambda: flash_attention(*dense(3, 2)), r"q has 3 heads and k has 2"),
    "33 and 2 heads": (lambda: flash_attention(*dense(33, 2)), r"q has 33 heads and k has 2"),
    "2 and 4 heads": (lambda: flash_attention(*dense(2, 4)), r"q has 2 heads and k has 4"),
    "0 and 2 heads": (lambda: flash_attention(*dense(0, 2)), r"q has 0 heads and k has 2"),
    "2 and 0 heads": (lambda: flash_attention(*dense(2, 0)), r"q has 2 heads and k has 0"),
    "heads of k and v": (lambda: flash_attention(*dense()[:2], dense(4, 4)[2]), r"v.*4.*2"),
    "head dimension 12": (lambda: flash_attention(*dense(dim=12)), r"q.*12.*8, 16, 24"),
    "head dimension 0": (lambda: flash_attention(*dense(dim=0)), r"q.*0.*8, 16, 24"),
    "head dimension 264": (lambda: flash_attention(*dense(dim=264)), r"q.*264.*256"),
    "width of v 264": (lambda: flash_attention(*dense(dim_v=264)), r"v.*264.*256"),
    "window of three": (lambda: flash_attention(*dense(), window_size=(1, 2, 3)), r"window_size"),
    "window -2": (lambda: flash_attention(*dense(), window_size=(-2, 0)), r"window_size.*-2"),
    "negative softcap": (lambda: flash_attention(*dense(), softcap=-1.0), r"softcap=-1"),
    "infinite softcap": (lambda: flash_attention(*dense(), softcap=np.inf), r"softcap=inf"),
    "NaN scale": (lambda: flash_attention(*dense(), softmax_scale=np.nan), r"softmax_scale=nan"),
    "huge scale": (lambda: flash_attention(*dense(), softmax_scale=1e39), r"softmax_scale=1e\+39"),
    "-1 splits": (lambda: flash_attention(*dense(), num_splits=-1), r"num_splits=-1"),
    "257 splits": (lambda: flash_attention(*dense(), num_splits=257), r"num_splits=257.*256"),
    "0 partials": (lambda: partials(*dense(), num_splits=0), r"num_splits=0"),
    "implementation": (lambda: flash_attention(*dense(), implementation="triton"), r"triton.*cuda"),
    "seqused_q of one": (lambda: flash_attention(*dense(), seqused_q=np.array([5])), r"seqused_q"),
    "seqused_q too long": (
        lambda: flash_attention(*dense(), seqused_q=np.array([5, 6])),
        r"seqused_q\[1\]=6.*5",
    ),
    "seqused_k negative": (
        lambda: flash_attention(*dense(), seqused_k=jnp.array([-1, 0])),
        r"seqused_k\[0\]=-1",
    ),
    "cu_seqlens_q from 1": (lambda: varlen(*packed((1, 5, 9))), r"cu_seqlens_q.*=1.*start at 0"),
    "cu_seqlens_k decreases": (
        lambda: varlen(*packed((0, 4, 9, 9), (0, 9, 5, 9))),
        r"cu_seqlens_k",
    ),
    "cu_seqlens_q too far": (lambda: varlen(*packed((0, 4, 12))), r"cu_seqlens_q\[-1\]=12.*9"),
    "cu_seqlens as jax.Array": (
        lambda: varlen(*packed()[:3], jnp.array([0, 4, 12]), jnp.array([0, 4, 9])),
        r"cu_seqlens_q\[-1\]=12",
    ),
    "max_seqlen_q too small": (
        lambda: varlen(*packed(), max_seqlen_q=2),
        r"cu_seqlens_q.*4 rows.*max_seqlen_q=2",
    ),
    "max_seqlen_k negative": (lambda: varlen(*packed(), max_seqlen_k=-1), r"max_seqlen_k=-1"),
    "offsets differ in length": (lambda: varlen(*packed((0, 9))), r"cu_seqlens_k.*\(2,\)"),
    "offsets of rank 2": (lambda: varlen(*packed(((0, 9),))), r"cu_seqlens_q.*\(B \+ 1,\)"),
    "offsets empty": (
        lambda: varlen(*packed()[:3], *[np.zeros(0, int)] * 2),
        r"cu_seqlens_q.*\(0,\)",
    ),
    "seqused_k past its sequence": (
        lambda: varlen(*packed(), seqused_k=np.array([3, 7])),
        r"seqused_k\[1\]=7.*6",
    ),
    "packed q of rank 4": (lambda: varlen(*dense(), *packed()[3:]), r"q has shape"),
    "packed k and v differ": (
        lambda: varlen(*packed()[:2], zeros(8, 2, 8), *packed()[3:]),
        r"v.*8.*9",
    ),
    "mask too wide": (lambda: attend(*dense(), mask=zeros(5, 8, dtype=bool)), r"mask.*\(5, 8\)"),
    "mask of rank 5": (lambda: attend(*dense(), mask=zeros(1, 1, 1, 5, 7, dtype=bool)), r"mask"),
    "bias for 3 heads": (lambda: attend(*dense(), bias=zeros(3, 5, 7)), r"bias.*\(3, 5, 7\)"),
    "negative local window": (
        lambda: attend(*dense(), local_window_size=-1),
        r"local_window_size.*-1",
    ),
    "query_seq_lengths too long": (
        lambda: attend(*dense(), query_seq_lengths=np.array([5, 6])),
        r"query_seq_lengths\[1\]=6",
    ),
    "query of rank 2": (lambda: attend(*(x[0, 0] for x in dense())), r"query has shape"),
    "batch of key": (lambda: attend(dense()[0], dense()[1][0], dense()[2]), r"key has shape"),
    "heads of query": (lambda: attend(*dense(3, 2)), r"query has 3 heads and key has 2"),
    "acc of rank 3": (lambda: epilogue(ACC[0], ROWS[0]), r"acc has shape"),
    "no statistics": (lambda: fa.epilogue(ACC), r"none.*lse.*row_max"),
    "both statistics": (lambda: epilogue(row_max=ROWS, row_sum=ROWS), r"lse, row_max, row_sum"),
    "row_max alone": (lambda: fa.epilogue(ACC, row_max=ROWS), r"row_max"),
    "row_sum with lse": (lambda: epilogue(row_sum=ROWS), r"lse, row_sum"),
    "statistics of another shape": (lambda: epilogue(lse=ROWS[:, :, :7]), r"lse has shape"),
    "acc of 12 columns": (lambda: epilogue(ACC[..., :12]), r"acc.*12.*8, 16, 24"),
    "fp8 order of 8 columns": (
        lambda: epilogue(ACC[..., :8], fp8_permuted_columns=True),
        r"fp8_permuted_columns.*8 columns.*16",
    ),
    "G does not divide M": (lambda: epilogue(qhead_per_khead=3), r"qhead_per_khead=3.*8 rows"),
    "G of 0": (lambda: epilogue(qhead_per_khead=0), r"qhead_per_khead=0"),
    "total_q alone": (lambda: epilogue(total_q=8), r"total_q=8"),
    "no total_q": (lambda: epilogue(cu_seqlens=np.array([0, 3, 8])), r"total_q=None"),
    "negative total_q": (
        lambda: epilogue(cu_seqlens=np.array([0, 0, 0]), total_q=-1),
        r"total_q=-1",
    ),
    "cu_seqlens for 1 sequence": (
        lambda: epilogue(cu_seqlens=np.array([0, 3]), total_q=8),
        r"cu_seqlens has shape \(2,\).*3",
    ),
    "cu_seqlens past total_q": (
        lambda: epilogue(cu_seqlens=np.array([0, 3, 9]), total_q=8),
        r"cu_seqlens\[-1\]=9.*total_q=8",
    ),
    "cu_seqlens longer than acc": (
        lambda: epilogue(cu_seqlens=np.array([0, 3, 8]), total_q=8, qhead_per_khead=2),
        r"cu_seqlens.*5 rows.*=4",
    ),
    "seqused past acc": (lambda: epilogue(seqused=np.array([9, 0])), r"seqused\[0\]=9.*8"),
    "epilogue's implementation": (lambda: epilogue(implementation="gpu"), r"implementation='gpu'"),
    "partials of rank 3": (lambda: fa.combine(PARTS[0][0, 0], PARTS[1]), r"out_partial has shape"),
    "lse_partial as out": (
        lambda: fa.combine(PARTS[0], jnp.swapaxes(PARTS[1], 2, 3)),
        r"lse_partial has shape",
    ),
    "no splits": (lambda: fa.combine(PARTS[0][:0], PARTS[1][:0]), r"out_partial has 0 splits"),
    "257 partials": (
        lambda: fa.combine(*(jnp.repeat(x[:1], 257, axis=0) for x in PARTS)),
        r"out_partial has 257 splits.*256",
    ),
    "partials of 4 columns": (
        lambda: fa.combine(PARTS[0][..., :4], PARTS[1]),
        r"out_partial.*4.*8",
    ),
}

TYPE_ERRORS = {
    "a list": (lambda: flash_attention([[1.0]], *dense()[1:]), r"q is list"),
    "float64": (lambda: flash_attention(np.zeros((2, 5, 4, 8)), *dense()[1:]), r"q.*float64"),
    "integers": (lambda: flash_attention(*dense(dtype=jnp.int32)), r"q.*int32.*bfloat16"),
    "mixed": (lambda: flash_attention(dense()[0], *dense(dtype=jnp.float16)[1:]), r"k.*float16"),
    "scale as text": (
        lambda: flash_attention(*dense(), softmax_scale="1"),
        r"softmax_scale is str",
    ),
    "scale as array": (
        lambda: flash_attention(*dense(), softmax_scale=jnp.float32(1)),
        r"softmax_scale",
    ),
    "scale True": (lambda: flash_attention(*dense(), softmax_scale=True), r"softmax_scale is bool"),
    "causal 1": (lambda: flash_attention(*dense(), causal=1), r"causal is int"),
    "deterministic": (lambda: flash_attention(*dense(), deterministic=None), r"deterministic"),
    "pack_gqa": (lambda: flash_attention(*dense(), pack_gqa="auto"), r"pack_gqa is str"),
    "return_lse": (lambda: flash_attention(*dense(), return_lse=1), r"return_lse is int"),
    "window of one number": (
        lambda: flash_attention(*dense(), window_size=3),
        r"window_size is int",
    ),
    "window of floats": (lambda: flash_attention(*dense(), window_size=(1.0, 0)), r"window_size"),
    "num_splits 2.0": (lambda: flash_attention(*dense(), num_splits=2.0), r"num_splits is float"),
    "num_splits True": (lambda: flash_attention(*dense(), num_splits=True), r"num_splits is bool"),
    "seqused of floats": (
        lambda: flash_attention(*dense(), seqused_k=np.array([1.0, 2.0])),
        r"seqused_k.*float64",
    ),
    "cu_seqlens a list": (lambda: varlen(*packed()[:3], [0, 9], [0, 9]), r"cu_seqlens_q is list"),
    "cu_seqlens uint32": (
        lambda: varlen(*packed()[:4], np.array([0, 3, 9], np.uint32)),
        r"cu_seqlens_k.*uint32",
    ),
    "max_seqlen an array": (
        lambda: varlen(*packed(), max_seqlen_q=jnp.int32(9)),
        r"max_seqlen_q is .*static int",
    ),
    "mask of floats": (lambda: attend(*dense(), mask=zeros(5, 7)), r"mask.*bfloat16.*bool"),
    "bias of bools": (lambda: attend(*dense(), bias=zeros(5, 7, dtype=bool)), r"bias.*bool"),
    "is_causal": (lambda: attend(*dense(), is_causal=np.array(True)), r"is_causal is ndarray"),
    "local window": (
        lambda: attend(*dense(), local_window_size=1.5),
        r"local_window_size is float",
    ),
    "acc in bfloat16": (lambda: epilogue(ACC.astype(jnp.bfloat16)), r"acc.*bfloat16.*float32"),
    "lse in float16": (lambda: epilogue(lse=ROWS.astype(jnp.float16)), r"lse.*float16.*float32"),
    "out_dtype int8": (lambda: epilogue(out_dtype=jnp.int8), r"out_dtype.*bfloat16"),
    "out_dtype None": (lambda: epilogue(out_dtype=None), r"out_dtype=None"),
    "out_dtype text": (lambda: epilogue(out_dtype="half precision"), r"out_dtype='half precision'"),
    "G of 2.0": (lambda: epilogue(qhead_per_khead=2.0), r"qhead_per_khead is float"),
    "fp8 order 1": (lambda: epilogue(fp8_permuted_columns=1), r"fp8_permuted_columns is int"),
    "total_q 8.0": (
        lambda: epilogue(cu_seqlens=np.array([0, 3, 8]), total_q=8.0),
        r"total_q is float",
    ),
    "partials of int32": (
        lambda: fa.combine(PARTS[0].astype(int), PARTS[1]),
        r"out_partial.*int32",
    ),
    "lse_partial in bfloat16": (
        lambda: fa.combine(PARTS[0], PARTS[1].astype(jnp.bfloat16)),
        r"lse_partial.*bfloat16.*float32",
    ),
    "combine to int32": (lambda: fa.combine(*PARTS, out_dtype=jnp.int32), r"out_dtype"),
}

F32 = dense(dtype=jnp.float32)
NOT_IMPLEMENTED = {
    r"flash_attention: .*float32": lambda: flash_attention(*F32, implementation="cuda"),
    r"flash_attention_partials: .*float32": lambda: partials(*F32, implementation="cuda"),
    r"flash_attention_varlen: .*float32": lambda: varlen(
        *packed(dtype=jnp.float32), implementation="cuda"
    ),
    r"dot_product_attention: .*float32": lambda: attend(*F32, implementation="cuda"),
    r"dot_product_attention: .*a bias or a mask": lambda: attend(
        *dense(), mask=zeros(5, 7, dtype=bool), implementation="cuda"
    ),
    "q has dtype float8_e4m3fn": lambda: flash_attention(
        float8(2, 5, 4, 8), float8(2, 7, 2, 8), float8(2, 7, 2, 8)
    ),
}


@pytest.mark.parametrize(("call", "message"), VALUE_ERRORS.values(), ids=VALUE_ERRORS)
def test_value_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("call", "message"), TYPE_ERRORS.values(), ids=TYPE_ERRORS)
def test_type_errors(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(("message", "call"), NOT_IMPLEMENTED.items(), ids=NOT_IMPLEMENTED)
def test_not_implemented(message, call):
    with pytest.raises(NotImplementedError, match=message):
        call()


def test_errors_come_while_tracing():
    with pytest.raises(ValueError, match="q has 3 heads and k has 2"):
        jax.eval_shape(flash_attention, *dense(3, 2))
    with pytest.raises(TypeError, match=r"softmax_scale is .*Tracer"):
        jax.jit(lambda scale: flash_attention(*dense(), softmax_scale=scale))(0.5)
    with pytest.raises(TypeError, match=r"max_seqlen_q is .*Tracer"):
        jax.jit(lambda longest: varlen(*packed(), max_seqlen_q=longest))(9)


def test_numpy_scalars_are_static():
    q, k, v = (normal(i, *x.shape) for i, x in enumerate(dense()))
    plain = flash_attention(
        q, k, v, causal=True, softcap=2.0, window_size=(3, 0), softmax_scale=0.5, num_splits=1
    )
    scalars = flash_attention(
        q,
        k,
        v,
        causal=np.True_,
        softcap=np.float32(2),
        window_size=[np.int64(3), np.int32(0)],
        softmax_scale=np.float64(0.5),
        num_splits=np.int64(1),
    )
    np.testing.assert_array_equal(plain, scalars)


# ---- What is allowed although it looks odd -------------------------------------------------------


@pytest.mark.parametrize("traced", [False, True])
def test_padding_after_the_last_sequence_is_legal(traced):
    """R06: cu_seqlens may end before the buffer does."""
    q, k, v = (normal(i, *x.shape) for i, x in enumerate(packed()[:3]))
    function = functools.partial(varlen, max_seqlen_q=4, max_seqlen_k=4, return_lse=True)
    cu_seqlens = np.array([0, 4, 8])
    out, lse = (jax.jit(function) if traced else function)(q, k, v, cu_seqlens, cu_seqlens)
    assert not np.any(out[8])
    assert np.isneginf(lse[:, 8]).all()
    assert np.isfinite(lse[:, :8]).all()


@pytest.mark.parametrize(
    ("cu_seqlens", "longest", "sequences"),
    [
        ([1, 5, 9], 9, [(1, 5), (5, 9)]),
        ([0, 9, 5, 9], 9, [(0, 9)]),
        ([0, 4, 12], 9, [(0, 4), (4, 9)]),
        ([0, 5, 9], 2, [(0, 2), (5, 7)]),
    ],
    ids=str,
)
def test_traced_offsets_are_clamped(cu_seqlens, longest, sequences):
    """R06: the same values that raise when concrete."""
    q, k, v = (normal(i, *x.shape, dtype=jnp.float32) for i, x in enumerate(packed()[:3]))

    def function(q, k, v, cu_seqlens):
        return fa.flash_attention_varlen(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            return_lse=True,
        )

    out, lse = jax.jit(function)(q, k, v, np.array(cu_seqlens))
    expected, expected_lse = np.zeros(out.shape), np.full(lse.shape, -np.inf)
    for begin, end in sequences:
        rows = slice(begin, end)
        one = oracle.attention(q[None, rows], k[None, rows], v[None, rows])
        expected[rows], expected_lse[:, rows] = one.out[0], one.lse[0]
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        function(q, k, v, np.array(cu_seqlens))


def test_max_seqlen_bounds_the_rows_in_use():
    """A slot may be longer than max_seqlen as long as what it uses is not."""
    used = np.array([2, 2])
    out = varlen(*packed(), max_seqlen_q=2, seqused_q=used)
    assert out.shape == (9, 4, 8)
    with pytest.raises(ValueError, match=r"cu_seqlens_q.*2 rows.*max_seqlen_q=1"):
        varlen(*packed(), max_seqlen_q=1, seqused_q=used)


def test_no_heads():
    assert flash_attention(*dense(0, 0)).shape == (2, 5, 0, 8)


@pytest.mark.parametrize("bound", [2**31, 2**40])
def test_huge_windows_are_unbounded(bound):
    q, k, v = (normal(i, *x.shape) for i, x in enumerate(dense()))
    out = flash_attention(q, k, v, window_size=(bound, bound))
    np.testing.assert_array_equal(out, flash_attention(q, k, v))


# ---- Reported faults -----------------------------------------------------------------------------


def keys_read(function, seqlen_q, seqlen_k, **keywords):
    """Return the mask (Sq, Sk): K = 0 and a one-hot V make the output the mean of what is seen."""
    q, k = normal(0, 1, seqlen_q, 1, 64), zeros(1, seqlen_k, 1, 64)
    v = jnp.eye(seqlen_k, 64, dtype=jnp.bfloat16)[None, :, None]
    return np.asarray(function(q, k, v, **keywords)[0, :, 0, :seqlen_k]) > 0


@pytest.mark.parametrize("used", [False, True], ids=["full", "seqused"])
@pytest.mark.parametrize("window", [(2, 0), (0, 2)], ids=str)
def test_r22_one_sided_windows(window, used):
    keywords = {"seqused_q": np.array([6]), "seqused_k": np.array([6])} if used else {}
    length = 8 if used else 6
    seen = keys_read(flash_attention, length, length, window_size=window, **keywords)[:6]
    counts = [1, 2, 3, 3, 3, 3] if window == (2, 0) else [3, 3, 3, 3, 2, 1]
    assert seen.sum(axis=1).tolist() == counts
    np.testing.assert_array_equal(seen[:, :6], oracle.visible_keys(6, 6, window))

    q, k, v = (normal(i, 1, 6, 1, 64, dtype=jnp.float32) for i in range(3))
    gradients = jax.grad(lambda *x: flash_attention(*x, window_size=window).sum(), (0, 1, 2))
    expected = oracle.attention(q, k, v, window=window, dout=np.ones(q.shape))
    for x, y in zip(gradients(q, k, v), (expected.dq, expected.dk, expected.dv), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize(
    ("seqlen_q", "bottom_right", "top_left"), [(1, [4], [1]), (2, [3, 4], [1, 2])]
)
def test_r23_alignment_of_causal_masks(seqlen_q, bottom_right, top_left):
    seen = keys_read(flash_attention, seqlen_q, 4, causal=True)
    assert seen.sum(axis=1).tolist() == bottom_right
    seen = keys_read(fa.dot_product_attention, seqlen_q, 4, is_causal=True)
    assert seen.sum(axis=1).tolist() == top_left
    np.testing.assert_array_equal(
        seen, keys_read(jax.nn.dot_product_attention, seqlen_q, 4, is_causal=True)
    )


def test_r24_softcap():
    def lse(logit, softcap):
        q = jnp.zeros((1, 1, 1, 8)).at[..., 0].set(logit)
        k = jnp.zeros((1, 1, 1, 8)).at[..., 0].set(1.0)
        out, lse = flash_attention(q, k, k, softmax_scale=1.0, softcap=softcap, return_lse=True)
        return lse[0, 0, 0] + 0 * out.sum()

    for softcap, expected in ((15.0, 13.05092), (30.0, 17.48348), (0.0, 20.0)):
        np.testing.assert_allclose(lse(20.0, softcap), expected, atol=1e-5)
    slopes = [jax.grad(lse)(20.0, softcap) for softcap in (15.0, 0.0)]
    np.testing.assert_allclose(slopes, [0.24299, 1.0], atol=1e-5)


@pytest.mark.parametrize("dim", [8, 72, 136, 256])
def test_r30_head_dimensions(dim):
    q, k, v, dout = (normal(i, 1, 40, 2, dim, dtype=jnp.float32) for i in range(4))
    out, vjp = jax.vjp(jax.jit(functools.partial(flash_attention, causal=True)), q, k, v)
    expected = oracle.attention(q, k, v, causal=True, dout=dout)
    expected = (expected.out, expected.dq, expected.dk, expected.dv)
    for x, y in zip((out, *vjp(dout)), expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


# Rules 1, 5 and 9 in the sizes in which their breaking was reported.


def test_r20_gradient_through_lse():
    q, k, v = (normal(i, 1, n, 2, 64) for i, n in enumerate((5, 7, 7)))
    total = jax.grad(
        lambda *x: flash_attention(*x, causal=True, return_lse=True)[1].sum(), (0, 1, 2)
    )
    dq, dk, dv = total(q, k, v)
    expected = oracle.attention(q, k, v, causal=True, dlse=np.ones((1, 2, 5)))
    for x, y in ((dq, expected.dq), (dk, expected.dk)):
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=2**-7, atol=1e-4)
    assert not np.any(dv)


@pytest.mark.parametrize(
    "name",
    [
        "flash_attention",
        "flash_attention_partials",
        "flash_attention_varlen",
        "dot_product_attention",
    ],
)
def test_xla_is_the_reference(name):
    keywords = {
        "flash_attention_partials": {"num_splits": 2},
        "flash_attention_varlen": {"max_seqlen_q": 9, "max_seqlen_k": 9},
    }.get(name, {})
    operands = packed() if name == "flash_attention_varlen" else dense()
    operands = [normal(i, *x.shape) if x.ndim > 1 else x for i, x in enumerate(operands)]
    results = (
        getattr(fa, name)(*operands, **keywords, implementation="xla"),
        getattr(fa.reference, name)(*operands, **keywords),
    )
    for x, y in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(x, y)
