"""Every operation as a function of positional operands; what the tests of transforms share."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_fa_epilogue as fa

# All sizes of axes are different, so that one can be replaced by its value.
BATCH, HEADS, ROWS, HEAD_DIM, GROUP, SPLITS, TOTAL_Q = 6, 4, 10, 16, 2, 3, 29
KEYS, TOTAL_K = 13, 41


@dataclasses.dataclass(frozen=True)
class Operation:
    """A call with all operands positional, and how to make and to shard them."""

    name: str  # of the public function
    function: Callable  # (*operands) -> (out, lse)
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]  # operands over ("data", "model")
    result_specs: tuple[P, P]
    dtype: str  # of floating operands

    def operands(self, seed: int = 0, copies: int | None = None) -> tuple[jax.Array, ...]:
        """Random operands; `copies` gives each of them a leading axis."""
        rng = np.random.default_rng(seed)
        leading = () if copies is None else (copies,)
        descriptors = {}
        # Packed sequences, none longer than it may be; the last tokens may be in no sequence.
        for suffix, longest, total in (
            ("", ROWS // GROUP, TOTAL_Q),
            ("_q", ROWS, TOTAL_Q),
            ("_k", KEYS, TOTAL_K),
        ):
            lengths = rng.integers(0, 1 + min(longest, total // BATCH), (*leading, BATCH))
            start = np.zeros((*leading, 1), int)
            used = lengths if f"cu_seqlens{suffix}" in self.kinds else longest
            descriptors |= {
                f"cu_seqlens{suffix}": np.concatenate([start, np.cumsum(lengths, -1)], axis=-1),
                f"seqused{suffix}": np.maximum(used - rng.integers(0, 2, lengths.shape), 0),
            }
        operands = []
        for kind, shape in zip(self.kinds, self.shapes, strict=True):
            values = rng.standard_normal((*leading, *shape))
            operands.append(
                jnp.asarray(descriptors[kind], jnp.int32)
                if kind in descriptors
                else jnp.asarray(np.exp(values) if kind == "row_sum" else values, self.dtype)
            )
        return tuple(operands)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Keyword of each operand."""
        return self.function.keywords["kinds"]

    @property
    def floats(self) -> tuple[int, ...]:
        """Indices of the floating operands."""
        descriptors = ("cu_seqlens", "seqused")
        return tuple(i for i, k in enumerate(self.kinds) if not k.startswith(descriptors))

    @property
    def packed(self) -> bool:
        """Whether sequences are packed."""
        return any(k.startswith("cu_seqlens") for k in self.kinds)

    @property
    def primitive(self) -> str:
        """Name of the primitive of its (first) kernel."""
        attention = self.name.startswith("flash_attention")
        return f"jax_fa_epilogue_{'forward' if attention else self.name}"


def call(*operands, module, name, kinds, **keywords):
    return getattr(module, name)(**dict(zip(kinds, operands, strict=True)), **keywords)


def _operation(name, kinds, shapes, specs, result_specs, *, dtype="float32", **keywords):
    function = functools.partial(call, module=fa, name=name, kinds=kinds, **keywords)
    return Operation(name, function, shapes, specs, result_specs, dtype)


