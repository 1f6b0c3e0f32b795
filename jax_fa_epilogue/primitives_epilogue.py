"""The primitives of ``epilogue`` and ``combine``; see ``primitives.py`` for the machinery.

Letters: ``Hk`` heads of acc, ``S`` sequences (1 when dense), ``M`` rows of a sequence, ``G`` query
heads packed into the rows, ``T`` query tokens, ``D`` head dimension, ``N`` splits, ``H`` heads.

    epilogue_p  acc (*b,Hk,S,M,D), lse or (row_max, row_sum) (*b,Hk,S,M), [cu_seqlens (*b,1,S+1)],
                [seqused (*b,1,S)]  ->  out (*b,Hk,G,T,D), lse (*b,Hk,G,T)
    combine_p   out_partial (*b,H,N,T,D), lse_partial (*b,H,N,T)  ->  out (*b,H,T,D), lse (*b,H,T)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa_epilogue import native, reference
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

_ACC = Form("hsmd", "shmd")
_STATISTIC = Form("hsm", "shm")
_CU_SEQLENS = Form("hc", "hc")
_SEQUSED = Form("hs", "hs")
_EPILOGUE_RESULTS = (Form("hgtd", "thgd"), Form("hgt", "hgt"))
_COMBINE_OPERANDS = (Form("bhntd", "nbthd"), Form("bhnt", "nbht"))
_COMBINE_RESULTS = (Form("bhtd", "bthd"), Form("bht", "bht"))


def _epilogue_abstract(
    *operands: Any,
    num_batch_dims: int,
    qhead_per_khead: int,
    total_q: Any,
    out_dtype: Any,
    **_: Any,
) -> tuple[Any, Any]:
    acc = operands[0]
    batch, spec = leading_axes(operands, num_batch_dims)
    heads, _, rows, head_dim = acc.shape[num_batch_dims:]
    spec.append(sharded_over(acc, num_batch_dims))
    tokens = rows // qhead_per_khead if total_q is None else total_q
    shape = (*batch, heads, qhead_per_khead, tokens)
    return (
        result_aval(acc, (*shape, head_dim), out_dtype, spec),
        result_aval(acc, shape, np.dtype(np.float32), spec),
    )


def _combine_abstract(
    out_partial: Any, lse_partial: Any, *, num_batch_dims: int, out_dtype: Any, **_: Any
) -> tuple[Any, Any]:
    batch, spec = leading_axes((out_partial, lse_partial), num_batch_dims)
    heads, _, tokens, head_dim = out_partial.shape[num_batch_dims:]
    spec.append(sharded_over(out_partial, num_batch_dims))
    shape = (*batch, heads, tokens)
    return (
        result_aval(out_partial, (*shape, head_dim), out_dtype, spec),
        result_aval(out_partial, shape, np.dtype(np.float32), spec),
    )


def epilogue_operands(
    operands: Sequence[Any], *, normalised: bool, has_cu_seqlens: bool, has_seqused: bool
) -> dict[str, Any]:
    """Names of the operands of ``epilogue``, in the order in which the primitive takes them."""
    names = ["acc", *(["lse"] if normalised else ["row_max", "row_sum"])]
    names += ["cu_seqlens"] * has_cu_seqlens + ["seqused"] * has_seqused
    return dict(zip(names, operands, strict=True))


def _epilogue_reference(
    *operands: jax.Array,
    num_batch_dims: int,
    normalised: bool,
    has_cu_seqlens: bool,
    has_seqused: bool,
    qhead_per_khead: int,
    total_q: int | None,
    **keywords: Any,
) -> Any:
    """The specification of epilogue_p: ``reference.epilogue`` on logical operands."""
    num_floats = 2 if normalised else 3

    def one(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        floats = [jnp.moveaxis(x, 0, 1) for x in operands[:num_floats]]
        descriptors = [x[0] for x in operands[num_floats:]]
        named = epilogue_operands(
            floats + descriptors,
            normalised=normalised,
            has_cu_seqlens=has_cu_seqlens,
            has_seqused=has_seqused,
        )
        out, lse = reference.epilogue(
            **named, qhead_per_khead=qhead_per_khead, total_q=total_q, **keywords
        )
        if total_q is None:
            out, lse = out[0], lse[0]
        tokens, heads, head_dim = out.shape
        split_heads = (heads // qhead_per_khead, qhead_per_khead)
        return (
            jnp.moveaxis(out.reshape(tokens, *split_heads, head_dim), 0, 2),
            lse.reshape(*split_heads, tokens),
        )

    return over_leading(one, num_batch_dims, *operands)


def _combine_reference(*operands: jax.Array, num_batch_dims: int, out_dtype: Any) -> Any:
    """The specification of combine_p: ``reference.combine`` on logical operands."""

    def one(out_partial: jax.Array, lse_partial: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, lse = reference.combine(
            jnp.transpose(out_partial, (1, 2, 0, 3)),
            jnp.moveaxis(lse_partial, 1, 0),
            out_dtype=out_dtype,
        )
        return jnp.moveaxis(out, 1, 0), lse

    return over_leading(one, num_batch_dims, *operands)


def _lower_epilogue_cuda(
    ctx: Any, *operands: Any, implementation: str, caller: str, **params: Any
) -> Any:
    if implementation == "xla" or too_many_batch_axes(
        ctx, caller, implementation, params["num_batch_dims"]
    ):
        return lower_reference(_epilogue_reference, ctx, *operands, **params)
    flags = ("normalised", "has_cu_seqlens", "has_seqused", "fp8_permuted_columns")
    forms = [
        _ACC,
        *[_STATISTIC] * (1 if params["normalised"] else 2),
        *[_CU_SEQLENS] * params["has_cu_seqlens"],
        *[_SEQUSED] * params["has_seqused"],
        *_EPILOGUE_RESULTS,
    ]
    return custom_call(
        ctx,
        operands,
        native.EPILOGUE_TARGET,
        forms,
        params["num_batch_dims"],
        {flag: params[flag] for flag in flags},
    )


def _lower_combine_cuda(
    ctx: Any, *operands: Any, implementation: str, caller: str, **params: Any
) -> Any:
    if implementation == "xla" or too_many_batch_axes(
        ctx, caller, implementation, params["num_batch_dims"]
    ):
        return lower_reference(_combine_reference, ctx, *operands, **params)
    forms = (*_COMBINE_OPERANDS, *_COMBINE_RESULTS)
    return custom_call(ctx, operands, native.COMBINE_TARGET, forms, params["num_batch_dims"], {})


epilogue_p = define("epilogue", _epilogue_abstract, _epilogue_reference, _lower_epilogue_cuda)
combine_p = define("combine", _combine_abstract, _combine_reference, _lower_combine_cuda)
