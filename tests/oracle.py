"""Naive attention, combine and epilogue in NumPy float64, sharing no code with the package.

Written for being obviously right: loops over batch and heads, explicit boolean masks, whole
matrices. Arrays have the layouts of the public functions. NaN in rows or keys outside a sequence is
never read.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass
class Attention:
    """Results of `attention` and `attention_varlen`; gradients only where cotangents were given."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray | None = None
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None
    dbias: np.ndarray | None = None


def visible_keys(seqlen_q, seqlen_k, window=(-1, -1), causal=False, top_left=False):
    """Return the boolean mask (seqlen_q, seqlen_k) of contract rule 3."""
    mask = np.zeros((seqlen_q, seqlen_k), bool)
    left, right = window[0], 0 if causal else window[1]
    for i in range(seqlen_q):
        for j in range(seqlen_k):
            diagonal = i if top_left else i + seqlen_k - seqlen_q
            mask[i, j] = (left == -1 or j >= diagonal - left) and (
                right == -1 or j <= diagonal + right
            )
    return mask


def one_head(q, k, v, mask, scale, softcap=0.0, bias=None, dout=None, dlse=None, round_to=None):
    """Attention of one head, q (M, D), k (N, D), v (N, Dv), mask (M, N), all float64.

    With `round_to`, logits, weights, the result and the gradients of weights and logits are rounded
    to that dtype, as a computation without a fused kernel does.
    """

    def rounded(x):
        return x if round_to is None else x.astype(round_to).astype(np.float64)

    rows, width = q.shape[0], v.shape[1]
    logits = rounded(scale * (q @ k.T))
    slope = np.ones_like(logits)
    if softcap:
        slope = 1 - np.tanh(logits / softcap) ** 2
        logits = rounded(softcap * np.tanh(logits / softcap))
    if bias is not None:
        logits = logits + bias
    out, lse, weights = np.zeros((rows, width)), np.full(rows, -np.inf), np.zeros(mask.shape)
    for i in range(rows):
        seen = mask[i] & (logits[i] > -np.inf)
        if seen.any():
            top = logits[i][seen].max()
            lse[i] = top + np.log(np.exp(logits[i][seen] - top).sum())
            weights[i][seen] = rounded(np.exp(logits[i][seen] - lse[i]))
            out[i] = rounded(weights[i][seen] @ v[seen])
    if dout is None:
        return out, lse
    some = lse > -np.inf
    dout = np.where(some[:, None], dout, 0.0)
    dlse = np.where(some, dlse, 0.0)
    q = np.where(some[:, None], q, 0.0)
    # d(out) / d(logit) by the softmax's Jacobian, d(lse) / d(logit) is the weight itself.
    dweights = rounded(dout @ v.T)
    delta = (weights * dweights).sum(axis=1, keepdims=True) - dlse[:, None]
    dlogits = rounded(weights * (dweights - delta))
    dproduct = dlogits * slope * scale
    return out, lse, dproduct @ k, dproduct.T @ q, weights.T @ dout, dlogits


def attention(
    q,
    k,
    v,
    *,
    scale=None,
    causal=False,
    window=(-1, -1),
    softcap=0.0,
    seqused_q=None,
    seqused_k=None,
    top_left=False,
    bias=None,
    mask=None,
    keys=None,
    dout=None,
    dlse=None,
    round_to=None,
):
    """Dense attention, q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv); lse (B, Hq, Sq).

    `keys` (begin, end) restricts every row to a range of keys; `bias` and `mask` are
    (B, Hq, Sq, Sk).
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    result = Attention(
        np.zeros((batch, seqlen_q, heads, v.shape[3])), np.full((batch, heads, seqlen_q), -np.inf)
    )
    grad = dout is not None or dlse is not None
    if grad:
        result.dq, result.dk, result.dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        result.dbias = np.zeros((batch, heads, seqlen_q, seqlen_k))
        dout = np.zeros_like(result.out) if dout is None else np.asarray(dout, np.float64)
        dlse = np.zeros_like(result.lse) if dlse is None else np.asarray(dlse, np.float64)
    for b in range(batch):
        m = seqlen_q if seqused_q is None else int(seqused_q[b])
        n = seqlen_k if seqused_k is None else int(seqused_k[b])
        seen = visible_keys(m, n, window, causal, top_left)
        if keys is not None:
            seen[:, : keys[0]] = False
            seen[:, keys[1] :] = False
        for h in range(heads):
            g = h // (heads // heads_kv)
            both = seen if mask is None else seen & np.asarray(mask)[b, h, :m, :n]
            added = None if bias is None else np.asarray(bias, np.float64)[b, h, :m, :n]
            cotangents = (dout[b, :m, h], dlse[b, h, :m]) if grad else ()
            one = one_head(
                q[b, :m, h],
                k[b, :n, g],
                v[b, :n, g],
                both,
                scale,
                softcap,
                added,
                *cotangents,
                round_to=round_to,
            )
            result.out[b, :m, h], result.lse[b, h, :m] = one[:2]
            if grad:
                result.dq[b, :m, h] = one[2]
                result.dk[b, :n, g] += one[3]
                result.dv[b, :n, g] += one[4]
                result.dbias[b, h, :m, :n] = one[5]
    return result


def attention_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    *,
    seqused_q=None,
    seqused_k=None,
    dout=None,
    dlse=None,
    **keywords,
):
    """Packed attention, q (Tq, Hq, D), k (Tk, Hk, D), v (Tk, Hk, Dv); lse (Hq, Tq)."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    heads = q.shape[1]
    result = Attention(
        np.zeros((q.shape[0], heads, v.shape[2])), np.full((heads, q.shape[0]), -np.inf)
    )
    grad = dout is not None or dlse is not None
    if grad:
        result.dq, result.dk, result.dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        dout = np.zeros_like(result.out) if dout is None else np.asarray(dout, np.float64)
        dlse = np.zeros_like(result.lse) if dlse is None else np.asarray(dlse, np.float64)
    for b in range(len(cu_seqlens_q) - 1):
        rows_q = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        rows_k = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
        if seqused_q is not None:
            rows_q = slice(rows_q.start, rows_q.start + int(seqused_q[b]))
        if seqused_k is not None:
            rows_k = slice(rows_k.start, rows_k.start + int(seqused_k[b]))
        cotangents = {"dout": dout[None, rows_q], "dlse": dlse[None, :, rows_q]} if grad else {}
        one = attention(q[None, rows_q], k[None, rows_k], v[None, rows_k], **keywords, **cotangents)
        result.out[rows_q], result.lse[:, rows_q] = one.out[0], one.lse[0]
        if grad:
            result.dq[rows_q], result.dk[rows_k] = one.dq[0], one.dk[0]
            result.dv[rows_k] = one.dv[0]
    return result


