"""The specification: the public functions in plain ``jax.numpy``, in float32.

What runs where no kernel applies, and what kernels are compared with. Arguments, results and errors
are those of the public functions of the same names; gradients exist for every floating operand.
Every result, and every gradient, is defined for rows that see no key and for rows in no sequence:
0, and -inf for lse.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import heads, problem
from . import reference_attention as tiled
from .varying import match_varying

# A split's keys are a multiple of this many, as in the kernels, whose splits are whole key blocks.
SPLIT_BLOCK = 128


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    seqused_q: Any = None,
    seqused_k: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention on dense q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv).

    Returns out (B, Sq, Hq, Dv) in q's dtype and, with return_lse, lse (B, Hq, Sq) float32.
    `num_splits`, `pack_gqa` and `deterministic` choose between kernels; here they change nothing.
    """
    facts = problem.flash_attention(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        return_lse=return_lse,
    )
    used = {"seqused_q": seqused_q, "seqused_k": seqused_k}
    out, lse = attend(facts, q, k, v, used)
    return (out, lse) if return_lse else out


def flash_attention_partials(
    q: Any,
    k: Any,
    v: Any,
    *,
    num_splits: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    seqused_q: Any = None,
    seqused_k: Any = None,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention on dense operands to each of `num_splits` contiguous ranges of keys.

    Split n holds the keys from n * c up to (n + 1) * c, where c is Sk / num_splits rounded up to a
    multiple of 128; a split without a key in sight is empty. Returns out_partial
    (N, B, Sq, Hq, Dv) float32, each split normalised on its own, and lse_partial (N, B, Hq, Sq)
    float32, as ``combine`` takes them.
    """
    facts = problem.flash_attention_partials(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
    )
    return attend_partially(facts, q, k, v, {"seqused_q": seqused_q, "seqused_k": seqused_k})


def flash_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    seqused_q: Any = None,
    seqused_k: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention on packed q (Tq, Hq, D), k (Tk, Hk, D), v (Tk, Hk, Dv), offsets (B + 1,).

    Returns out (Tq, Hq, Dv) in q's dtype and, with return_lse, lse (Hq, Tq) float32.
    """
    facts = problem.flash_attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        return_lse=return_lse,
    )
    descriptors = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
    }
    out, lse = attend(facts, q, k, v, descriptors)
    return (out, lse) if return_lse else out


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    return_residual: bool = False,
) -> Any:
    """Attention with the signature and the mask alignment (top-left) of ``jax.nn``'s function.

    Operands are (B, S, H, D) or (S, H, D); `bias` and `mask` broadcast to (B, Hq, Sq, Sk). Returns
    out, shaped as `query` but as wide as `value`, and with return_residual the log-sum-exp
    (B, Sq, Hq) or (Sq, Hq), float32 and with a gradient. A row that sees no key gives 0 and -inf.
    """
    facts = problem.dot_product_attention(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        return_residual=return_residual,
    )
    batched = query.ndim == 4
    q, k, v = (x if x.ndim == 4 else x[None] for x in map(jnp.asarray, (query, key, value)))
    used = {"seqused_q": query_seq_lengths, "seqused_k": key_value_seq_lengths}
    out, lse = attend(facts, q, k, v, used, bias, mask)
    lse = jnp.swapaxes(lse, 1, 2)
    out, lse = (out, lse) if batched else (out[0], lse[0])
    return (out, lse) if return_residual else out


def combine(out_partial: Any, lse_partial: Any, *, out_dtype: Any = None) -> Any:
    """Merge partial results over N splits, each normalised on its own.

    Dense: (N, B, Sq, Hq, Dv) and (N, B, Hq, Sq) give out (B, Sq, Hq, Dv) and lse (B, Hq, Sq).
    Packed: without B. What a split holds where its lse is -inf is never looked at; a lse of NaN
    gives NaN. `out_dtype` None is out_partial's.
    """
    facts = problem.combine(out_partial, lse_partial, out_dtype=out_dtype)
    lse_partial = jnp.swapaxes(lse_partial, -1, -2)
    out, lse = merge_splits(out_partial, lse_partial, axis=0)
    return out.astype(facts.out_dtype), jnp.swapaxes(lse, -1, -2)


