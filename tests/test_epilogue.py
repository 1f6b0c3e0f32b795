"""The epilogue: every row of its specification, on the kernels and on the reference alike."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_fa_epilogue as fa


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `lengths` are those of packed sequences, in tokens; `rows` counts tokens, too."""

    head_dim: int = 64
    rows: int = 129
    batch: int = 2
    heads: int = 3
    dtype: str = "bfloat16"
    group: int = 1
    splits: int | None = None
    lengths: tuple[int, ...] | None = None
    padding: int = 0
    seqused: tuple[int, ...] | None = None
    normalised: bool = True
    fp8: bool = False

    def __str__(self):
        default = Case()
        fields = dataclasses.asdict(self).items()
        return "-".join(f"{k}={v}" for k, v in fields if v != getattr(default, k)) or "default"


WIDTHS = (8, 16, 24, 40, 56, 64, 72, 80, 88, 96, 104, 112, 128, 136, 160, 192, 200, 224, 248, 256)
LENGTHS = (127, 129, 0, 1, 130)
CASES = [
    *(Case(d, dtype=t) for d in WIDTHS for t in ("bfloat16", "float32")),
    *(Case(d, group=2, rows=65, heads=2) for d in WIDTHS),
    *(Case(d, dtype="float16", normalised=False) for d in (64, 96, 128, 192, 256)),
    *(Case(d, fp8=True, dtype="float16") for d in (16, 64, 80, 96, 128, 192, 256)),
    *(Case(d, fp8=True, dtype="float32") for d in (16, 64, 80, 96, 128, 192, 256)),
    *(Case(128, fp8=True, group=g, rows=40) for g in (1, 4)),
    *(Case(96, fp8=True, lengths=LENGTHS, dtype=t) for t in ("bfloat16", "float32")),
    *(Case(rows=m, heads=1, batch=1) for m in (1, 2, 8, 15, 16, 17, 48, 49, 63, 64, 65, 128, 200)),
    *(Case(rows=m, heads=1, batch=1, dtype="float32") for m in (1, 15, 16, 17, 49, 64)),
    *(Case(group=g, rows=33, heads=2) for g in (2, 3, 5, 8)),
    *(Case(group=g, rows=33, heads=2, dtype="float32") for g in (2, 3, 5, 8)),
    *(Case(lengths=LENGTHS, heads=h) for h in (1, 3)),
    *(Case(lengths=LENGTHS, dtype="float32", normalised=n) for n in (True, False)),
    *(Case(lengths=LENGTHS, group=g, heads=2, normalised=False) for g in (3, 4)),
    *(Case(lengths=(64,) * 5 + (1,) * 40, heads=2, padding=p) for p in (0, 70)),
    Case(lengths=(144, 288, 512), padding=2, heads=4),
    Case(lengths=(0, 0, 0), heads=2, padding=65),
    Case(lengths=(0, 70, 0), seqused=(0, 9, 0), heads=2, padding=3),
    Case(lengths=LENGTHS, seqused=(5, 128, 0, 1, 64), padding=9),
    Case(lengths=LENGTHS, seqused=(5, 128, 0, 1, 64), padding=9, dtype="float32", group=2),
    *(Case(seqused=u, dtype=t) for u in ((0, 129), (64, 1)) for t in ("bfloat16", "float32")),
    Case(seqused=(7, 33), group=4, rows=40, normalised=False),
    *(Case(splits=3, dtype=t) for t in ("bfloat16", "float32")),
    Case(splits=3, group=4, rows=20, dtype="float32", normalised=False),
    Case(splits=2, seqused=(100, 3), dtype="float32"),
    Case(splits=2, lengths=LENGTHS, seqused=(5, 128, 0, 1, 64), dtype="float32", padding=3),
    Case(splits=2, lengths=LENGTHS, normalised=False),
    Case(batch=40, heads=4, rows=257, head_dim=8, normalised=False),
]


