"""The public functions: documentation, validation, choice of the implementation.

Letters in shapes: ``B`` batch or number of sequences, ``Sq``/``Sk`` query/key length, ``Hq`` query
heads, ``Hk`` key/value heads (``Hq = G * Hk``), ``D`` width of q and k, ``Dv`` width of v,
``Tq``/``Tk`` packed tokens, ``N`` splits of the key axis. Query head h reads key/value head
``h // G``.

``lse`` is the natural logarithm of the sum of ``exp(logit)`` over the visible keys, float32, where
``logit = softcap(softmax_scale * q.k)``. A query row that sees no key has out 0 and lse -inf, and
so has a row in no sequence. `implementation` None takes the CUDA kernels where the device (compute
capability 9.0) and the call are covered, and the XLA reference elsewhere.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_fa_epilogue import derivatives, plans, problem, reference

Implementation = Literal["cuda", "xla"] | None


def epilogue(
    acc: ArrayLike,
    *,
    lse: ArrayLike | None = None,
    row_max: ArrayLike | None = None,
    row_sum: ArrayLike | None = None,
    out_dtype: DTypeLike = jnp.bfloat16,
    qhead_per_khead: int = 1,
    cu_seqlens: ArrayLike | None = None,
    seqused: ArrayLike | None = None,
    total_q: int | None = None,
    fp8_permuted_columns: bool = False,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """Turn the accumulator of an attention main loop into the attention's output and LSE.

    Rows are normalised (if they are not yet), converted, put into the output's layout, and rows
    without keys or outside every sequence are zero-filled. The statistics have one of two forms:
    `lse`, and `acc` is normalised already; or `row_max` (in natural-log units) and `row_sum`, and
    ``out = acc / row_sum``, ``lse = row_max + log(row_sum)``.

    Args:
      acc: float32 ``(B, H, M, Dv)``, head-major; Dv a multiple of 8 up to 256. With
        ``qhead_per_khead=G > 1`` rows are packed: H is Hk, M is Sq*G, and row r is query ``r // G``
        of query head ``h*G + r % G``. A leading split axis ``N`` here and on the statistics is
        carried through to the results.
      lse: float32 ``(B, H, M)``. -inf is an empty row, whatever acc holds.
      row_max: float32 ``(B, H, M)``.
      row_sum: float32 ``(B, H, M)``. 0 is an empty row, whatever acc holds.
      out_dtype: bfloat16, float16 or float32.
      qhead_per_khead: G, query heads packed into the rows of one head of acc.
      cu_seqlens: int32 or int64 ``(B+1,)``, where each sequence starts in the packed result, in
        tokens. acc holds each sequence's rows from 0 on, so that M is G times the longest sequence.
        Traced values that decrease or reach past `total_q` never lead outside the arrays; which of
        the rows a token then gets is not specified.
      seqused: int32 or int64 ``(B,)``, tokens of each sequence that are used; later rows are empty.
      total_q: static number of tokens of the packed result, given exactly with `cu_seqlens`.
      fp8_permuted_columns: acc's columns have the order in which an fp8 main loop leaves them; in
        each group of 16, ``out[d] = acc[8*(d & 1) + (d >> 1)]``.
      implementation: None, "cuda" or "xla".

    Returns:
      ``out, lse``: ``(B, M, H, Dv)`` of `out_dtype` and float32 ``(B, H, M)``; packed rows
      ``(B, Sq, Hk*G, Dv)`` and ``(B, Hk*G, Sq)``; with `cu_seqlens` ``(total_q, H*G, Dv)`` and
      ``(H*G, total_q)``. NaN statistics give NaN rows.

    Raises:
      ValueError: wrong shapes, both or neither form of statistics, rows that G does not divide, a
        head dimension that is not supported, concrete descriptors that do not fit.
      TypeError: wrong dtypes or kinds of arguments.
      NotImplementedError: ``implementation="cuda"`` where no kernel can run, and forward-mode
        derivatives unless ``implementation="xla"``.

    The row layout is that of FlashAttention-3's PackGQA and varlen epilogue (Shah et al., 2024).
    """
    problem.check_implementation(implementation)
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
    operands = (acc, lse, row_max, row_sum, _int32(cu_seqlens), _int32(seqused))
    operands = [jnp.asarray(x) for x in operands if x is not None]
    if implementation == "xla":
        return derivatives.epilogue_reference(facts, *operands)
    chosen, _ = plans.choose("epilogue", implementation, lambda: plans.epilogue(facts))
    return derivatives.epilogue(facts, chosen, *derivatives.ready("epilogue", operands))


def combine(
    out_partial: ArrayLike, lse_partial: ArrayLike, *, out_dtype: DTypeLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """Merge attention results over parts of the keys into the result over all of them.

    ``lse = log(sum_n exp(lse_n))``, ``out = sum_n exp(lse_n - lse) * out_n``. A part with lse -inf
    counts nothing, whatever its out holds.

    Args:
      out_partial: ``(N, B, Sq, Hq, Dv)`` or packed ``(N, Tq, Hq, Dv)``, float32, bfloat16 or
        float16, each part normalised on its own; N from 1 to 256, Dv a multiple of 8 up to 256.
      lse_partial: float32 ``(N, B, Hq, Sq)`` or ``(N, Hq, Tq)``.
      out_dtype: bfloat16, float16 or float32; None is the dtype of `out_partial`.

    Returns:
      ``out, lse``: ``(B, Sq, Hq, Dv)`` and float32 ``(B, Hq, Sq)``, or packed ``(Tq, Hq, Dv)`` and
      ``(Hq, Tq)``.

    Raises:
      ValueError: wrong shapes, too many splits, a head dimension that is not supported.
      TypeError: wrong dtypes.
      NotImplementedError: forward-mode derivatives.

    This is the split reduction of Flash-Decoding (Dao et al., 2023).
    """
    facts = problem.combine(out_partial, lse_partial, out_dtype=out_dtype)
    operands = [jnp.asarray(out_partial), jnp.asarray(lse_partial)]
    chosen, _ = plans.choose("combine", None, lambda: plans.combine(facts))
    return derivatives.combine(facts, chosen, *derivatives.ready("combine", operands))


def flash_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    seqused_q: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    implementation: Implementation = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention over sequences of one length.

    Args:
      q: ``(B, Sq, Hq, D)`` bfloat16, float16 or float32; D and Dv multiples of 8 up to 256.
      k: ``(B, Sk, Hk, D)``, dtype of q.
      v: ``(B, Sk, Hk, Dv)``, dtype of q.
      softmax_scale: factor on ``q.k``; None is ``1 / sqrt(D)``.
      causal: mask later keys; the same as a right window of 0.
      window_size: (left, right) in keys, -1 is unbounded. Query i sees key j where
        ``i + Sk - Sq - left <= j <= i + Sk - Sq + right`` (aligned bottom-right), both ends
        inclusive, with the lengths that `seqused_q` and `seqused_k` give.
      softcap: c > 0 replaces a logit x by ``c * tanh(x / c)``; 0 is none. Kernels take up to 1024,
        for gradients from 2**-8 on; beyond these the reference runs.
      seqused_q: int32 or int64 ``(B,)``, queries of each sequence that are used; later rows are
        empty.
      seqused_k: int32 or int64 ``(B,)``, keys of each sequence that are used; later ones have no
        influence even when they are NaN.
      num_splits: parts into which the key axis is cut; 0 lets the plan choose.
      pack_gqa: pack the query heads of a key/value head into the rows of a tile; None lets the plan
        choose. Never changes the meaning of the result.
      deterministic: gradients that are bitwise equal from run to run, at some cost in speed.
        Otherwise the kernels add up dq in the order in which blocks finish, so that its last bits
        may differ; dk, dv, out and lse are the same in every run.
      return_lse: return ``(out, lse)``; gradients flow through both.
      implementation: None, "cuda" or "xla".

    Returns:
      out ``(B, Sq, Hq, Dv)`` of q's dtype and, on request, lse float32 ``(B, Hq, Sq)``.

    Raises:
      ValueError: wrong shapes or keywords, concrete lengths that do not fit.
      TypeError: wrong dtypes or kinds of arguments.
      NotImplementedError: ``implementation="cuda"`` where no kernel can run (float32, or a pair of
        D and Dv without a kernel: `plan` tells), for the gradient when that is traced; fp8;
        forward-mode and second derivatives.

    Under ``jax.checkpoint`` with the policy ``save_only_these_names("flash_attention_out",
    "flash_attention_lse")`` the backward pass does not compute the attention again. Its kernels
    need working memory for dq in float32, in whole tiles (up to 128 queries, D rounded up to a
    kernel's), 8 bytes per query and head, and some integers. Where no kernel covers the gradient of
    a call that has a forward kernel, `implementation` None takes the XLA reference for it alone.

    The computation is FlashAttention (Dao et al., 2022; Shah et al., 2024).
    """
    problem.check_implementation(implementation)
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
    descriptors = {"seqused_q": seqused_q, "seqused_k": seqused_k}
    out, lse = _attend("flash_attention", facts, implementation, q, k, v, descriptors)
    return (out, lse) if return_lse else out