def merge_splits(out: jax.Array, lse: jax.Array, *, axis: int) -> tuple[jax.Array, jax.Array]:
    """Merge `axis` (>= 0) of out (..., Dv) and lse (...), which agree otherwise; in float32."""
    # lse does not depend on the maximum that is subtracted, so it needs no gradient.
    maximum = lax.stop_gradient(lse.max(axis=axis, keepdims=True))
    maximum = jnp.where(maximum == -jnp.inf, 0.0, maximum)
    weights = jnp.exp(lse - maximum)
    # A split of weight 0 counts nothing, even where its out is NaN.
    out = jnp.where((weights == 0)[..., None], 0.0, out.astype(jnp.float32))
    total = weights.sum(axis=axis)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    merged = (out * weights[..., None]).sum(axis=axis) / total[..., None]
    merged = jnp.where(empty[..., None], 0.0, merged)
    lse = jnp.where(empty, -jnp.inf, jnp.squeeze(maximum, axis) + jnp.log(total))
    return merged, lse


def epilogue(
    acc: Any,
    *,
    lse: Any = None,
    row_max: Any = None,
    row_sum: Any = None,
    out_dtype: Any = jnp.bfloat16,
    qhead_per_khead: int = 1,
    cu_seqlens: Any = None,
    seqused: Any = None,
    total_q: int | None = None,
    fp8_permuted_columns: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Normalise accumulators ([N,] B, H, M, Dv) float32 and lay them out as attention's result.

    Returns out and lse: ([N,] B, Sq, Hq, Dv) and ([N,] B, Hq, Sq) float32, or with cu_seqlens
    ([N,] total_q, Hq, Dv) and ([N,] Hq, total_q), where Hq = H * qhead_per_khead and
    Sq = M / qhead_per_khead.
    """
    facts = problem.epilogue(
        acc,
        lse=lse,
        row_max=row_max,
        row_sum=row_sum,
        out_dtype=out_dtype,
        qhead_per_khead=qhead_per_khead,
        cu_seqlens=cu_seqlens,
        seqused=seqused,
        total_q=total_q,
        fp8_permuted_columns=fp8_permuted_columns,
    )
    return _epilogue(facts, acc, lse, row_max, row_sum, cu_seqlens, seqused)


@functools.partial(jax.jit, static_argnames="facts")
def _epilogue(
    facts: problem.EpilogueProblem,
    acc: Any,
    lse: Any,
    row_max: Any,
    row_sum: Any,
    cu_seqlens: Any,
    seqused: Any,
) -> tuple[jax.Array, jax.Array]:
    group = facts.qhead_per_khead
    seqlen = facts.rows if group == 1 else facts.rows // group
    packed = facts.has_cu_seqlens and 0 not in (facts.batch, seqlen)
    # Rows that see no key or are in no sequence are replaced before the arithmetic: their gradients
    # would be NaN otherwise.
    empty = jnp.zeros((), bool)
    if packed:
        starts, lengths = _packed_rows(cu_seqlens, seqused, facts.total_q, seqlen)
        empty = jnp.arange(facts.rows) // group >= lengths[:, None, None]
    elif facts.has_seqused and not facts.has_cu_seqlens:
        empty = jnp.arange(facts.rows) // group >= jnp.asarray(seqused)[:, None, None]
    if facts.normalised:
        empty |= lse == -jnp.inf
        row_sum = jnp.ones((), jnp.float32)
    else:
        unknown = jnp.isnan(row_max) | jnp.isnan(row_sum)
        empty |= ~unknown & ((row_sum == 0) | (row_max == -jnp.inf))
        row_sum = jnp.where(empty, 1.0, row_sum)
        lse = row_max + jnp.log(row_sum)
    lse = jnp.where(empty, 0.0, lse)
    out = jnp.where(empty[..., None], 0.0, acc) / row_sum[..., None]
    out = jnp.where(jnp.isnan(lse)[..., None], jnp.nan, out).astype(facts.out_dtype)
    lse = jnp.where(empty, -jnp.inf, lse)
    if facts.fp8_permuted_columns:
        columns = out.reshape(*out.shape[:-1], -1, 2, 8)
        out = jnp.swapaxes(columns, -1, -2).reshape(out.shape)

    # Rows of acc run over (query, group); heads of the result over (head_kv, group).
    num_heads = facts.heads * group
    leading = acc.shape[:-4]  # the split axis or none
    out = out.reshape(*out.shape[:-2], seqlen, group, facts.head_dim)
    out = jnp.moveaxis(out, -4, -3)  # ([N,] B, Sq, H, G, Dv)
    lse = jnp.moveaxis(lse.reshape(*lse.shape[:-1], seqlen, group), -3, -2)  # ([N,] B, Sq, H, G)

    if not facts.has_cu_seqlens:
        out = out.reshape(*leading, facts.batch, seqlen, num_heads, facts.head_dim)
        lse = jnp.moveaxis(lse, -3, -1).reshape(*leading, facts.batch, num_heads, seqlen)
        return out, lse

    if not packed:
        out = jnp.zeros((*leading, facts.total_q, num_heads, facts.head_dim), out.dtype)
        return out, jnp.full((*leading, num_heads, facts.total_q), -jnp.inf, jnp.float32)
    sequence, row, inside = tiled.locate_rows(starts, lengths, facts.total_q)
    source = (*(slice(None) for _ in leading), sequence, jnp.where(inside, row, 0))
    out, lse = _zero_outside(inside, out[source], lse[source])  # ([N,] total_q, H, G[, Dv])
    out = out.reshape(*leading, facts.total_q, num_heads, facts.head_dim)
    return out, jnp.moveaxis(lse, -3, -1).reshape(*leading, num_heads, facts.total_q)


def _zero_outside(inside: jax.Array, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Clear rows of out (..., rows, H, G, Dv) and lse (..., rows, H, G) outside every sequence."""
    inside = inside[..., None, None]
    out = jnp.where(inside[..., None], out, jnp.zeros((), out.dtype))
    return out, jnp.where(inside, lse, -jnp.inf)


@functools.partial(jax.jit, static_argnames="facts")
def attend(
    facts: problem.AttentionProblem,
    q: Any,
    k: Any,
    v: Any,
    descriptors: dict[str, Any],
    bias: Any = None,
    mask: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Return out and lse of an attention call, dense or packed, laid out as in public.

    `descriptors` are ``seqused_*`` and ``cu_seqlens_*``, None or missing where not given; `bias`
    and `mask` are those of ``dot_product_attention``.
    """
    options, q, k, v, where = _tiled(facts, q, k, v, **descriptors)
    if bias is None and mask is None:
        return _public(*tiled.attention(options, *match_varying((q, k, v, where))))

    def grouped(x: Any) -> jax.Array | None:
        """Reshape what broadcasts to (B, Hq, Sq, Sk) to broadcast to (B, Hk, G, Sq, Sk)."""
        if x is None:
            return None
        x = jnp.asarray(x)
        x = x.reshape((1,) * (4 - x.ndim) + x.shape)
        groups = (1, 1) if x.shape[1] == 1 else (facts.heads_kv, facts.qhead_per_khead)
        return x.reshape(x.shape[0], *groups, *x.shape[2:])

    return _public(
        *tiled.attention_with_bias(options, q, k, v, grouped(bias), grouped(mask), where)
    )


@functools.partial(jax.jit, static_argnames="facts")
def attend_partially(
    facts: problem.AttentionProblem, q: Any, k: Any, v: Any, descriptors: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """Return the same for each of ``facts.num_splits`` parts of the keys, stacked, in float32."""
    options, *operands = _tiled(facts, q, k, v, **descriptors)
    options = dataclasses.replace(options, out_dtype=np.dtype(np.float32))
    operands = match_varying(operands)
    return _public(*over_splits(options, facts.num_splits, facts.seqlen_k, *operands))


def over_splits(
    options: tiled.Options,
    num_splits: int,
    seqlen_k: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    where: tiled.Sequences,
) -> tuple[jax.Array, jax.Array]:
    """``reference_attention.attention`` on one split of the keys after the other, stacked."""
    blocks = (seqlen_k + SPLIT_BLOCK - 1) // SPLIT_BLOCK
    chunk = (blocks + num_splits - 1) // num_splits * SPLIT_BLOCK
    begin = jnp.arange(num_splits, dtype=jnp.int32) * chunk
    return lax.map(
        lambda keys: tiled.attention(options, q, k, v, where._replace(keys=keys)),
        jnp.stack([begin, begin + chunk], axis=-1),
    )


@functools.partial(jax.jit, static_argnames="facts")
def attend_backward(
    facts: problem.AttentionProblem,
    q: Any,
    k: Any,
    v: Any,
    descriptors: dict[str, Any],
    out: Any,
    lse: Any,
    dout: Any,
    dlse: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return dq, dk, dv of an attention call with the results out and lse, whoever computed them.

    All arrays are laid out as in public.
    """
    options, *operands = _tiled(facts, q, k, v, **descriptors)
    out, dout = (heads.split_queries(facts, x) for x in (out, dout))
    lse, dlse = (heads.split_lse(facts, x) for x in (lse, dlse))
    dq, dk, dv = tiled.backward(options, *match_varying((*operands, out, lse, dout, dlse)))
    return heads.merge_queries(dq), heads.split_keys(dk), heads.split_keys(dv)


def _tiled(
    facts: problem.AttentionProblem, q: Any, k: Any, v: Any, **descriptors: Any
) -> tuple[tiled.Options, jax.Array, jax.Array, jax.Array, tiled.Sequences]:
    """Return the arguments of ``reference_attention.attention``."""
    varlen = facts.varlen
    total_q = facts.total_q if varlen else facts.seqlen_q
    total_k = facts.total_k if varlen else facts.seqlen_k
    tiles = tiled.tiling(
        facts.batch if varlen else 1, total_q, total_k, facts.seqlen_q, facts.seqlen_k
    )
    options = tiled.Options(
        softmax_scale=facts.softmax_scale,
        softcap=facts.softcap,
        window_left=facts.window_left,
        window_right=facts.window_right,
        top_left=facts.top_left,
        packed=varlen,
        out_dtype=facts.dtype,
        **tiles,
    )
    if not varlen:  # (B,) -> (B, 1), a length for the only sequence of each batch item
        descriptors = {
            k: x if x is None else jnp.asarray(x)[:, None] for k, x in descriptors.items()
        }
    where = sequences(total_q, total_k, facts.seqlen_q, facts.seqlen_k, **descriptors)
    return (
        options,
        heads.split_queries(facts, q),
        heads.split_keys(k),
        heads.split_keys(v),
        where,
    )


def sequences(
    total_q: Any,
    total_k: Any,
    longest_q: Any,
    longest_k: Any,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
) -> tiled.Sequences:
    """Where the sequences lie, inside the buffers for any descriptors.

    Packed, with ``cu_seqlens_*`` (S + 1,) and ``seqused_*`` (S,); or dense, without the first
    and with ``seqused_*`` (*b, 1), where each ``*b`` may be 1 in place of the full size.
    """
    if cu_seqlens_q is not None:
        start_q, len_q = _packed_rows(cu_seqlens_q, seqused_q, total_q, longest_q)
        start_k, len_k = _packed_rows(cu_seqlens_k, seqused_k, total_k, longest_k)
        rows_q, rows_k = len_q, len_k
    else:
        start_q, start_k = _int32(0), _int32(0)
        len_q, len_k = (
            _int32(n) if used is None else jnp.clip(jnp.asarray(used), 0, n).astype(jnp.int32)
            for used, n in ((seqused_q, total_q), (seqused_k, total_k))
        )
        # A length that all batch items share says how far to walk. One of each only masks: the
        # longest, over a sharded batch, would need communication.
        len_q, len_k = (x.reshape(1) if _is_single(x) else x for x in (len_q, len_k))
        rows_q = len_q if len_q.ndim == 1 else _int32(total_q)
        rows_k = len_k if len_k.ndim == 1 else _int32(total_k)
    return tiled.Sequences(
        start_q=start_q,
        start_k=start_k,
        rows_q=rows_q,
        rows_k=rows_k,
        len_q=len_q,
        len_k=len_k,
        keys=_int32(0, longest_k),
    )


def honest_descriptors(
    cu_seqlens: Any, seqused: Any, total: Any, longest: Any
) -> tuple[jax.Array, jax.Array]:
    """Return offsets (B + 1,) and lengths (B,) that are true for any input, both int32.

    The offsets ascend within the buffer of `total` rows, no sequence is longer than `longest`.
    """
    offsets = lax.cummax(jnp.asarray(cu_seqlens))
    offsets = jnp.clip(offsets, 0, total).astype(jnp.int32)
    lengths = jnp.minimum(jnp.diff(offsets), longest)
    if seqused is not None:
        used = jnp.clip(jnp.asarray(seqused), 0, longest).astype(jnp.int32)
        lengths = jnp.minimum(lengths, used)
    return offsets, lengths


def _packed_rows(
    cu_seqlens: Any, seqused: Any, total: Any, longest: Any
) -> tuple[jax.Array, jax.Array]:
    """Return each sequence's start and its number of rows, inside the buffer for any input."""
    if cu_seqlens.shape[0] == 1:  # no sequence: an empty one spares everyone else the special case
        return jnp.zeros((1,), jnp.int32), jnp.zeros((1,), jnp.int32)
    offsets, lengths = honest_descriptors(cu_seqlens, seqused, total, longest)
    return offsets[:-1], lengths


def _public(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    return heads.merge_queries(out), heads.merge_lse(lse)


def _is_single(x: jax.Array) -> bool:
    return all(isinstance(n, int) and n == 1 for n in x.shape)


def _int32(*sizes: Any) -> jax.Array:
    return jnp.stack([jnp.asarray(n, jnp.int32) for n in sizes])