FIXED = ("module", "name", "kinds")
_epilogue = functools.partial(_operation, "epilogue")
_attention = functools.partial(_operation, "flash_attention", dtype="bfloat16", return_lse=True)
Q, KV = (BATCH, ROWS, HEADS * GROUP, HEAD_DIM), (BATCH, KEYS, HEADS, HEAD_DIM)
ACC, STATISTIC = (BATCH, HEADS, ROWS, HEAD_DIM), (BATCH, HEADS, ROWS)
HEAD_SPEC = P("data", "model")
ROW_SPEC, TOKEN_SPEC = P("data", None, "model"), P(None, "model")
OPERATIONS = {
    "attention": _attention(
        ("q", "k", "v", "seqused_k"),
        (Q, KV, KV, (BATCH,)),
        (ROW_SPEC, ROW_SPEC, ROW_SPEC, P("data")),
        (ROW_SPEC, HEAD_SPEC),
        causal=True,
        num_splits=1,
    ),
    "attention_varlen": _operation(
        "flash_attention_varlen",
        ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k"),
        (
            (TOTAL_Q, HEADS * GROUP, HEAD_DIM),
            (TOTAL_K, HEADS, HEAD_DIM),
            (TOTAL_K, HEADS, HEAD_DIM),
            (BATCH + 1,),
            (BATCH + 1,),
            (BATCH,),
        ),
        (TOKEN_SPEC, TOKEN_SPEC, TOKEN_SPEC, P(), P(), P()),
        (TOKEN_SPEC, P("model")),
        dtype="bfloat16",
        max_seqlen_q=ROWS,
        max_seqlen_k=KEYS,
        window_size=(2, 1),
        return_lse=True,
    ),
    "attention_splits": _attention(
        ("q", "k", "v"), (Q, KV, KV), (ROW_SPEC,) * 3, (ROW_SPEC, HEAD_SPEC), num_splits=2
    ),
    "attention_partials": _operation(
        "flash_attention_partials",
        ("q", "k", "v", "seqused_q"),
        (Q, KV, KV, (BATCH,)),
        (ROW_SPEC, ROW_SPEC, ROW_SPEC, P("data")),
        (P(None, "data", None, "model"), P(None, "data", "model")),
        dtype="bfloat16",
        num_splits=2,
        window_size=(2, 1),
    ),
    "dense": _epilogue(
        ("acc", "lse", "seqused"),
        (ACC, STATISTIC, (BATCH,)),
        (HEAD_SPEC, HEAD_SPEC, P("data")),
        (P("data", None, "model"), HEAD_SPEC),
        qhead_per_khead=GROUP,
        out_dtype=jnp.float32,
    ),
    "varlen": _epilogue(
        ("acc", "row_max", "row_sum", "cu_seqlens", "seqused"),
        (ACC, STATISTIC, STATISTIC, (BATCH + 1,), (BATCH,)),
        (P(None, "model"), P(None, "model"), P(None, "model"), P(), P()),
        (P(None, "model"), P("model")),
        qhead_per_khead=GROUP,
        total_q=TOTAL_Q,
        out_dtype=jnp.float32,
    ),
    "splits": _epilogue(
        ("acc", "row_max", "row_sum"),
        ((SPLITS, *ACC), (SPLITS, *STATISTIC), (SPLITS, *STATISTIC)),
        (P(None, "data", "model"),) * 3,
        (P(None, "data", None, "model"), P(None, "data", "model")),
        out_dtype=jnp.float32,
    ),
    "combine": _operation(
        "combine",
        ("out_partial", "lse_partial"),
        ((SPLITS, BATCH, ROWS, HEADS, HEAD_DIM), (SPLITS, BATCH, HEADS, ROWS)),
        (P(None, "data", None, "model"), P(None, "data", "model")),
        (P("data", None, "model"), HEAD_SPEC),
    ),
}
ALL = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)


def _without(*names):
    chosen = {name: x for name, x in OPERATIONS.items() if name not in names}
    return pytest.mark.parametrize("operation", chosen.values(), ids=chosen)


# Partial results, splits and packing add time, and little where they cannot interfere with what a
# test is about.
EVERY = _without("attention_partials")
MOST = _without("attention_partials", "attention_splits")
SOME = _without("attention_partials", "attention_splits", "attention_varlen")
MAPPED_COPIES = 3


def assert_equal(actual, expected, tolerance=None):
    """Compare trees, NaN and infinities included.

    A kernel and the reference differ in the last bits; a derivative multiplies that.
    """
    if tolerance is None:
        in_16_bits = any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(expected))
        tolerance = 2e-2 if in_16_bits else 1e-4
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape and a.dtype == e.dtype
        a, e = (np.asarray(x.astype(jnp.float32)) for x in (a, e))
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance)


def scalar(function):
    """A loss through both results that knows -inf."""

    def loss(*operands):
        results = (x.astype(jnp.float32) for x in function(*operands))
        return sum(jnp.sum(jnp.sin(jnp.where(x > -1e30, x, 0))) for x in results)

    return loss


def gradient(operation, function=None):
    """Compiled gradient for all floating operands, of the operation or of `function` instead."""
    return jax.jit(jax.grad(scalar(function or operation.function), operation.floats))


def equations(jaxpr):
    """All equations of a jaxpr, those of inner ones included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
