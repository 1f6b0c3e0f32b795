"""Validation: every Python error of the contract is raised here, while tracing.

One function per public function: it takes that function's arguments, looks at shapes, dtypes,
static keywords and the values of concrete descriptors (``cu_seqlens``, ``seqused``), and returns a
frozen dataclass of static facts from which references, plans and primitives are built.

``ValueError`` is a wrong call, ``TypeError`` a wrong kind of argument, ``NotImplementedError``
something that does not exist yet. Sizes may be symbolic (``jax.export``): equality of two sizes is
always tested, inequalities only between plain integers. Traced descriptors are not judged;
implementations clamp them.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa_epilogue import static_arguments as static

HEAD_DIMS = range(8, 257, 8)
MAX_NUM_SPLITS = 256
FP8_COLUMN_GROUP = 16

_FLOATS = tuple(np.dtype(t) for t in (jnp.bfloat16, jnp.float16, jnp.float32))
_FLOAT32 = (np.dtype(np.float32),)
_INTEGERS = (np.dtype(np.int32), np.dtype(np.int64))


@dataclasses.dataclass(frozen=True)
class EpilogueProblem:
    """Static facts of one ``epilogue`` call on acc ([num_splits,] batch, heads, rows, head_dim)."""

    num_splits: int | None  # None: there is no split axis
    batch: int  # sequences
    heads: int  # of acc: key/value heads when packed
    rows: int  # of acc: times qhead_per_khead when packed
    head_dim: int
    qhead_per_khead: int
    total_q: int | None  # given exactly when there are cu_seqlens
    normalised: bool  # the statistics are `lse`, not `row_max` and `row_sum`
    has_cu_seqlens: bool
    has_seqused: bool
    out_dtype: np.dtype
    fp8_permuted_columns: bool


@dataclasses.dataclass(frozen=True)
class CombineProblem:
    """Static facts of one ``combine`` call."""

    num_splits: int
    batch: int | None  # None: packed form, without a batch axis
    seqlen: int  # or the number of packed tokens
    heads: int
    head_dim: int
    out_dtype: np.dtype
    partial_dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """Static facts of one attention call, dense or packed."""

    batch: int
    seqlen_q: int  # the longest a sequence may be, when packed
    seqlen_k: int
    total_q: int | None  # tokens in the buffer when packed, None when dense
    total_k: int | None
    heads: int
    heads_kv: int
    head_dim: int  # of q and k
    head_dim_v: int
    dtype: np.dtype  # of q, k, v and out
    softmax_scale: float
    window_left: int  # -1 is unbounded; causal is window_right == 0
    window_right: int
    softcap: float  # 0 is none
    num_splits: int  # 0: the plan chooses
    pack_gqa: bool | None
    deterministic: bool
    has_seqused_q: bool
    has_seqused_k: bool
    top_left: bool  # masks are aligned as in jax.nn, not bottom-right

    @property
    def varlen(self) -> bool:
        """Whether sequences are packed into one token axis."""
        return self.total_q is not None

    @property
    def qhead_per_khead(self) -> int:
        """Query heads that share a key/value head."""
        return 1 if self.heads == self.heads_kv else self.heads // self.heads_kv


def check_implementation(implementation: str | None) -> None:
    """Raise ``ValueError`` unless `implementation` is None, "cuda" or "xla"."""
    if implementation is not None and implementation not in ("cuda", "xla"):
        raise ValueError(f"implementation={implementation!r}; allowed are None, 'cuda' and 'xla'")


def epilogue(
    acc: Any,
    *,
    lse: Any,
    row_max: Any,
    row_sum: Any,
    out_dtype: Any,
    qhead_per_khead: int,
    cu_seqlens: Any,
    seqused: Any,
    total_q: int | None,
    fp8_permuted_columns: bool,
) -> EpilogueProblem:
    """Check the arguments of ``epilogue``; see there for their meaning."""
    _array("acc", acc, _FLOAT32)
    if len(acc.shape) not in (4, 5):
        raise ValueError(f"acc has shape {acc.shape}; expected (B, H, M, Dv) or (N, B, H, M, Dv)")
    statistics = {"lse": lse, "row_max": row_max, "row_sum": row_sum}
    normalised = lse is not None
    if normalised == (row_max is not None) or (row_max is None) != (row_sum is None):
        given = [name for name, statistic in statistics.items() if statistic is not None]
        raise ValueError(
            f"statistics given: {', '.join(given) or 'none'}; "
            "expected either lse, or row_max and row_sum"
        )
    for name, statistic in statistics.items():
        if statistic is not None:
            _array(name, statistic, _FLOAT32)
            _shape(name, statistic, acc.shape[:-1], "acc's shape without its last axis")

    *splits, batch, heads, rows, head_dim = acc.shape
    _head_dim("acc", head_dim)
    group = static.integer("qhead_per_khead", qhead_per_khead, 1)
    if isinstance(rows, int) and rows % group:
        raise ValueError(f"qhead_per_khead={group} does not divide the {rows} rows of acc, Sq * G")
    permuted = static.flag("fp8_permuted_columns", fp8_permuted_columns)
    if permuted and head_dim % FP8_COLUMN_GROUP:
        raise ValueError(
            f"fp8_permuted_columns=True with acc of {head_dim} columns; "
            f"allowed are multiples of {FP8_COLUMN_GROUP}"
        )

    seqlen = rows if group == 1 else rows // group
    if seqused is not None:
        check_descriptor("seqused", seqused, batch)
    if cu_seqlens is None:
        if total_q is not None:
            raise ValueError(
                f"total_q={total_q} without cu_seqlens; it is the size of a packed result"
            )
        _check_lengths("seqused", seqused, seqlen)
    else:
        check_descriptor("cu_seqlens", cu_seqlens, batch + 1)
        if total_q is None:
            raise ValueError("total_q=None with cu_seqlens; the packed result needs a static size")
        total_q = static.size("total_q", total_q)
        if isinstance(total_q, int) and total_q > np.iinfo(np.int32).max:
            raise ValueError(f"total_q={total_q}; allowed are 0 to {np.iinfo(np.int32).max}")
        _check_offsets(
            ("cu_seqlens", cu_seqlens),
            ("seqused", seqused),
            ("total_q", total_q),
            ("the rows of acc for one sequence", seqlen),
        )
    return EpilogueProblem(
        num_splits=splits[0] if splits else None,
        batch=batch,
        heads=heads,
        rows=rows,
        head_dim=head_dim,
        qhead_per_khead=group,
        total_q=total_q,
        normalised=normalised,
        has_cu_seqlens=cu_seqlens is not None,
        has_seqused=seqused is not None,
        out_dtype=_float_dtype("out_dtype", out_dtype),
        fp8_permuted_columns=permuted,
    )


def combine(out_partial: Any, lse_partial: Any, *, out_dtype: Any) -> CombineProblem:
    """Check the arguments of ``combine``; see there for their meaning."""
    _array("out_partial", out_partial, _FLOATS)
    _array("lse_partial", lse_partial, _FLOAT32)
    if len(out_partial.shape) not in (4, 5):
        raise ValueError(
            f"out_partial has shape {out_partial.shape}; "
            "expected (N, B, Sq, Hq, Dv) or (N, Tq, Hq, Dv)"
        )
    num_splits, *batch, seqlen, heads, head_dim = out_partial.shape
    if not isinstance(num_splits, int) or not 1 <= num_splits <= MAX_NUM_SPLITS:
        raise ValueError(
            f"out_partial has {num_splits} splits; allowed are 1 to {MAX_NUM_SPLITS}, static"
        )
    _head_dim("out_partial", head_dim)
    _shape("lse_partial", lse_partial, (num_splits, *batch, heads, seqlen), "out_partial's axes")
    return CombineProblem(
        num_splits=num_splits,
        batch=batch[0] if batch else None,
        seqlen=seqlen,
        heads=heads,
        head_dim=head_dim,
        out_dtype=np.dtype(out_partial.dtype)
        if out_dtype is None
        else _float_dtype("out_dtype", out_dtype),
        partial_dtype=np.dtype(out_partial.dtype),
    )


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    seqused_q: Any,
    seqused_k: Any,
    min_num_splits: int = 0,
    **keywords: Any,
) -> AttentionProblem:
    """Check the arguments of ``flash_attention``; see there for their meaning."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _attention_operand(name, x, q, (4,), "(B, S, H, D)")
    batch, seqlen_q, _, head_dim = q.shape
    seqlen_k = k.shape[1]
    _shape("k", k, (batch, seqlen_k, k.shape[2], head_dim), "q's batch and width")
    _shape("v", v, (batch, seqlen_k, k.shape[2], v.shape[3]), "k's batch, length and heads")
    _seqused("seqused_q", seqused_q, batch, seqlen_q)
    _seqused("seqused_k", seqused_k, batch, seqlen_k)
    return AttentionProblem(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        total_q=None,
        total_k=None,
        has_seqused_q=seqused_q is not None,
        has_seqused_k=seqused_k is not None,
        **_heads("q", q, "k", k, "v", v),
        **_flash_keywords(head_dim, seqlen_q, seqlen_k, min_num_splits, **keywords),
    )


