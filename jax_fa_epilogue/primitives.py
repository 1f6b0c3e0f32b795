"""What the JAX primitives behind the CUDA kernels have in common; how to define one.

Each primitive works on *logical* arrays whose leading axes are batch-like, so that vmap and the
partitioner can treat them alike; where the data lies in memory is said by the layouts of the custom
call, so that no transpose is left. ``*b`` is any number of leading batch axes. In each operand,
each of them has the full size, or size 1 where the operand does not depend on it (the kernel then
reads with stride 0); results have the full size.

    primitives_forward.py   forward_p
    primitives_backward.py  backward_p
    primitives_epilogue.py  epilogue_p, combine_p

The parameter `implementation` is "xla" (the reference on every platform), "auto" (the kernel on
CUDA, the reference elsewhere) or "cuda" (the kernel on CUDA, an error elsewhere); `caller` is the
public function, which errors name.
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

from jax_fa_epilogue import _native
from jax_fa_epilogue.varying import match_varying


class Form(NamedTuple):
    """Axes of one operand or result after the leading ones, a letter each."""

    logical: str
    memory: str  # the same letters, major to minor


# The partitioner may shard "b", "h" and the leading axes; all else is replicated. Where partial
# results are involved, the last *b axis is written as "b", because it lies inside the splits in
# memory.
_SHARDABLE = "bh"
_FACTORS = "ijklmnopqrstuvwxyz"  # symbols in the syntax of sharding rules, then z_1, z_2, ...


def is_one(size: Any) -> bool:
    """Whether an axis has size 1; a symbolic one has not."""
    return isinstance(size, int) and size == 1


def sharded_over(aval: Any, axis: int) -> Any:
    """Mesh axes over which an axis is sharded in explicit mode."""
    return aval.sharding.spec[axis] if aval.sharding.spec else None


def leading_axes(operands: Sequence[Any], num_batch_dims: int) -> tuple[list[Any], list[Any]]:
    """Full sizes of the leading batch axes and the mesh axes they are sharded over."""
    sizes, spec = [], []
    for axis in range(num_batch_dims):
        full = next((x for x in operands if not is_one(x.shape[axis])), operands[0])
        if any(x.shape[axis] not in (1, full.shape[axis]) for x in operands):
            shapes = ", ".join(str(x.shape) for x in operands)
            raise ValueError(f"leading axis {axis} of the operands {shapes} is neither 1 nor equal")
        sizes.append(full.shape[axis])
        spec.append(sharded_over(full, axis))
    return sizes, spec


def result_aval(like: Any, sizes: Sequence[Any], dtype: Any, spec: Sequence[Any]) -> Any:
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


def over_leading(function: Callable, num_batch_dims: int, *operands: jax.Array) -> Any:
    """Map `function` over the leading batch axes; operands of size 1 there are shared."""
    if num_batch_dims == 0:
        return function(*operands)
    shared = [is_one(x.shape[0]) for x in operands]
    if all(shared):
        shared = [False for _ in operands]
    return jax.vmap(
        functools.partial(over_leading, function, num_batch_dims - 1),
        in_axes=[None if s else 0 for s in shared],
    )(*(x[0] if s else x for x, s in zip(operands, shared, strict=True)))


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


def _layout(form: Form, ndim: int) -> tuple[int, ...]:
    """Minor-to-major layout of an array of the given form."""
    leading = ndim - len(form.logical)
    order = [*range(leading), *(leading + form.logical.index(axis) for axis in form.memory)]
    return tuple(reversed(order))


def _sharding_rule(
    forms: Sequence[Form], shapes: Sequence[Sequence[int]], num_operands: int
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


def custom_call(
    ctx: Any,
    operands: Sequence[Any],
    target: str,
    forms: Sequence[Form],
    num_batch_dims: int,
    attributes: dict[str, int | float],
    workspace: Sequence[Any] = (),
) -> Any:
    """Lower to the FFI handler: layouts, attributes, and what the partitioner needs to know.

    Args:
      ctx: the lowering rule's context.
      operands: the values, in the order of ``ctx.avals_in``.
      target: name of the handler.
      forms: of all operands, results and workspaces.
      num_batch_dims: number of ``*b`` axes.
      attributes: further attributes of the handler; float is float32, all else int32.
      workspace: abstract values of further results of the handler, which are dropped.
    """
    operands, avals_in = list(operands), list(ctx.avals_in)
    avals_out = [*ctx.avals_out, *workspace]
    leading = ctx.avals_out[0].shape[: num_batch_dims + 1]
    if _may_be_partitioned(ctx):
        # The partitioner shards all operands alike. Where it shards an axis over which an operand
        # is shared, it would pad that operand's size 1: all devices but the first get zeros.
        for i, aval in enumerate(avals_in):
            shape = (*leading, *aval.shape[len(leading) :])
            if aval.shape != shape:
                operands[i], avals_in[i] = _broadcast(ctx, operands[i], aval, shape)
    shapes = [aval.shape for aval in (*avals_in, *avals_out)]
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
    results = lower(
        ctx.replace(avals_in=avals_in, avals_out=avals_out),
        *operands,
        **{
            name: np.float32(value) if isinstance(value, float) else np.int32(value)
            for name, value in attributes.items()
        },
    )
    return results[: len(ctx.avals_out)]


def too_many_batch_axes(ctx: Any, caller: str, implementation: str, num_batch_dims: int) -> bool:
    """Whether the kernel cannot walk the leading axes; neighbours that broadcast alike are one."""
    patterns = [
        tuple(is_one(aval.shape[axis]) for aval in ctx.avals_in) for axis in range(num_batch_dims)
    ]
    # The last axis is counted on its own: splits may lie between it and the others.
    changes = sum(a != b for a, b in itertools.pairwise(patterns[:-1]))
    if changes + 2 <= _native.max_batch_axes:
        return False
    if implementation == "cuda":
        raise NotImplementedError(
            f"jax_fa_epilogue.{caller}: implementation='cuda' has no kernel for more than "
            f"{_native.max_batch_axes} nested vmaps that map different operands"
        )
    return True


def lower_reference(function: Callable, ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lower to `function`, the specification of a primitive."""
    # Without sharding and varying axes: there is no mesh context here to trace with, and the
    # partitioner needs none.
    plain = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    return mlir.lower_fun(function, multiple_results=True)(
        ctx.replace(avals_in=plain), *operands, **params
    )