def make(case, seed=0):
    """Operands and keywords; acc and the statistics hold NaN in rows outside every sequence."""
    rng = np.random.default_rng(seed)
    batch = case.batch if case.lengths is None else len(case.lengths)
    tokens = case.rows if case.lengths is None else max(case.lengths)
    leading = () if case.splits is None else (case.splits,)
    shape = (*leading, batch, case.heads, tokens * case.group)
    acc = rng.standard_normal((*shape, case.head_dim)).astype(np.float32)
    statistics = {"lse": 10 * rng.standard_normal(shape).astype(np.float32)}
    if not case.normalised:
        statistics = {
            "row_max": 10 * rng.standard_normal(shape).astype(np.float32),
            "row_sum": np.exp2(rng.uniform(-8, 20, shape)).astype(np.float32),
        }
    # Some rows see no key: their accumulator may hold anything.
    empty = rng.random(shape) < 0.05
    acc[empty] = np.nan
    for name, value in statistics.items():
        value[empty] = 0 if name == "row_sum" else -np.inf
    lengths = np.full(batch, tokens) if case.lengths is None else np.array(case.lengths)
    if case.seqused is not None:
        lengths = np.minimum(lengths, case.seqused)
    outside = np.arange(shape[-1]) >= case.group * lengths[:, None, None]
    for value in (acc, *statistics.values()):
        value[np.broadcast_to(outside, shape)] = np.nan
    keywords = dict(statistics)
    if case.lengths is not None:
        cu_seqlens = np.concatenate([[0], np.cumsum(case.lengths)]).astype(np.int32)
        keywords |= {"cu_seqlens": cu_seqlens, "total_q": int(cu_seqlens[-1]) + case.padding}
    if case.seqused is not None:
        keywords["seqused"] = np.array(case.seqused, np.int32)
    return acc, keywords


def prepare(case, acc, keywords):
    """The call with its operands on the device, so that only results take memory in it."""
    static = {"total_q": keywords["total_q"]} if "total_q" in keywords else {}
    arrays = {k: jnp.asarray(v) for k, v in keywords.items() if k not in static}
    function = functools.partial(
        fa.epilogue,
        out_dtype=case.dtype,
        qhead_per_khead=case.group,
        fp8_permuted_columns=case.fp8,
        **static,
    )
    compiled = jax.jit(lambda acc, arrays: function(acc, **arrays))
    return functools.partial(compiled, jnp.asarray(acc), arrays)


def call(case, acc, keywords, poison=None):
    """Results of the second of two calls, in poisoned memory; both must be bitwise equal."""
    prepared = prepare(case, acc, keywords)
    first = prepared()
    if poison is None:
        return first
    with poison(*((x.shape, x.dtype) for x in first)):
        second = prepared()
    for a, b in zip(first, second, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    return second


def expect(case, acc, keywords):
    return oracle.epilogue(acc, group=case.group, fp8_permuted_columns=case.fp8, **keywords)


def assert_close(case, out, lse, expected):
    expected_out, expected_lse = expected
    assert out.dtype == case.dtype and out.shape == expected_out.shape
    assert lse.dtype == jnp.float32 and lse.shape == expected_lse.shape
    out, lse = np.asarray(out.astype(jnp.float32)), np.asarray(lse)
    if case.normalised:  # nothing but a conversion: bit-exact
        expected_out = expected_out.astype(np.float32)
        expected_out = np.asarray(jnp.asarray(expected_out).astype(case.dtype).astype(jnp.float32))
        np.testing.assert_array_equal(out, expected_out)
        np.testing.assert_array_equal(lse, expected_lse.astype(np.float32))
    else:
        digits = {"bfloat16": 8, "float16": 11, "float32": 22}[case.dtype]
        smallest = 2**-24 if case.dtype == "float16" else 0
        np.testing.assert_allclose(out, expected_out, rtol=2.0**-digits, atol=smallest)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case, poison):
    acc, keywords = make(case)
    out, lse = call(case, acc, keywords, poison)
    assert_close(case, out, lse, expect(case, acc, keywords))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fp8", [False, True])
def test_columns_keep_their_place(dtype, fp8):
    """A permutation inside a row would leave every norm right: give each element its own value."""
    case = Case(128, rows=64, batch=1, heads=2, dtype=dtype, fp8=fp8)
    acc = np.broadcast_to(np.arange(128, dtype=np.float32), (1, 2, 64, 128))
    out, _ = call(case, acc, {"lse": np.zeros((1, 2, 64), np.float32)})
    d = np.arange(128)
    column = d // 16 * 16 + 8 * (d & 1) + (d % 16 >> 1) if fp8 else d
    np.testing.assert_array_equal(
        np.asarray(out.astype(jnp.float32)), np.broadcast_to(column, out.shape)
    )


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nan_statistics_give_nan(normalised, dtype):
    case = Case(rows=8, batch=1, heads=1, dtype=dtype, normalised=normalised)
    acc, keywords = make(case)
    acc = np.ones_like(acc)
    if normalised:
        keywords = {"lse": np.zeros((1, 1, 8), np.float32)}
        keywords["lse"][0, 0, 3] = np.nan
        broken = [3]
    else:
        keywords = {k: np.ones((1, 1, 8), np.float32) for k in ("row_max", "row_sum")}
        keywords["row_max"][0, 0, 3] = np.nan
        keywords["row_sum"][0, 0, 5] = np.nan
        # NaN beside what alone were an empty row; and an empty row whose sum overflowed.
        keywords["row_max"][0, 0, 6], keywords["row_sum"][0, 0, 6] = np.nan, 0
        keywords["row_max"][0, 0, 7], keywords["row_sum"][0, 0, 7] = -np.inf, np.nan
        keywords["row_max"][0, 0, 1], keywords["row_sum"][0, 0, 1] = -np.inf, np.inf
        broken = [3, 5, 6, 7]
    out, lse = call(case, acc, keywords)
    is_broken = np.isin(np.arange(8), broken)
    np.testing.assert_array_equal(np.isnan(np.asarray(lse))[0, 0], is_broken)
    np.testing.assert_array_equal(
        np.isnan(np.asarray(out.astype(jnp.float32)))[0, :, 0], np.repeat(is_broken[:, None], 64, 1)
    )
    if not normalised:
        assert np.isneginf(np.asarray(lse)[0, 0, 1]) and (out[0, 1] == 0).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("broken", ["acc", "row_max", "row_sum"])