def flash_attention_partials(q: Any, k: Any, v: Any, **keywords: Any) -> AttentionProblem:
    """Check the arguments of ``flash_attention_partials``; here num_splits is 1 or more."""
    return flash_attention(q, k, v, **keywords, min_num_splits=1)


def flash_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any,
    seqused_k: Any,
    **keywords: Any,
) -> AttentionProblem:
    """Check the arguments of ``flash_attention_varlen``; see there for their meaning."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _attention_operand(name, x, q, (3,), "(T, H, D)")
    total_q, _, head_dim = q.shape
    total_k = k.shape[0]
    _shape("k", k, (total_k, k.shape[1], head_dim), "q's width")
    _shape("v", v, (total_k, k.shape[1], v.shape[2]), "k's tokens and heads")
    max_seqlen_q = static.size("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = static.size("max_seqlen_k", max_seqlen_k)

    _array("cu_seqlens_q", cu_seqlens_q, _INTEGERS)
    if len(cu_seqlens_q.shape) != 1 or cu_seqlens_q.shape[0] == 0:
        raise ValueError(f"cu_seqlens_q has shape {cu_seqlens_q.shape}; expected (B + 1,)")
    batch = cu_seqlens_q.shape[0] - 1
    check_descriptor("cu_seqlens_k", cu_seqlens_k, batch + 1)
    for side, cu_seqlens, used, total, longest in (
        ("q", cu_seqlens_q, seqused_q, total_q, max_seqlen_q),
        ("k", cu_seqlens_k, seqused_k, total_k, max_seqlen_k),
    ):
        if used is not None:
            check_descriptor(f"seqused_{side}", used, batch)
        _check_offsets(
            (f"cu_seqlens_{side}", cu_seqlens),
            (f"seqused_{side}", used),
            (f"{side}.shape[0]", total),
            (f"max_seqlen_{side}", longest),
        )
    return AttentionProblem(
        batch=batch,
        seqlen_q=_smaller(max_seqlen_q, total_q),
        seqlen_k=_smaller(max_seqlen_k, total_k),
        total_q=total_q,
        total_k=total_k,
        has_seqused_q=seqused_q is not None,
        has_seqused_k=seqused_k is not None,
        **_heads("q", q, "k", k, "v", v),
        **_flash_keywords(head_dim, max_seqlen_q, max_seqlen_k, 0, **keywords),
    )


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    *,
    scale: float | None,
    is_causal: bool,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    local_window_size: int | tuple[int, int] | None,
    return_residual: bool,
) -> AttentionProblem:
    """Check the arguments of ``dot_product_attention``; without a batch axis, batch is 1."""
    shapes = []
    for name, x in (("query", query), ("key", key), ("value", value)):
        _attention_operand(name, x, query, (3, 4), "(B, S, H, D) or (S, H, D)")
        shapes.append(x.shape if len(x.shape) == 4 else (1, *x.shape))
    (batch, seqlen_q, heads, head_dim), (_, seqlen_k, heads_kv, _), (*_, head_dim_v) = shapes
    for name, shape, expected in (
        ("key", shapes[1], (batch, seqlen_k, heads_kv, head_dim)),
        ("value", shapes[2], (batch, seqlen_k, heads_kv, head_dim_v)),
    ):
        if tuple(shape) != expected:
            raise ValueError(
                f"{name} has shape {shape}; expected {expected} beside query {shapes[0]}"
            )
    logits = (batch, heads, seqlen_q, seqlen_k)
    for name, x, dtypes in (("bias", bias, _FLOATS), ("mask", mask, (np.dtype(bool),))):
        if x is None:
            continue
        _array(name, x, dtypes)
        trailing = logits[4 - len(x.shape) :]
        if len(x.shape) > 4 or any(
            n != 1 and n != full for n, full in zip(x.shape, trailing, strict=True)
        ):
            raise ValueError(
                f"{name} has shape {x.shape}; it must broadcast to (B, H, Sq, Sk) = {logits}"
            )
    _seqused("query_seq_lengths", query_seq_lengths, batch, seqlen_q)
    _seqused("key_value_seq_lengths", key_value_seq_lengths, batch, seqlen_k)
    left = right = -1
    if local_window_size is not None:
        if isinstance(local_window_size, numbers.Integral) and not isinstance(
            local_window_size, bool
        ):
            local_window_size = (local_window_size, local_window_size)
        left, right = static.window("local_window_size", local_window_size, seqlen_q, seqlen_k, 0)
    static.flag("return_residual", return_residual)
    return AttentionProblem(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        total_q=None,
        total_k=None,
        **_heads("query", query, "key", key, "value", value),
        softmax_scale=static.softmax_scale("scale", scale, head_dim),
        window_left=left,
        window_right=0 if static.flag("is_causal", is_causal) else right,
        softcap=0.0,
        num_splits=0,
        pack_gqa=None,
        deterministic=False,
        has_seqused_q=query_seq_lengths is not None,
        has_seqused_k=key_value_seq_lengths is not None,
        top_left=True,
    )


def _names(dtypes: tuple[np.dtype, ...]) -> str:
    return " or ".join(d.name for d in dtypes)


def _array(name: str, x: Any, dtypes: tuple[np.dtype, ...]) -> None:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name} is {type(x).__name__}; expected an array of {_names(dtypes)}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {x.dtype}; expected {_names(dtypes)}")


def _shape(name: str, x: Any, expected: tuple[Any, ...], like: str) -> None:
    if tuple(x.shape) != tuple(expected):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {tuple(expected)} ({like})")


def _attention_operand(name: str, x: Any, q: Any, ndims: tuple[int, ...], layout: str) -> None:
    if str(getattr(x, "dtype", "")).startswith("float8"):
        raise NotImplementedError(
            f"{name} has dtype {x.dtype}; fp8 attention has no implementation yet"
        )
    _array(name, x, _FLOATS)
    if len(x.shape) not in ndims:
        raise ValueError(f"{name} has shape {x.shape}; expected {layout}")
    if x.dtype != q.dtype:
        raise TypeError(f"{name} has dtype {x.dtype}; expected {q.dtype}, the dtype of the queries")
    _not_sharded(name, x)


def _not_sharded(name: str, x: Any) -> None:
    """Raise where the axis of tokens or the head dimension is sharded, which explicit mode tells.

    There nothing is gathered behind the user's back.
    """
    if not isinstance(x, jax.Array):
        return
    spec = jax.typeof(x).sharding.spec
    for what, axis in (("axis of tokens", -3), ("head dimension", -1)):
        if len(spec) and spec[axis] is not None:
            raise ValueError(
                f"{name} is sharded over {spec[axis]!r} along its {what}; attention needs this "
                "axis whole on each device. Reshard it (jax.sharding.reshard), or spread the "
                "sequence over devices with ring_attention or decode_sharded inside jax.shard_map"
            )


def _heads(q_name: str, q: Any, k_name: str, k: Any, v_name: str, v: Any) -> dict[str, Any]:
    heads, heads_kv = q.shape[-2], k.shape[-2]
    if heads != heads_kv and (0 in (heads, heads_kv) or heads % heads_kv != 0):
        raise ValueError(
            f"{q_name} has {heads} heads and {k_name} has {heads_kv}; "
            f"the heads of {q_name} must be a multiple of those of {k_name}"
        )
    _head_dim(q_name, q.shape[-1])
    _head_dim(v_name, v.shape[-1])
    return {
        "heads": heads,
        "heads_kv": heads_kv,
        "head_dim": q.shape[-1],
        "head_dim_v": v.shape[-1],
        "dtype": np.dtype(q.dtype),
    }


def _flash_keywords(
    head_dim: int,
    seqlen_q: Any,
    seqlen_k: Any,
    min_num_splits: int,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    num_splits: int,
    pack_gqa: bool | None,
    deterministic: bool,
    return_lse: bool = False,
) -> dict[str, Any]:
    """Check the static keywords that all of ``flash_attention*`` share."""
    static.flag("return_lse", return_lse)
    left, right = static.window("window_size", window_size, seqlen_k, seqlen_q, -1)
    return {
        "softmax_scale": static.softmax_scale("softmax_scale", softmax_scale, head_dim),
        "window_left": left,
        "window_right": 0 if static.flag("causal", causal) else right,
        "softcap": static.softcap(softcap),
        "num_splits": static.integer("num_splits", num_splits, min_num_splits, MAX_NUM_SPLITS),
        "pack_gqa": None if pack_gqa is None else static.flag("pack_gqa", pack_gqa),
        "deterministic": static.flag("deterministic", deterministic),
        "top_left": False,
    }


def _head_dim(name: str, head_dim: Any) -> None:
    if head_dim not in HEAD_DIMS:
        allowed = f"{HEAD_DIMS[0]}, {HEAD_DIMS[1]}, {HEAD_DIMS[2]}, ..., {HEAD_DIMS[-1]}"
        raise ValueError(f"{name} has head dimension {head_dim}; allowed are {allowed}")


def _float_dtype(name: str, dtype: Any) -> np.dtype:
    try:
        resolved = np.dtype(dtype)
    except TypeError:
        resolved = None
    if dtype is None or resolved not in _FLOATS:
        raise TypeError(f"{name}={dtype!r}; expected {_names(_FLOATS)}")
    return resolved


def _smaller(bound: Any, size: Any) -> Any:
    """A bound on lengths, no larger than the buffer where both are plain integers."""
    return min(bound, size) if isinstance(bound, int) and isinstance(size, int) else bound


def check_descriptor(name: str, x: Any, size: Any) -> None:
    """Raise unless `x` is an array of `size` int32 or int64."""
    _array(name, x, _INTEGERS)
    if tuple(x.shape) != (size,):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected ({size},)")


def _seqused(name: str, used: Any, batch: Any, seqlen: Any) -> None:
    if used is not None:
        check_descriptor(name, used, batch)
        _check_lengths(name, used, seqlen)


def _concrete(x: Any) -> np.ndarray | None:
    """Return the values of `x` where this process has them while tracing, otherwise None."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, (np.ndarray, jax.Array)):
        return None
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return None
    return np.asarray(x).astype(np.int64)