def flash_attention_varlen(  # noqa: D417
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    implementation: Implementation = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention over sequences of different lengths, packed into one token axis.

    Args:
      q: ``(Tq, Hq, D)`` bfloat16, float16 or float32.
      k: ``(Tk, Hk, D)``, dtype of q.
      v: ``(Tk, Hk, Dv)``, dtype of q.
      cu_seqlens_q: int32 or int64 ``(B+1,)``; sequence b owns tokens ``cu[b]`` to ``cu[b+1] - 1``
        of q. Starts at 0 and never decreases; tokens past the last entry are padding. Traced
        values that break this are clamped.
      cu_seqlens_k: the same for k and v.
      max_seqlen_q: static upper bound of the sequences' lengths in q.
      max_seqlen_k: static upper bound of the sequences' lengths in k.
      seqused_q: int32 or int64 ``(B,)``, tokens of each sequence of q that are used, from its
        start.
      seqused_k: the same for k and v.

    All other keywords are those of `flash_attention`; masks are aligned per sequence.

    Returns:
      out ``(Tq, Hq, Dv)`` of q's dtype and, on request, lse float32 ``(Hq, Tq)``.

    Raises:
      ValueError: wrong shapes or keywords, concrete descriptors that do not fit.
      TypeError: wrong dtypes or kinds of arguments.
      NotImplementedError: as for `flash_attention`.
    """
    problem.check_implementation(implementation)
    facts = problem.flash_attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
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
    out, lse = _attend("flash_attention_varlen", facts, implementation, q, k, v, descriptors)
    return (out, lse) if return_lse else out


def flash_attention_partials(  # noqa: D417
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    num_splits: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    seqused_q: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention over each of `num_splits` parts of the keys on its own, for `combine`.

    Args:
      q: ``(B, Sq, Hq, D)`` bfloat16, float16 or float32.
      k: ``(B, Sk, Hk, D)``, dtype of q.
      v: ``(B, Sk, Hk, Dv)``, dtype of q.
      num_splits: N, 1 to 256. A part may be empty.

    All other keywords are those of `flash_attention`.

    Returns:
      out_partial float32 ``(N, B, Sq, Hq, Dv)`` and lse_partial float32 ``(N, B, Hq, Sq)``, each
      part normalised on its own. ``combine(*flash_attention_partials(...))`` is `flash_attention`.
      Which keys make up a part depends on the implementation, and with the call on whether it is
      differentiated: then the XLA reference runs, forward and backward.

    Raises:
      ValueError: wrong shapes or keywords, concrete lengths that do not fit.
      TypeError: wrong dtypes or kinds of arguments.
      NotImplementedError: as for `flash_attention`.
    """
    problem.check_implementation(implementation)
    facts = problem.flash_attention_partials(
        q,
        k,
        v,
        num_splits=num_splits,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
    )
    descriptors = {"seqused_q": seqused_q, "seqused_k": seqused_k}
    name = "flash_attention_partials"
    return _attend(name, facts, implementation, q, k, v, descriptors, partial=True)


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    return_residual: bool = False,
    implementation: Implementation = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention with the signature and the mask alignment of ``jax.nn.dot_product_attention``.

    Args:
      query: ``(B, Sq, Hq, D)`` or ``(Sq, Hq, D)``, bfloat16, float16 or float32.
      key: ``(B, Sk, Hk, D)`` or ``(Sk, Hk, D)``, dtype of query.
      value: ``(B, Sk, Hk, Dv)`` or ``(Sk, Hk, Dv)``, dtype of query.
      bias: added to the scaled logits; broadcasts to ``(B, Hq, Sq, Sk)``. The kernels take neither
        a bias nor a mask: with one of them the XLA reference runs.
      mask: bool, True where a query may see a key; broadcasts to ``(B, Hq, Sq, Sk)``.
      scale: factor on ``query.key``; None is ``1 / sqrt(D)``.
      is_causal: query i sees key j where ``j <= i`` (aligned top-left).
      query_seq_lengths: int32 or int64 ``(B,)``, queries that are used; later rows are empty.
      key_value_seq_lengths: int32 or int64 ``(B,)``, keys that are used.
      local_window_size: (left, right), query i sees key j where ``i - left <= j <= i + right``; one
        integer stands for both.
      return_residual: return ``(out, lse)`` as well.
      implementation: None, "cuda" or "xla".

    Returns:
      out, shaped like query with the width of value, of query's dtype; on request also lse, which
      stays float32 and has a gradient: query's shape without its last axis, as in jax.nn.

    Raises:
      ValueError: wrong shapes or keywords, concrete lengths that do not fit.
      TypeError: wrong dtypes or kinds of arguments.
      NotImplementedError: as for `flash_attention`.
    """
    problem.check_implementation(implementation)
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
    q, k, v = (x if x.ndim == 4 else x[None] for x in map(jnp.asarray, (query, key, value)))
    lengths = {"seqused_q": query_seq_lengths, "seqused_k": key_value_seq_lengths}
    if bias is None and mask is None:
        out, lse = _attend("dot_product_attention", facts, implementation, q, k, v, lengths)
    elif implementation == "cuda":
        raise NotImplementedError(
            "jax_fa_epilogue.dot_product_attention: implementation='cuda' is not available: "
            "no kernel takes a bias or a mask"
        )
    else:
        out, lse = reference.attend(facts, q, k, v, lengths, bias, mask)
    lse = jnp.swapaxes(lse, 1, 2)
    out, lse = (out, lse) if query.ndim == 4 else (out[0], lse[0])
    return (out, lse) if return_residual else out


def plan(  # noqa: D417
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
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
    implementation: Implementation = None,
) -> plans.Plan:
    """Tell how a call of `flash_attention` or `flash_attention_varlen` would run, without running.

    Args:
      q: as in that call; ``jax.ShapeDtypeStruct`` will do for all arrays.
      cu_seqlens_q: given for `flash_attention_varlen`, with the other three of its arguments.

    All arguments are those of the call.

    Returns:
      The plan, to be printed or to be looked at. It depends on shapes, static arguments and the
      kind of device alone; where there is no CUDA device it is that for an H200.

    Raises:
      ValueError: as the call.
      TypeError: as the call.
    """
    problem.check_implementation(implementation)
    keywords = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
        "num_splits": num_splits,
        "pack_gqa": pack_gqa,
        "deterministic": deterministic,
        "return_lse": return_lse,
    }
    packing = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    absent = [name for name, value in packing.items() if value is None]
    if len(absent) == len(packing):
        facts = problem.flash_attention(q, k, v, **keywords)
    elif absent:
        raise ValueError(f"{absent[0]} is missing; packed sequences need {', '.join(packing)}")
    else:
        facts = problem.flash_attention_varlen(q, k, v, **packing, **keywords)
    return plans.describe(facts, implementation)


def _int32(descriptor: ArrayLike | None) -> jax.Array | None:
    """Descriptors as the kernels read them; too large values stay too large."""
    if descriptor is None:
        return None
    limits = np.iinfo(np.int32)
    return jnp.clip(jnp.asarray(descriptor), limits.min, limits.max).astype(jnp.int32)


def _attend(
    name: str,
    facts: problem.AttentionProblem,
    implementation: Implementation,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    descriptors: dict[str, ArrayLike | None],
    *,
    partial: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Run an attention call whose arguments are checked; returns out and lse."""
    given = {key: _int32(x) for key, x in descriptors.items() if x is not None}
    operands = derivatives.ready(name, [*map(jnp.asarray, (q, k, v)), *given.values()])
    launch = None
    if implementation != "xla":
        launch = plans.launch(name, implementation, facts, partial=partial)
    if launch is None:
        run = reference.attend_partially if partial else reference.attend
        return run(facts, *operands[:3], dict(zip(given, operands[3:], strict=True)))
    run = derivatives.partials if partial else derivatives.attention
    return run(facts, launch, *operands)