def test_rows_outside_have_no_gradient(packed, broken):
    """Rule 2: whatever rows past a sequence's end hold, all their gradients are 0."""
    operands = {
        "acc": np.ones((1, 2, 4, 8), np.float32),
        "row_max": np.zeros((1, 2, 4), np.float32),
        "row_sum": np.full((1, 2, 4), 2, np.float32),
    }
    operands[broken][0, :, 3] = np.nan
    descriptor = {"cu_seqlens": jnp.array([0, 3]), "total_q": 5} if packed else {}
    if not packed:
        descriptor = {"seqused": jnp.array([3])}

    def loss(operands):
        out, lse = fa.epilogue(**operands, **descriptor, out_dtype=jnp.float32)
        return out.sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    gradient = jax.jit(jax.grad(loss))({k: jnp.asarray(v) for k, v in operands.items()})
    for value in gradient.values():
        assert jnp.isfinite(value).all()
        np.testing.assert_array_equal(np.asarray(value)[0, :, 3], 0)


@pytest.mark.parametrize(
    "cu_seqlens",
    [(1, 5, 9), (0, 9, 5, 9), (0, 4, 12), (5, 9, 2), (-3, 4, 2**31 - 1), (9, 0, 0), (0, 4, 8)],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lying_descriptors_stay_inside(cu_seqlens, dtype, poison):
    """R06: traced values that lie. A token gets a row of a sequence that holds it, or is empty."""
    sequences, total_q, rows = len(cu_seqlens) - 1, 9, 5
    # Row r of sequence b is 16 b + r + 1 throughout, which every dtype holds exactly.
    label = 16 * np.arange(sequences)[:, None] + np.arange(rows) + 1
    lse = np.broadcast_to(label[:, None], (sequences, 2, rows)).astype(np.float32)
    acc = np.broadcast_to(lse[..., None], (*lse.shape, 64))
    keywords = {"lse": lse, "cu_seqlens": np.array(cu_seqlens, np.int32), "total_q": total_q}
    out, out_lse = call(Case(dtype=dtype), acc, keywords, poison)
    out = np.asarray(out.astype(jnp.float32))
    starts = np.clip(cu_seqlens, 0, total_q)
    for token in range(total_q):
        value = out[token, 0, 0]
        np.testing.assert_array_equal(out[token], value)
        np.testing.assert_array_equal(np.asarray(out_lse)[:, token], value if value else -np.inf)
        holding = {
            16 * b + token - first + 1
            for b in range(sequences)
            for first in (starts[b], starts[: b + 1].max())  # as given, or made ascending
            if first <= token < starts[b + 1] and token - first < rows
        }
        assert value in holding | {0}
        if list(cu_seqlens) == sorted(cu_seqlens):
            assert value in (holding or {0})


def test_seqused_beyond_the_buffer_is_clamped(poison):
    acc = np.ones((3, 1, 10, 64), np.float32)
    lse = np.zeros((3, 1, 10), np.float32)
    seqused = np.array([-5, 2**31 - 1, 4], np.int32)
    out, out_lse = call(Case(), acc, {"lse": lse, "seqused": seqused}, poison)
    used = np.arange(10) < np.array([0, 10, 4])[:, None]
    np.testing.assert_array_equal(np.asarray(out.astype(jnp.float32))[:, :, 0, 0], used)
    np.testing.assert_array_equal(np.asarray(out_lse)[:, 0] == 0, used)


@pytest.mark.parametrize(
    ("shape", "keywords", "out_shape"),
    [
        ((0, 3, 5, 64), {}, (0, 5, 3, 64)),
        ((2, 3, 0, 64), {}, (2, 0, 3, 64)),
        ((2, 0, 5, 64), {}, (2, 5, 0, 64)),
        ((0, 3, 5, 64), {"cu_seqlens": [0], "total_q": 4}, (4, 3, 64)),
        ((2, 3, 0, 64), {"cu_seqlens": [0, 0, 0], "total_q": 4}, (4, 3, 64)),
        ((2, 3, 5, 64), {"cu_seqlens": [0, 0, 0], "total_q": 0}, (0, 3, 64)),
        ((0, 2, 3, 5, 64), {}, (0, 2, 5, 3, 64)),
    ],
)
def test_zero_sizes(shape, keywords, out_shape, poison):
    """R09: no descriptor of an empty buffer is ever made; what exists is zero-filled."""
    keywords = {k: np.array(v, np.int32) if k == "cu_seqlens" else v for k, v in keywords.items()}
    keywords["lse"] = np.zeros(shape[:-1], np.float32)
    out, lse = call(Case(), np.zeros(shape, np.float32), keywords, poison)
    assert out.shape == out_shape
    assert lse.shape == (*out_shape[:-3], out_shape[-2], out_shape[-3])
    np.testing.assert_array_equal(np.asarray(out.astype(jnp.float32)), 0)
    assert np.isneginf(np.asarray(lse)).all()


@pytest.mark.parametrize("batch", [65536, 65537])
def test_large_batch(batch):
    """R10: more batch items than a grid axis holds."""
    acc = jax.random.normal(jax.random.key(0), (batch, 1, 1, 64))
    lse = jnp.arange(batch, dtype=jnp.float32).reshape(batch, 1, 1)
    out, out_lse = call(Case(), acc, {"lse": lse})
    assert jnp.array_equal(out[:, 0, 0], acc[:, 0, 0].astype(jnp.bfloat16))
    assert jnp.array_equal(out_lse, lse)


def test_many_sequences_of_one_token():
    """Tiles are shared by many sequences, and each row finds its own among 100,000."""
    count, total_q = 100_000, 100_003
    acc = jax.random.normal(jax.random.key(0), (count, 1, 1, 8))
    lse = jnp.arange(count, dtype=jnp.float32).reshape(count, 1, 1)
    cu_seqlens = jnp.arange(count + 1, dtype=jnp.int32)
    keywords = {"lse": lse, "cu_seqlens": cu_seqlens, "total_q": total_q}
    out, out_lse = call(Case(), acc, keywords)
    assert jnp.array_equal(out[:count, 0], acc[:, 0, 0].astype(jnp.bfloat16))
    assert jnp.array_equal(out_lse[0, :count], lse[:, 0, 0])
    assert jnp.all(out[count:] == 0) and jnp.all(jnp.isneginf(out_lse[0, count:]))


@pytest.mark.gpu
@pytest.mark.parametrize("varlen", [False, True])
def test_repeats_bitwise_under_load(varlen):
    """R07: 300 runs while another stream keeps the device busy; a slow warp leaves no stale O."""
    lengths = (1, 63, 65, 200)
    case = Case(128, heads=16, lengths=lengths) if varlen else Case(128, heads=16, rows=200)
    acc, keywords = make(case)
    expected = expect(case, acc, keywords)
    prepared = prepare(case, acc, keywords)
    load = jax.jit(lambda x: jax.lax.fori_loop(0, 4, lambda _, x: x @ x / 64, x))
    busy = jnp.ones((4096, 4096), jnp.bfloat16)
    first = None
    for _ in range(300):
        busy = load(busy)
        pair = prepared()
        result = [np.asarray(x).tobytes() for x in pair]
        if first is None:
            first = result
            assert_close(case, *pair, expected)
        assert result == first


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_more_than_2_to_the_31_elements(dtype):
    """R12: offsets are 64 bits wide."""
    heads, rows, head_dim = 32, 524_289, 128
    acc = jax.lax.broadcasted_iota(jnp.float32, (1, heads, rows, head_dim), 2) % 251
    acc += jnp.arange(heads, dtype=jnp.float32)[:, None, None]
    lse = jnp.zeros((1, heads, rows), jnp.float32)
    out, _ = fa.epilogue(acc, lse=lse, out_dtype=dtype, implementation="cuda")
    equal = jax.jit(lambda out, acc: jnp.array_equal(out, acc.swapaxes(1, 2).astype(dtype)))
    assert equal(out, acc)


@pytest.mark.gpu
def test_launch_failure_is_an_exception():
    """R11: nothing is returned, the message names the kernel, and the next call works."""
    from jax_fa_epilogue import _native

    acc, keywords = make(Case())
    expected = [np.asarray(x.astype(jnp.float32)) for x in call(Case(), acc, keywords)]
    _native.fail_next_launch()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"epilogue_bf16_64_plain.*cudaError"):
        jax.block_until_ready(call(Case(), acc, keywords))
    after = [np.asarray(x.astype(jnp.float32)) for x in call(Case(), acc, keywords)]
    for before, now in zip(expected, after, strict=True):
        np.testing.assert_array_equal(before, now)