def _check_lengths(name: str, used: Any, seqlen: Any) -> None:
    """Check concrete used rows against `seqlen`, one size or one per sequence."""
    values = _concrete(used)
    if values is None:
        return
    known = isinstance(seqlen, (int, np.ndarray))
    wrong = (values < 0) | (values > seqlen) if known else values < 0
    if wrong.any():
        at = int(wrong.argmax())
        limit = seqlen[at] if isinstance(seqlen, np.ndarray) else seqlen
        raise ValueError(
            f"{name}[{at}]={values[at]}; allowed are 0 to {limit}, the sequence's rows"
        )


def _check_offsets(
    cu_seqlens: tuple[str, Any],
    seqused: tuple[str, Any],
    total: tuple[str, Any],
    longest: tuple[str, Any],
) -> None:
    """Check concrete descriptors against the buffer's rows and the longest sequence; all named."""
    (name, offsets), (used_name, used) = cu_seqlens, seqused
    (total_name, total_rows), (longest_name, longest_rows) = total, longest
    offsets, used_values = _concrete(offsets), _concrete(used)
    if offsets is None:
        _check_lengths(used_name, used, longest_rows)
        return
    if offsets[0] != 0:
        raise ValueError(f"{name}[0]={offsets[0]}; it must start at 0")
    lengths = np.diff(offsets)
    if (lengths < 0).any():
        at = int((lengths < 0).argmax())
        raise ValueError(
            f"{name} decreases from {offsets[at]} to {offsets[at + 1]}, entry {at + 1}"
        )
    if isinstance(total_rows, int) and offsets[-1] > total_rows:
        raise ValueError(f"{name}[-1]={offsets[-1]}; allowed are 0 to {total_name}={total_rows}")
    if used_values is not None:
        _check_lengths(used_name, used, lengths)
        lengths = used_values
    # A sequence counts with its used rows; where those are traced, nothing is known.
    known = used is None or used_values is not None
    if known and isinstance(longest_rows, int) and (lengths > longest_rows).any():
        at = int((lengths > longest_rows).argmax())
        raise ValueError(
            f"{name}: sequence {at} has {lengths[at]} rows; "
            f"allowed are 0 to {longest_name}={longest_rows}"
        )
