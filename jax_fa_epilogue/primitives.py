"""The JAX primitives behind the CUDA kernels.

Each primitive works on *logical* arrays whose leading axes are batch-like, so that vmap and the
partitioner can treat them alike; where the data lies in memory is said by the layouts of the custom
call, so that no transpose is left. ``*b`` is any number of leading batch axes. In each operand,
each of them has the full size, or size 1 where the operand does not depend on it (the kernel then
reads with stride 0); results have the full size. Letters: ``Hk`` heads of acc, ``S`` sequences (1
when dense), ``M`` rows of a sequence, ``G`` query heads packed into the rows, ``T`` query tokens,
``D`` head dimension, ``N`` splits, ``H`` heads.

    epilogue_p  acc (*b,Hk,S,M,D), lse or (row_max, row_sum) (*b,Hk,S,M), [cu_seqlens (*b,1,S+1)],
                [seqused (*b,1,S)]  ->  out (*b,Hk,G,T,D), lse (*b,Hk,G,T)
    combine_p   out_partial (*b,H,N,T,D), lse_partial (*b,H,N,T)  ->  out (*b,H,T,D), lse (*b,H,T)

The parameter `implementation` is "xla" (the reference on every platform), "auto" (the kernel on
CUDA, the reference elsewhere) or "cuda" (the kernel on CUDA, an error elsewhere).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fa_epilogue import _native, native, reference
from jax_fa_epilogue.varying import match_varying


class _Form(NamedTuple):
    """Axes of one operand or result after the leading ones, a letter each."""

    logical: str
    memory: str  # the same letters, major to minor


# The partitioner may shard "b", "h" and the leading axes; all else is replicated. combine_p's last
# *b axis is written as "b", because it lies inside N in memory.
_SHARDABLE = "bh"
_FACTORS = "ijklmnopqrstuvwxyz"  # symbols in the syntax of sharding rules, then z_1, z_2, ...
_ACC = _Form("hsmd", "shmd")
_STATISTIC = _Form("hsm", "shm")
_CU_SEQLENS = _Form("hc", "hc")
_SEQUSED = _Form("hs", "hs")
_EPILOGUE_RESULTS = (_Form("hgtd", "thgd"), _Form("hgt", "hgt"))
_COMBINE_OPERANDS = (_Form("bhntd", "nbthd"), _Form("bhnt", "nbht"))
_COMBINE_RESULTS = (_Form("bhtd", "bthd"), _Form("bht", "bht"))


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _sharded_over(aval: Any, axis: int) -> Any:
    return aval.sharding.spec[axis] if aval.sharding.spec else None


def _leading(operands: Sequence[Any], num_batch_dims: int) -> tuple[list[Any], list[Any]]:
    """Full sizes of the leading batch axes and the mesh axes they are sharded over."""
    sizes, spec = [], []
    for axis in range(num_batch_dims):
        full = next((x for x in operands if not _is_one(x.shape[axis])), operands[0])
        if any(x.shape[axis] not in (1, full.shape[axis]) for x in operands):
            shapes = ", ".join(str(x.shape) for x in operands)
            raise ValueError(f"leading axis {axis} of the operands {shapes} is neither 1 nor equal")
        sizes.append(full.shape[axis])
        spec.append(_sharded_over(full, axis))
    return sizes, spec


def _result(like: Any, sizes: Sequence[Any], dtype: Any, spec: Sequence[Any]) -> Any:
    """Abstract value of a result: it varies like the operands, and is sharded over `spec`."""
    if like.sharding.mesh.empty:
        return jax.core.ShapedArray(tuple(sizes), dtype)
    spec = (*spec, *(None for _ in range(len(sizes) - len(spec))))
    return jax.core.ShapedArray(
        tuple(sizes),
        dtype,
        sharding=NamedSharding(like.sharding.mesh, P(*spec)),
        manual_axis_type=like.manual_axis_type,
    )


def _epilogue_abstract(
    *operands: Any,
    num_batch_dims: int,
    qhead_per_khead: int,
    total_q: Any,
    out_dtype: Any,
    **_: Any,
) -> tuple[Any, Any]:
    acc = operands[0]
    batch, spec = _leading(operands, num_batch_dims)
    heads, _, rows, head_dim = acc.shape[num_batch_dims:]
    spec.append(_sharded_over(acc, num_batch_dims))
    tokens = rows // qhead_per_khead if total_q is None else total_q
    shape = (*batch, heads, qhead_per_khead, tokens)
    return (
        _result(acc, (*shape, head_dim), out_dtype, spec),
        _result(acc, shape, np.dtype(np.float32), spec),
    )


def _combine_abstract(
    out_partial: Any, lse_partial: Any, *, num_batch_dims: int, out_dtype: Any, **_: Any
) -> tuple[Any, Any]:
    batch, spec = _leading((out_partial, lse_partial), num_batch_dims)
    heads, _, tokens, head_dim = out_partial.shape[num_batch_dims:]
    spec.append(_sharded_over(out_partial, num_batch_dims))
    shape = (*batch, heads, tokens)
    return (
        _result(out_partial, (*shape, head_dim), out_dtype, spec),
        _result(out_partial, shape, np.dtype(np.float32), spec),
    )


def _over_leading(function: Callable, num_batch_dims: int, *operands: jax.Array) -> Any:
    """Map `function` over the leading batch axes; operands of size 1 there are shared."""
    if num_batch_dims == 0:
        return function(*operands)
    shared = [_is_one(x.shape[0]) for x in operands]
    if all(shared):
        shared = [False for _ in operands]
    return jax.vmap(
        functools.partial(_over_leading, function, num_batch_dims - 1),
        in_axes=[None if s else 0 for s in shared],
    )(*(x[0] if s else x for x, s in zip(operands, shared, strict=True)))


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

    return _over_leading(one, num_batch_dims, *operands)


def _combine_reference(*operands: jax.Array, num_batch_dims: int, out_dtype: Any) -> Any:
    """The specification of combine_p: ``reference.combine`` on logical operands."""

    def one(out_partial: jax.Array, lse_partial: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, lse = reference.combine(
            jnp.transpose(out_partial, (1, 2, 0, 3)),
            jnp.moveaxis(lse_partial, 1, 0),
            out_dtype=out_dtype,
        )
        return jnp.moveaxis(out, 1, 0), lse

    return _over_leading(one, num_batch_dims, *operands)


def _batch(
    primitive: Primitive, operands: Sequence[jax.Array], dims: Sequence[int | None], **params: Any
) -> tuple[list[jax.Array], list[int]]:
    """Put the mapped axis in front; an operand without it gets size 1 there and is not copied."""
    operands = [
        jnp.expand_dims(x, 0) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    ]
    params["num_batch_dims"] += 1
    results = primitive.bind(*match_varying(operands), **params)
    return results, [0] * len(results)


def _layout(form: _Form, ndim: int) -> tuple[int, ...]:
    """Minor-to-major layout of an array of the given form."""
    leading = ndim - len(form.logical)
    order = [*range(leading), *(leading + form.logical.index(axis) for axis in form.memory)]
    return tuple(reversed(order))


def _sharding_rule(
    forms: Sequence[_Form], shapes: Sequence[Sequence[int]], num_operands: int
) -> str:
    """Shardy's rule: which axes of operands and results are one factor of the computation."""
    factors: dict[int | str, str] = {}  # in order of appearance, as the syntax wants it
    sizes, arrays = [], []
    for form, shape in zip(forms, shapes, strict=True):
        axes = [*range(len(shape) - len(form.logical)), *form.logical]
        for axis, size in zip(axes, shape, strict=True):
            if axis not in factors:
                count = len(factors) - len(_FACTORS)
                factors[axis] = _FACTORS[count] if count < 0 else f"z_{count + 1}"
                sizes.append(f"{factors[axis]}={size}")
        arrays.append(f"[{', '.join(factors[axis] for axis in axes)}]")
    replicated = [
        factor
        for axis, factor in factors.items()
        if isinstance(axis, str) and axis not in _SHARDABLE
    ]
    return (
        f"#sdy.op_sharding_rule<({', '.join(arrays[:num_operands])})"
        f"->({', '.join(arrays[num_operands:])}) {{{', '.join(sizes)}}} "
        f"need_replication={{{', '.join(replicated)}}}, custom>"
    )


