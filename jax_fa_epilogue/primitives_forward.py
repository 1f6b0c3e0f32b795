"""The primitive of fused attention; see ``primitives.py`` for the machinery.

Letters: ``Hk`` key/value heads, ``G`` query heads that share one, ``T`` and ``S`` tokens of the
queries and of the keys, ``D`` and ``Dv`` widths, ``N`` sequences (1 when dense), ``P`` splits.

    forward_p  q (*b,Hk,G,T,D), k (*b,Hk,S,D), v (*b,Hk,S,Dv),
               [cu_seqlens_q and cu_seqlens_k (*b,1,N+1)], [seqused_q], [seqused_k] (*b,1,N)

               num_splits 0    ->  out (*b,Hk,G,T,Dv) of q's dtype, lse (*b,Hk,G,T) float32
               num_splits = P  ->  out (*b,Hk,P,G,T,Dv) float32, lse (*b,Hk,P,G,T) float32

With splits there is at least one ``*b`` axis, and the results lie in memory with the splits outside
the last one, as combine_p reads its operands.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa_epilogue import native, reference
from jax_fa_epilogue import reference_attention as tiled
from jax_fa_epilogue.primitives import (
    Form,
    custom_call,
    define,
    leading_axes,
    lower_reference,
    over_leading,
    result_aval,
    sharded_over,
    too_many_batch_axes,
)

FORMS = {
    "q": Form("hgtd", "thgd"),
    "k": Form("hsd", "shd"),
    "v": Form("hse", "she"),
    "cu_seqlens_q": Form("hc", "hc"),
    "cu_seqlens_k": Form("hc", "hc"),
    "seqused_q": Form("hn", "hn"),
    "seqused_k": Form("hn", "hn"),
}
_FINAL_RESULTS = (Form("hgte", "thge"), Form("hgt", "hgt"))
_PARTIAL_RESULTS = (Form("bhpgte", "pbthge"), Form("bhpgt", "pbhgt"))
_WORKSPACE = Form("hw", "hw")


def operand_names(
    *, has_cu_seqlens: bool, has_seqused_q: bool, has_seqused_k: bool
) -> tuple[str, ...]:
    """Names of the operands, in the order in which the primitive takes them."""
    return (
        *("q", "k", "v"),
        *(("cu_seqlens_q", "cu_seqlens_k") if has_cu_seqlens else ()),
        *(("seqused_q",) if has_seqused_q else ()),
        *(("seqused_k",) if has_seqused_k else ()),
    )


def _names(params: dict[str, Any]) -> tuple[str, ...]:
    flags = ("has_cu_seqlens", "has_seqused_q", "has_seqused_k")
    return operand_names(**{flag: params[flag] for flag in flags})


def _abstract(*operands: Any, num_batch_dims: int, num_splits: int, **_: Any) -> tuple[Any, Any]:
    q, _, v, *_ = operands
    batch, spec = leading_axes(operands, num_batch_dims)
    heads, group, tokens, _ = q.shape[num_batch_dims:]
    spec.append(sharded_over(q, num_batch_dims))
    float32 = np.dtype(np.float32)
    shape = (*batch, heads, *([num_splits] if num_splits else []), group, tokens)
    return (
        result_aval(q, (*shape, v.shape[-1]), float32 if num_splits else q.dtype, spec),
        result_aval(q, shape, float32, spec),
    )


def _reference(
    *operands: jax.Array,
    num_batch_dims: int,
    num_splits: int,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float,
    softcap: float,
    window_left: int,
    window_right: int,
    top_left: bool,
    pack_gqa: bool | None,
    workspace_size: int,
    **flags: bool,
) -> Any:
    """The specification of forward_p: ``reference_attention`` on logical operands."""
    packed, names = flags["has_cu_seqlens"], operand_names(**flags)

    def attend(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k, v, *descriptors = operands
        used = dict(zip(names[3:], (x[..., 0, :] for x in descriptors), strict=True))
        total_q, total_k = q.shape[-2], k.shape[-2]
        longest_q, longest_k = (max_seqlen_q, max_seqlen_k) if packed else (total_q, total_k)
        count = used["cu_seqlens_q"].shape[0] - 1 if packed else 1
        options = tiled.Options(
            softmax_scale=softmax_scale,
            softcap=softcap,
            window_left=window_left,
            window_right=window_right,
            top_left=top_left,
            packed=packed,
            out_dtype=np.dtype(np.float32) if num_splits else q.dtype,
            **tiled.tiling(count, total_q, total_k, longest_q, longest_k),
        )
        sequences = reference.sequences(total_q, total_k, longest_q, longest_k, **used)
        if not num_splits:
            return tiled.attention(options, q, k, v, sequences)
        out, lse = reference.over_splits(options, num_splits, longest_k, q, k, v, sequences)
        return jnp.moveaxis(out, 0, -4), jnp.moveaxis(lse, 0, -3)

    if packed:
        return over_leading(attend, num_batch_dims, *operands)
    # Dense batch axes stay together: mapped over, lengths would also steer the loops, one for all.
    batch, _ = leading_axes([jax.typeof(x) for x in operands], num_batch_dims)
    q = jnp.broadcast_to(operands[0], (*batch, *operands[0].shape[num_batch_dims:]))
    return attend(q, *operands[1:])


def _lower_cuda(ctx: Any, *operands: Any, implementation: str, caller: str, **params: Any) -> Any:
    num_batch_dims, num_splits = params["num_batch_dims"], params["num_splits"]
    if implementation == "xla" or too_many_batch_axes(ctx, caller, implementation, num_batch_dims):
        return lower_reference(_reference, ctx, *operands, **params)
    forms = [FORMS[name] for name in _names(params)]
    results = _PARTIAL_RESULTS if num_splits else _FINAL_RESULTS
    workspace = _WORKSPACE
    if num_splits:
        *forms, workspace = (Form("b" + x.logical, "b" + x.memory) for x in (*forms, workspace))
    out = ctx.avals_out[0]
    workspace_shape = (*out.shape[: num_batch_dims + 1], params["workspace_size"])
    return custom_call(
        ctx,
        operands,
        native.FORWARD_TARGET,
        [*forms, *results, workspace],
        num_batch_dims,
        _attributes(**params),
        workspace=[jax.core.ShapedArray(workspace_shape, np.dtype(np.int32))],
    )


def _attributes(
    *,
    num_batch_dims: int,
    softmax_scale: float,
    softcap: float,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    pack_gqa: bool | None,
    workspace_size: int,
    **integers: int,
) -> dict[str, int | float]:
    """What the handler reads, beside the number of leading axes."""
    return integers | {
        "softmax_scale": float(softmax_scale),
        "softcap": float(softcap),
        "max_seqlen_q": -1 if max_seqlen_q is None else max_seqlen_q,
        "max_seqlen_k": -1 if max_seqlen_k is None else max_seqlen_k,
        "pack_gqa": -1 if pack_gqa is None else pack_gqa,
    }


forward_p = define("forward", _abstract, _reference, _lower_cuda)