def combine(out_partial, lse_partial):
    """Merge (N, *b, S, H, Dv) and (N, *b, H, S); returns out (*b, S, H, Dv) and lse (*b, H, S)."""
    out_partial = np.asarray(out_partial, np.float64)
    lse_partial = np.asarray(lse_partial, np.float64)
    out, lse = np.zeros(out_partial.shape[1:]), np.full(lse_partial.shape[1:], -np.inf)
    for index in np.ndindex(*lse.shape):
        *batch, h, i = index
        row = (*batch, i, h)
        parts = lse_partial[(slice(None), *index)]
        present = parts != -np.inf
        if present.any():
            top = parts[present].max()
            lse[index] = top + np.log(np.exp(parts[present] - top).sum())
            weights = np.exp(parts[present] - lse[index])
            out[row] = weights @ out_partial[(slice(None), *row)][present]
    return out, lse


def fp8_columns(acc):
    """Undo the column order that an fp8 V leaves: out[d] = acc[8 * (d & 1) + (d >> 1)] of 16."""
    out = np.empty_like(acc)
    for column in range(acc.shape[-1]):
        group, d = divmod(column, 16)
        out[..., column] = acc[..., 16 * group + 8 * (d & 1) + (d >> 1)]
    return out


def epilogue(
    acc,
    *,
    lse=None,
    row_max=None,
    row_sum=None,
    group=1,
    cu_seqlens=None,
    seqused=None,
    total_q=None,
    fp8_permuted_columns=False,
):
    """Lay acc ([N,] B, H, M, Dv) out as ``epilogue`` does; float64 results, not rounded."""
    acc = np.asarray(acc, np.float64)
    if acc.ndim == 5:
        parts = [
            epilogue(
                acc[n],
                lse=None if lse is None else lse[n],
                row_max=None if row_max is None else row_max[n],
                row_sum=None if row_sum is None else row_sum[n],
                group=group,
                cu_seqlens=cu_seqlens,
                seqused=seqused,
                total_q=total_q,
                fp8_permuted_columns=fp8_permuted_columns,
            )
            for n in range(acc.shape[0])
        ]
        return np.stack([out for out, _ in parts]), np.stack([lse for _, lse in parts])
    if fp8_permuted_columns:
        acc = fp8_columns(acc)
    batch, heads_kv, rows, width = acc.shape
    seqlen, heads = rows // group, heads_kv * group
    if cu_seqlens is None:
        out, out_lse = (
            np.zeros((batch, seqlen, heads, width)),
            np.full((batch, heads, seqlen), -np.inf),
        )
    else:
        out = np.zeros((total_q, heads, width))
        out_lse = np.full((heads, total_q), -np.inf)
    for b, h, r in np.ndindex(batch, heads_kv, rows):
        query, head = r // group, h * group + r % group
        length = seqlen if cu_seqlens is None else cu_seqlens[b + 1] - cu_seqlens[b]
        if seqused is not None:
            length = min(length, seqused[b])
        if query >= length:
            continue
        if lse is not None:
            divisor, statistic = 1.0, float(lse[b, h, r])
        else:
            divisor, top = float(row_sum[b, h, r]), float(row_max[b, h, r])
            known = not (np.isnan(divisor) or np.isnan(top))
            empty = known and (divisor == 0 or top == -np.inf)
            statistic = -np.inf if empty else top + np.log(divisor)
        if statistic == -np.inf:
            continue
        value = np.full(width, np.nan) if np.isnan(statistic) else acc[b, h, r] / divisor
        if cu_seqlens is None:
            out[b, query, head], out_lse[b, head, query] = value, statistic
        else:
            at = cu_seqlens[b] + query
            out[at, head], out_lse[head, at] = value, statistic
    return out, out_lse
