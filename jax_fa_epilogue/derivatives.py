"""The operations with their derivatives: ``jax.custom_vjp`` around the primitives.

Between the public functions and the primitives: operands are brought into the primitives' logical
forms by reshapes and transposes that change nothing in memory, and back. Attention has a kernel for
the backward pass too; that of the epilogue, of combine and of partial results is the reference's.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_fa_epilogue import heads, plans, primitives, problem, reference
from jax_fa_epilogue.primitives_backward import backward_p
from jax_fa_epilogue.primitives_epilogue import combine_p, epilogue_operands, epilogue_p
from jax_fa_epilogue.primitives_forward import forward_p, operand_names
from jax_fa_epilogue.varying import match_varying

# A call outside jax.jit is one program as well, in which reshapes and transposes cost nothing.
_as_one_program = functools.partial(jax.jit, inline=True)


def ready(name: str, operands: list[jax.Array]) -> list[jax.Array]:
    """Operands as the operations want them: varying alike, and saying `name` in forward mode."""
    return primitives.reverse_only(name, *match_varying(operands))


# ---- Epilogue -----------------------------------------------------------------------------------


def epilogue_reference(facts: problem.EpilogueProblem, *operands: jax.Array) -> Any:
    """``reference.epilogue`` on the operands that are there, in the primitive's order."""
    named = epilogue_operands(
        operands,
        normalised=facts.normalised,
        has_cu_seqlens=facts.has_cu_seqlens,
        has_seqused=facts.has_seqused,
    )
    return reference.epilogue(
        **named,
        out_dtype=facts.out_dtype,
        qhead_per_khead=facts.qhead_per_khead,
        total_q=facts.total_q,
        fp8_permuted_columns=facts.fp8_permuted_columns,
    )