def _may_be_partitioned(ctx: Any) -> bool:
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.ShardingContext):
        return context.num_devices > 1
    return bool(set(context.mesh.axis_names) - set(context.manual_axes))


def _broadcast(ctx: Any, operand: Any, aval: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    before, after = (jax.core.ShapedArray(s, aval.dtype) for s in (aval.shape, shape))
    lower = mlir.lower_fun(lambda x: jnp.broadcast_to(x, shape), multiple_results=False)
    (result,) = lower(ctx.replace(avals_in=[before], avals_out=[after]), operand)
    return result, after


def _custom_call(
    ctx: Any,
    operands: Sequence[Any],
    target: str,
    forms: Sequence[_Form],
    num_batch_dims: int,
    attributes: dict[str, int],
) -> Any:
    """Lower to the FFI handler: layouts, attributes, and what the partitioner needs to know."""
    operands, avals_in = list(operands), list(ctx.avals_in)
    leading = ctx.avals_out[0].shape[: num_batch_dims + 1]
    if _may_be_partitioned(ctx):
        # The partitioner shards all operands alike. Where it shards an axis over which an operand
        # is shared, it would pad that operand's size 1: all devices but the first get zeros.
        for i, aval in enumerate(avals_in):
            shape = (*leading, *aval.shape[len(leading) :])
            if aval.shape != shape:
                operands[i], avals_in[i] = _broadcast(ctx, operands[i], aval, shape)
    shapes = [aval.shape for aval in (*avals_in, *ctx.avals_out)]
    layouts = [_layout(form, len(shape)) for form, shape in zip(forms, shapes, strict=True)]
    partitioning = {}
    if all(isinstance(n, int) for shape in shapes for n in shape) and all(
        shape[: len(leading)] == leading for shape in shapes
    ):
        rule = _sharding_rule(forms, shapes, len(operands))
        partitioning = {
            "mhlo.frontend_attributes": mlir.ir_attribute({"num_batch_dims": str(len(leading))}),
            "sdy.sharding_rule": mlir.ir.Attribute.parse(rule),
        }
    lower = jax.ffi.ffi_lowering(
        target,
        operand_layouts=layouts[: len(operands)],
        result_layouts=layouts[len(operands) :],
        extra_attributes=partitioning,
    )
    attributes = {"num_batch_dims": num_batch_dims} | attributes
    return lower(
        ctx.replace(avals_in=avals_in),
        *operands,
        **{name: np.int32(value) for name, value in attributes.items()},
    )


def _too_many_batch_axes(ctx: Any, name: str, implementation: str, num_batch_dims: int) -> bool:
    """Whether the kernel cannot walk the leading axes; neighbours that broadcast alike are one."""
    patterns = [
        tuple(_is_one(aval.shape[axis]) for aval in ctx.avals_in) for axis in range(num_batch_dims)
    ]
    # The last axis is counted on its own: in combine_p the splits lie between it and the others.
    changes = sum(a != b for a, b in itertools.pairwise(patterns[:-1]))
    if changes + 2 <= _native.max_batch_axes:
        return False
    if implementation == "cuda":
        raise NotImplementedError(
            f"jax_fa_epilogue.{name}: implementation='cuda' has no kernel for more than "
            f"{_native.max_batch_axes} nested vmaps that map different operands"
        )
    return True


def _lower_epilogue_cuda(ctx: Any, *operands: Any, implementation: str, **params: Any) -> Any:
    if implementation == "xla" or _too_many_batch_axes(
        ctx, "epilogue", implementation, params["num_batch_dims"]
    ):
        return _lower_reference(_epilogue_reference, ctx, *operands, **params)
    flags = ("normalised", "has_cu_seqlens", "has_seqused", "fp8_permuted_columns")
    forms = [
        _ACC,
        *[_STATISTIC] * (1 if params["normalised"] else 2),
        *[_CU_SEQLENS] * params["has_cu_seqlens"],
        *[_SEQUSED] * params["has_seqused"],
        *_EPILOGUE_RESULTS,
    ]
    return _custom_call(
        ctx,
        operands,
        native.EPILOGUE_TARGET,
        forms,
        params["num_batch_dims"],
        {flag: params[flag] for flag in flags},
    )


def _lower_combine_cuda(ctx: Any, *operands: Any, implementation: str, **params: Any) -> Any:
    if implementation == "xla" or _too_many_batch_axes(
        ctx, "combine", implementation, params["num_batch_dims"]
    ):
        return _lower_reference(_combine_reference, ctx, *operands, **params)
    forms = (*_COMBINE_OPERANDS, *_COMBINE_RESULTS)
    return _custom_call(ctx, operands, native.COMBINE_TARGET, forms, params["num_batch_dims"], {})


def _lower_reference(function: Callable, ctx: Any, *operands: Any, **params: Any) -> Any:
    # Without sharding and varying axes: there is no mesh context here to trace with, and the
    # partitioner needs none.
    plain = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    return mlir.lower_fun(function, multiple_results=True)(
        ctx.replace(avals_in=plain), *operands, **params
    )


def _lower_default(
    name: str, function: Callable, ctx: Any, *operands: Any, implementation: str, **params: Any
) -> Any:
    if implementation == "cuda":
        platforms = ", ".join(ctx.platforms or ctx.module_context.platforms)
        raise NotImplementedError(
            f"jax_fa_epilogue.{name}: implementation='cuda' has no kernel for platform "
            f"{platforms}; use implementation=None to run the XLA reference there"
        )
    return _lower_reference(function, ctx, *operands, **params)


def _define(
    name: str, abstract_eval: Callable, reference_function: Callable, cuda_lowering: Callable
) -> Primitive:
    primitive = Primitive(f"jax_fa_epilogue_{name}")
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(abstract_eval)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    mlir.register_lowering(primitive, functools.partial(_lower_default, name, reference_function))
    mlir.register_lowering(primitive, cuda_lowering, platform="cuda")
    return primitive


def _raise_forward_mode(*_: Any, name: str) -> Any:
    raise NotImplementedError(
        f"jax_fa_epilogue.{name} has no forward-mode derivative (jax.jvp, jax.jacfwd); use "
        "reverse mode (jax.grad, jax.vjp, jax.jacrev) or the functions of jax_fa_epilogue.reference"
    )


def _reverse_only_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, name: str
) -> tuple[jax.Array, Any]:
    (x,), (tangent,) = primals, tangents
    if not isinstance(tangent, ad.Zero):
        tangent = _tangent_p.bind(tangent, name=name)
    return _reverse_only_p.bind(x, name=name), tangent