def _lower_default(
    function: Callable, ctx: Any, *operands: Any, implementation: str, caller: str, **params: Any
) -> Any:
    if implementation == "cuda":
        platforms = ", ".join(ctx.platforms or ctx.module_context.platforms)
        raise NotImplementedError(
            f"jax_fa_epilogue.{caller}: implementation='cuda' has no kernel for platform "
            f"{platforms}; use implementation=None to run the XLA reference there"
        )
    return lower_reference(function, ctx, *operands, **params)


def define(
    name: str,
    abstract_eval: Callable,
    reference_function: Callable,
    cuda_lowering: Callable,
) -> Primitive:
    """Define a primitive with all its rules.

    `reference_function` is its specification, which runs on all platforms but CUDA; there
    `cuda_lowering` decides.
    """
    primitive = Primitive(f"jax_fa_epilogue_{name}")
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(abstract_eval)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    # Reached only where the forward rule of the custom_vjp around it is itself differentiated.
    ad.primitive_jvps[primitive] = _raise_second_derivative
    mlir.register_lowering(primitive, functools.partial(_lower_default, reference_function))
    mlir.register_lowering(primitive, cuda_lowering, platform="cuda")
    return primitive


def _raise_second_derivative(*_: Any, caller: str, **__: Any) -> Any:
    raise NotImplementedError(f"jax_fa_epilogue.{caller} has no second derivative")


def _raise_forward_mode(*_: Any, name: str) -> Any:
    raise NotImplementedError(
        f"jax_fa_epilogue.{name} has no forward-mode derivative (jax.jvp, jax.jacfwd); use "
        "reverse mode (jax.grad, jax.vjp, jax.jacrev)"
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


_first_order_p = Primitive("jax_fa_epilogue_first_order")
_first_order_p.def_impl(lambda x, *, caller: x)
_first_order_p.def_abstract_eval(lambda x, *, caller: x)
ad.primitive_jvps[_first_order_p] = _raise_second_derivative
batching.defvectorized(_first_order_p)
mlir.register_lowering(_first_order_p, lambda ctx, x, *, caller: [x])


def first_order(caller: str, *operands: jax.Array) -> list[jax.Array]:
    """The operands of a forward rule whose backward rule has no derivative: one raises an error."""
    return [_first_order_p.bind(x, caller=caller) for x in operands]
