"""The primitive of attention's gradient; see ``primitives.py`` for the machinery.

Letters as in ``primitives_forward.py``.

    backward_p  q (*b,Hk,G,T,D), k (*b,Hk,S,D), v (*b,Hk,S,Dv),
                out (*b,Hk,G,T,Dv), lse (*b,Hk,G,T) float32, as the forward pass gave them,
                dout (*b,Hk,G,T,Dv), dlse (*b,Hk,G,T) float32, the cotangents of both,
                [cu_seqlens_q and cu_seqlens_k (*b,1,N+1)], [seqused_q], [seqused_k] (*b,1,N)

                ->  dq (*b,Hk,G,T,D), dk (*b,Hk,S,D), dv (*b,Hk,S,Dv), of q's dtype

An operand that is shared over a ``*b`` axis has a gradient for each of its indices all the same:
JAX sums over the axis of a vmap that did not map the operand. Packed sequences lie in order within
the buffers, none of them overlap; the kernels take a tile's rows to be its own.
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
from jax_fa_epilogue.primitives_forward import FORMS, operand_names

_RESULTS = ("q", "k", "v")  # of which there is a gradient each
_CALL_OPERANDS = ("q", "k", "v", "out", "lse", "dout", "dlse")
_STATISTIC = Form("hgt", "hgt")
_FORMS = FORMS | {
    "out": Form("hgte", "thge"),
    "lse": _STATISTIC,
    "dout": Form("hgte", "thge"),
    "dlse": _STATISTIC,
}
# One form per workspace: sizes with the same letter are one factor of the sharding rule.
_WORKSPACES = {
    "dq_accum_size": (Form("hw", "hw"), np.dtype(np.float32)),
    "statistics_size": (Form("hx", "hx"), np.dtype(np.float32)),
    "semaphore_size": (Form("hy", "hy"), np.dtype(np.int32)),
}


def _names(params: dict[str, Any]) -> tuple[str, ...]:
    flags = ("has_cu_seqlens", "has_seqused_q", "has_seqused_k")
    _, _, _, *descriptors = operand_names(**{flag: params[flag] for flag in flags})
    return (*_CALL_OPERANDS, *descriptors)


def _abstract(*operands: Any, num_batch_dims: int, **_: Any) -> tuple[Any, ...]:
    batch, spec = leading_axes(operands, num_batch_dims)
    return tuple(
        result_aval(
            x,
            (*batch, *x.shape[num_batch_dims:]),
            x.dtype,
            [*spec, sharded_over(x, num_batch_dims)],
        )
        for x in operands[: len(_RESULTS)]
    )


def _reference(
    *operands: jax.Array,
    num_batch_dims: int,
    softmax_scale: float,
    softcap: float,
    window_left: int,
    window_right: int,
    top_left: bool,
    deterministic: bool,
    dq_accum_size: int,
    statistics_size: int,
    semaphore_size: int,
    **flags: bool,
) -> Any:
    """The specification of backward_p: ``reference_attention.backward`` on logical operands."""
    packed, names = flags["has_cu_seqlens"], _names(flags)

    def pull(*operands: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v, out, lse, dout, dlse, *descriptors = operands
        used = {
            name: x[..., 0, :]
            for name, x in zip(names[len(_CALL_OPERANDS) :], descriptors, strict=True)
        }
        total_q, total_k = q.shape[-2], k.shape[-2]
        count = used["cu_seqlens_q"].shape[0] - 1 if packed else 1
        options = tiled.Options(
            softmax_scale=softmax_scale,
            softcap=softcap,
            window_left=window_left,
            window_right=window_right,
            top_left=top_left,
            packed=packed,
            out_dtype=q.dtype,
            **tiled.tiling(count, total_q, total_k, total_q, total_k),
        )
        sequences = reference.sequences(total_q, total_k, total_q, total_k, **used)
        return tiled.backward(options, q, k, v, sequences, out, lse, dout, dlse)

    if packed:
        return over_leading(pull, num_batch_dims, *operands)
    # Dense batch axes stay together: mapped over, lengths would also steer the loops, one for all.
    batch, _ = leading_axes([jax.typeof(x) for x in operands], num_batch_dims)
    gradients_of = (
        jnp.broadcast_to(x, (*batch, *x.shape[num_batch_dims:])) for x in operands[: len(_RESULTS)]
    )
    return pull(*gradients_of, *operands[len(_RESULTS) :])


def _lower_cuda(ctx: Any, *operands: Any, implementation: str, caller: str, **params: Any) -> Any:
    num_batch_dims = params["num_batch_dims"]
    if implementation == "xla" or too_many_batch_axes(ctx, caller, implementation, num_batch_dims):
        return lower_reference(_reference, ctx, *operands, **params)
    leading = ctx.avals_out[0].shape[: num_batch_dims + 1]
    workspaces, sizes = _WORKSPACES.values(), [params.pop(name) for name in _WORKSPACES]
    del params["num_batch_dims"]
    return custom_call(
        ctx,
        operands,
        native.BACKWARD_TARGET,
        [
            *(_FORMS[name] for name in (*_names(params), *_RESULTS)),
            *(form for form, _ in workspaces),
        ],
        num_batch_dims,
        params | {name: float(params[name]) for name in ("softmax_scale", "softcap")},
        workspace=[
            jax.core.ShapedArray((*leading, size), dtype)
            for size, (_, dtype) in zip(sizes, workspaces, strict=True)
        ],
    )


backward_p = define("backward", _abstract, _reference, _lower_cuda)