@functools.partial(_as_one_program, static_argnums=(0, 1))
def _bind_epilogue(
    facts: problem.EpilogueProblem, implementation: str, *operands: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Bind epilogue_p on its logical forms; memory order stays as it is."""
    splits = 0 if facts.num_splits is None else 1
    num_floats = 2 if facts.normalised else 3
    floats, descriptors = operands[:num_floats], operands[num_floats:]
    if facts.has_cu_seqlens:  # (N, S, H, ...) -> (N, H, S, ...)
        num_batch_dims = splits
        floats = [jnp.swapaxes(x, splits, splits + 1) for x in floats]
        descriptors = [x[None] for x in descriptors]
    else:  # (N, B, H, ...) -> (N, B, H, 1, ...)
        num_batch_dims = splits + 1
        floats = [jnp.expand_dims(x, num_batch_dims + 1) for x in floats]
        descriptors = [x[:, None, None] for x in descriptors]
    if splits:
        descriptors = [x[None] for x in descriptors]
    out, lse = epilogue_p.bind(
        *floats,
        *descriptors,
        num_batch_dims=num_batch_dims,
        qhead_per_khead=facts.qhead_per_khead,
        total_q=facts.total_q,
        out_dtype=facts.out_dtype,
        normalised=facts.normalised,
        has_cu_seqlens=facts.has_cu_seqlens,
        has_seqused=facts.has_seqused,
        fp8_permuted_columns=facts.fp8_permuted_columns,
        implementation=implementation,
        caller="epilogue",
    )
    # (*b, Hk, G, T, D) -> (*b, T, Hk, G, D) -> (*b, T, H, D), and (*b, Hk, G, T) -> (*b, H, T)
    out = jnp.moveaxis(out, num_batch_dims + 2, num_batch_dims)
    return heads.merge(out, num_batch_dims + 1), heads.merge(lse, num_batch_dims)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def epilogue(facts: problem.EpilogueProblem, implementation: str, *operands: jax.Array) -> Any:
    """``epilogue`` on the operands that are there, in the primitive's order."""
    return _bind_epilogue(facts, implementation, *operands)


def _epilogue_forward(
    facts: problem.EpilogueProblem, implementation: str, *operands: jax.Array
) -> Any:
    # Itself, not the primitive: it may be differentiated once more.
    return epilogue(facts, implementation, *operands), operands


def _epilogue_backward(
    facts: problem.EpilogueProblem, implementation: str, operands: Any, cotangents: Any
) -> tuple[Any, ...]:
    num_floats = 2 if facts.normalised else 3
    floats, descriptors = operands[:num_floats], operands[num_floats:]
    _, vjp = jax.vjp(lambda *floats: epilogue_reference(facts, *floats, *descriptors), *floats)
    return (*vjp(cotangents), *(None for _ in descriptors))


epilogue.defvjp(_epilogue_forward, _epilogue_backward)


# ---- Combine ------------------------------------------------------------------------------------


@functools.partial(_as_one_program, static_argnums=(0, 1, 2))
def _bind_combine(
    facts: problem.CombineProblem,
    implementation: str,
    caller: str,
    out_partial: jax.Array,
    lse_partial: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Bind combine_p on its logical forms; memory order stays as it is."""
    if facts.batch is None:
        out_partial, lse_partial = out_partial[:, None], lse_partial[:, None]
    # (N, B, T, H, D) -> (B, H, N, T, D), and (N, B, H, T) -> (B, H, N, T)
    out, lse = combine_p.bind(
        jnp.transpose(out_partial, (1, 3, 0, 2, 4)),
        jnp.transpose(lse_partial, (1, 2, 0, 3)),
        num_batch_dims=1,
        out_dtype=facts.out_dtype,
        implementation=implementation,
        caller=caller,
    )
    out = jnp.swapaxes(out, 1, 2)
    return (out[0], lse[0]) if facts.batch is None else (out, lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def combine(facts: problem.CombineProblem, implementation: str, *operands: jax.Array) -> Any:
    """``combine``."""
    return _bind_combine(facts, implementation, "combine", *operands)


def _combine_forward(
    facts: problem.CombineProblem, implementation: str, *operands: jax.Array
) -> Any:
    # Itself, not the primitive: it may be differentiated once more.
    return combine(facts, implementation, *operands), operands


def _combine_backward(
    facts: problem.CombineProblem, implementation: str, operands: Any, cotangents: Any
) -> tuple[Any, ...]:
    _, vjp = jax.vjp(
        lambda *operands: reference.combine(*operands, out_dtype=facts.out_dtype), *operands
    )
    return vjp(cotangents)


combine.defvjp(_combine_forward, _combine_backward)


# ---- Attention ----------------------------------------------------------------------------------


@functools.partial(_as_one_program, static_argnums=(0, 1))
def _bind_forward(
    facts: problem.AttentionProblem, launch: plans.Launch, *operands: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Bind forward_p on its logical forms; memory order stays as it is.

    Returns out (*b, Sq, Hq, Dv) and lse (*b, Hq, Sq), with a split axis in front for partial ones.
    """
    q, k, v, *descriptors = operands
    q, k, v = heads.split_queries(facts, q), heads.split_keys(k), heads.split_keys(v)
    descriptors = [x[..., None, :] if facts.varlen else x[:, None, None] for x in descriptors]
    # Partial results need a batch axis.
    extra = facts.varlen and launch.num_splits > 0
    if extra:
        q, k, v, *descriptors = (x[None] for x in (q, k, v, *descriptors))
    out, lse = forward_p.bind(
        q,
        k,
        v,
        *descriptors,
        num_batch_dims=0 if facts.varlen and not extra else 1,
        num_splits=launch.num_splits,
        max_seqlen_q=facts.seqlen_q if facts.varlen else None,
        max_seqlen_k=facts.seqlen_k if facts.varlen else None,
        softmax_scale=facts.softmax_scale,
        softcap=facts.softcap,
        window_left=facts.window_left,
        window_right=facts.window_right,
        top_left=facts.top_left,
        pack_gqa=facts.pack_gqa,
        has_cu_seqlens=facts.varlen,
        has_seqused_q=facts.has_seqused_q,
        has_seqused_k=facts.has_seqused_k,
        workspace_size=launch.workspace_size,
        implementation=launch.implementation,
        caller=launch.caller,
    )
    if launch.num_splits:  # (B, Hk, P, ...) -> (P, B, Hk, ...)
        out, lse = jnp.moveaxis(out, 2, 0), jnp.moveaxis(lse, 2, 0)
    out, lse = heads.merge_queries(out), heads.merge_lse(lse)
    return (out[:, 0], lse[:, 0]) if extra else (out, lse)


@functools.partial(_as_one_program, static_argnums=(0, 1))
def _attend(
    facts: problem.AttentionProblem, launch: plans.Launch, *operands: jax.Array
) -> tuple[jax.Array, jax.Array]:
    out, lse = _bind_forward(facts, launch, *operands)
    if not launch.num_splits:
        return out, lse
    merging = plans.merging(facts, launch.num_splits)
    return _bind_combine(merging, launch.merge_implementation, launch.caller, out, lse)


def _named(facts: problem.AttentionProblem, operands: Any) -> tuple[Any, ...]:
    """Operands in the primitive's order as q, k, v and a dictionary of the descriptors."""
    names = operand_names(
        has_cu_seqlens=facts.varlen,
        has_seqused_q=facts.has_seqused_q,
        has_seqused_k=facts.has_seqused_k,
    )
    return *operands[:3], dict(zip(names[3:], operands[3:], strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attention(
    facts: problem.AttentionProblem, launch: plans.Launch, *operands: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention, dense or packed, on the operands that are there, in the primitive's order.

    Returns out (*b, Sq, Hq, Dv) and lse (*b, Hq, Sq).
    """
    return _attend(facts, launch, *operands)


def _attention_forward(
    facts: problem.AttentionProblem, launch: plans.Launch, *operands: jax.Array
) -> tuple[Any, Any]:
    # Not `attention` itself: under jax.checkpoint its kernel would run once more.
    out, lse = _attend(facts, launch, *operands)
    out = checkpoint_name(out, "flash_attention_out")
    lse = checkpoint_name(lse, "flash_attention_lse")
    return (out, lse), (operands, out, lse)


def _honest(
    facts: problem.AttentionProblem, descriptors: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Offsets and lengths of packed sequences, in the primitive's order, true for any input."""
    cu_seqlens, seqused = {}, {}
    for side, total, longest in (
        ("q", facts.total_q, facts.seqlen_q),
        ("k", facts.total_k, facts.seqlen_k),
    ):
        given = (descriptors.get(f"{name}_{side}") for name in ("cu_seqlens", "seqused"))
        cu_seqlens[f"cu_seqlens_{side}"], seqused[f"seqused_{side}"] = reference.honest_descriptors(
            *given, total, longest
        )
    return cu_seqlens | seqused


@functools.partial(_as_one_program, static_argnums=(0, 1))
def _bind_backward(
    facts: problem.AttentionProblem, launch: plans.BackwardLaunch, *operands: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Bind backward_p on its logical forms; memory order stays as it is.

    `operands` are q, k, v, out, lse and the cotangents of out and lse, then the descriptors.
    Returns dq, dk, dv, shaped as q, k, v.
    """
    q, k, v, out, lse, dout, dlse, *given = operands
    *_, descriptors = _named(facts, (q, k, v, *given))
    if facts.varlen:
        # Sequences that overlap would share rows of the workspace, so that nothing is left to the
        # kernels to find out; the longest sequence is not known to them either.
        descriptors = _honest(facts, descriptors)
    gradients = backward_p.bind(
        heads.split_queries(facts, q),
        heads.split_keys(k),
        heads.split_keys(v),
        heads.split_queries(facts, out),
        heads.split_lse(facts, lse),
        heads.split_queries(facts, dout),
        heads.split_lse(facts, dlse),
        *(x[..., None, :] if facts.varlen else x[:, None, None] for x in descriptors.values()),
        num_batch_dims=0 if facts.varlen else 1,
        softmax_scale=facts.softmax_scale,
        softcap=facts.softcap,
        window_left=facts.window_left,
        window_right=facts.window_right,
        top_left=facts.top_left,
        has_cu_seqlens=facts.varlen,
        has_seqused_q="seqused_q" in descriptors,
        has_seqused_k="seqused_k" in descriptors,
        deterministic=facts.deterministic,
        **dataclasses.asdict(launch),
    )
    dq, dk, dv = gradients
    return heads.merge_queries(dq), heads.split_keys(dk), heads.split_keys(dv)


def attention_results(
    facts: problem.AttentionProblem, launch: plans.Launch | None, operands: Any
) -> tuple[jax.Array, jax.Array]:
    """Return `attention` for callers with a derivative of their own; None is the reference."""
    if launch is None:
        return reference.attend(facts, *_named(facts, operands))
    return _attend(facts, launch, *operands)


def attention_gradients(
    facts: problem.AttentionProblem,
    launch: plans.Launch | None,
    operands: Any,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return dq, dk, dv of an attention call with the results out and lse.

    `operands` are those of `attention`, and `launch` is its, or None for the reference. The results
    may be those over more keys than the operands hold: then the gradients are the operands' part.
    """
    q, k, v, descriptors = _named(facts, operands)
    backward = launch and plans.launch_backward(launch, facts)
    # A result that the loss does not use has a cotangent of zeros, an array like any other: that of
    # lse is small, and a loss without out is rare.
    if backward is None:
        return reference.attend_backward(facts, q, k, v, descriptors, out, lse, dout, dlse)
    arrays = match_varying((q, k, v, out, lse, dout, dlse, *descriptors.values()))
    return _bind_backward(facts, backward, *arrays)


def _attention_backward(
    facts: problem.AttentionProblem, launch: plans.Launch, residuals: Any, cotangents: Any
) -> tuple[Any, ...]:
    operands, out, lse = residuals
    gradients = attention_gradients(facts, launch, operands, out, lse, *cotangents)
    return (*gradients, *(None for _ in operands[3:]))


attention.defvjp(_attention_forward, _attention_backward)


# ---- Partial attention --------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def partials(
    facts: problem.AttentionProblem, launch: plans.Launch, *operands: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Partial results, out (P, B, Sq, Hq, Dv) and lse (P, B, Hq, Sq), in float32."""
    return _bind_forward(facts, launch, *operands)


def _partials_forward(
    facts: problem.AttentionProblem, launch: plans.Launch, *operands: jax.Array
) -> tuple[Any, Any]:
    operands = primitives.first_order(launch.caller, *operands)
    # The cotangents belong to certain parts of the keys, and only the reference says which.
    return reference.attend_partially(facts, *_named(facts, operands)), operands


def _partials_backward(
    facts: problem.AttentionProblem, launch: plans.Launch, operands: Any, cotangents: Any
) -> tuple[Any, ...]:
    q, k, v, descriptors = _named(facts, operands)
    _, vjp = jax.vjp(lambda *x: reference.attend_partially(facts, *x, descriptors), q, k, v)
    return (*vjp(cotangents), *(None for _ in descriptors))


partials.defvjp(_partials_forward, _partials_backward)