# Two identities. The tangent of the first is the second, which can be transposed (reverse mode) but
# not evaluated (forward mode): jax.custom_vjp alone would raise an error that names no function.
_reverse_only_p = Primitive("jax_fa_epilogue_reverse_only")
_reverse_only_p.def_impl(lambda x, *, name: x)
_reverse_only_p.def_abstract_eval(lambda x, *, name: x)
ad.primitive_jvps[_reverse_only_p] = _reverse_only_jvp
batching.defvectorized(_reverse_only_p)
mlir.register_lowering(_reverse_only_p, lambda ctx, x, *, name: [x])

_tangent_p = Primitive("jax_fa_epilogue_tangent")
_tangent_p.def_impl(_raise_forward_mode)
_tangent_p.def_abstract_eval(lambda x, *, name: x)
ad.deflinear2(_tangent_p, lambda cotangent, x, *, name: [cotangent])
batching.defvectorized(_tangent_p)
mlir.register_lowering(_tangent_p, _raise_forward_mode)


def reverse_only(name: str, *operands: jax.Array) -> list[jax.Array]:
    """The operands, floating ones with an error for forward-mode derivatives that names `name`."""
    return [
        _reverse_only_p.bind(x, name=name) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for x in operands
    ]


epilogue_p = _define("epilogue", _epilogue_abstract, _epilogue_reference, _lower_epilogue_cuda)
combine_p = _define("combine", _combine_abstract, _combine_reference, _lower_combine_cuda)
