"""Attention whose sequence is spread over devices, for use inside ``jax.shard_map``.

``ring_attention``: every device holds a block of the sequence; the blocks of keys and values go
around a ring, and what each device has seen of them is merged by log-sum-exp (LSE).

    step      0          1          2          3        causal, contiguous
    device 0  k0 half    k3 -       k2 -       k1 -     half: the triangle within the block
    device 1  k1 half    k0 all     k3 -       k2 -     -:    later keys, seen by no query
    device 2  k2 half    k1 all     k0 all     k3 -
    device 3  k3 half    k2 all     k1 all     k0 all

In each step a device passes on the block that it is about to use, so that the transfer and the
attention kernel run at the same time. With a causal mask the devices wait for the last one. In the
zigzag layout device i of P holds the chunks i and 2P-1-i of 2P, and all have the same work: of the
blocks of earlier devices all queries see the first chunk, those of later devices are seen in full
by the queries of the second chunk. Which of the two it is differs between devices, and is told to
the kernel by the numbers of used queries and keys: nothing branches.

The backward pass sends the blocks around once more, together with their gradients. Each step's part
of the gradients is that of plain attention with the results over all keys, so that a device keeps
no more than its own operands and results.

``decode_sharded``: a few queries, known to all devices, against a cache of which each device holds
a block of the sequence; each attends to its own block, and the results are merged over the devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jax_fa_epilogue import api, derivatives, plans, primitives, problem
from jax_fa_epilogue import static_arguments as static
from jax_fa_epilogue.varying import match_varying

AxisName = Hashable | tuple[Hashable, ...]
_LAYOUTS = ("contiguous", "zigzag")


def ring_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    axis_name: AxisName,
    causal: bool = False,
    layout: Literal["contiguous", "zigzag"] = "contiguous",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    implementation: api.Implementation = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention over a sequence that is spread over the devices of a mesh axis.

    To be called inside ``jax.shard_map``; shapes are those on one device, where P devices along
    `axis_name` hold P times as many tokens together. The only communication is a collective permute
    of k and v, and of their gradients.

    Args:
      q: ``(B, Sq, Hq, D)`` bfloat16, float16 or float32; D and Dv multiples of 8 up to 256.
      k: ``(B, Sk, Hk, D)``, dtype of q.
      v: ``(B, Sk, Hk, Dv)``, dtype of q.
      axis_name: mesh axis over which the sequence is spread, in its order; or a tuple of axes, in
        the mesh's order.
      causal: mask later keys; Sq and Sk have to be equal.
      layout: which tokens a device holds, for `causal`. "contiguous": the i-th block. "zigzag": the
        chunks i and 2P-1-i of 2P, in this order, as `to_zigzag` arranges a sequence; this
        takes about half the time. Without `causal` any arrangement gives the same.
      softmax_scale: factor on ``q.k``; None is ``1 / sqrt(D)``.
      softcap: c > 0 replaces a logit x by ``c * tanh(x / c)``; 0 is none.
      deterministic: gradients that are bitwise equal from run to run.
      return_lse: return ``(out, lse)``; gradients flow through both.
      implementation: None, "cuda" or "xla", as for `flash_attention`.

    Returns:
      out ``(B, Sq, Hq, Dv)`` of q's dtype and, on request, lse float32 ``(B, Hq, Sq)``: the local
      part of what `flash_attention` returns for the whole sequence. Merged in float32. For the
      backward pass a device keeps its own q, k, v, out and lse, the last two under the names
      ``"flash_attention_out"`` and ``"flash_attention_lse"`` (``jax.checkpoint``).

    Raises:
      ValueError: wrong shapes or keywords, `axis_name` that is not there, Sq != Sk with `causal`, a
        local length that is odd in the zigzag layout.
      TypeError: wrong dtypes or kinds of arguments.
      NotImplementedError: as for `flash_attention`.

    The method is Ring Attention (Liu et al., 2023), with the chunks of a device chosen as in the
    context parallelism of Llama 3 (Grattafiori et al., 2024).
    """
    problem.check_implementation(implementation)
    facts = problem.flash_attention(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(-1, -1),
        softcap=softcap,
        seqused_q=None,
        seqused_k=None,
        num_splits=0,
        pack_gqa=None,
        deterministic=deterministic,
        return_lse=return_lse,
    )
    if layout not in _LAYOUTS:
        raise ValueError(f"layout={layout!r}; allowed are 'contiguous' and 'zigzag'")
    axis_name = tuple(axis_name) if isinstance(axis_name, list) else axis_name
    size = _axis_size(axis_name)
    if causal and facts.seqlen_q != facts.seqlen_k:
        raise ValueError(
            f"causal=True with {facts.seqlen_q} queries and {facts.seqlen_k} keys on a device; "
            "the numbers must be equal"
        )
    zigzag = causal and layout == "zigzag" and size > 1
    if zigzag and isinstance(facts.seqlen_q, int) and facts.seqlen_q % 2:
        raise ValueError(
            f"layout='zigzag' with {facts.seqlen_q} tokens on a device; it holds two chunks of "
            "equal length"
        )
    others = facts
    if causal:
        others = dataclasses.replace(
            facts, window_right=-1, has_seqused_q=zigzag, has_seqused_k=True
        )
    own, others = (_call(implementation, x) for x in (facts, others))
    ring = _Ring(axis_name, size, own, others if size > 1 else own, zigzag)
    # The index makes all vary over the ring's axes, also where the caller's arrays do not.
    *operands, _ = derivatives.ready(
        "ring_attention", [*map(jnp.asarray, (q, k, v)), lax.axis_index(axis_name)]
    )
    out, lse = _ring_attention(ring, *operands)
    return (out, lse) if return_lse else out


def to_zigzag(x: ArrayLike, num_shards: int, axis: int = 1) -> jax.Array:
    """Arrange a whole sequence so that its blocks are those of `ring_attention`'s zigzag layout.

    Everything that depends on a token's position (embedded positions, labels, masks) has to be
    arranged alike.

    Args:
      x: an array with 2P chunks of equal length along `axis`.
      num_shards: P, devices over which the sequence is spread.
      axis: of the tokens; 2 for lse.

    Returns:
      x with the chunks in the order 0, 2P-1, 1, 2P-2, ..., P-1, P.

    Raises:
      ValueError: P below 1, no such axis, or 2P does not divide the length.
      TypeError: P or the axis is no static int.
    """
    x = jnp.asarray(x)
    chunks = _chunks(x, num_shards, axis)
    first, second = jnp.split(chunks, 2)
    return _joined(jnp.stack([first, jnp.flip(second, 0)], axis=1), x, axis)


def from_zigzag(x: ArrayLike, num_shards: int, axis: int = 1) -> jax.Array:
    """Undo `to_zigzag`; the arguments and errors are its."""
    x = jnp.asarray(x)
    chunks = _chunks(x, num_shards, axis)
    return _joined(jnp.concatenate([chunks[::2], jnp.flip(chunks[1::2], 0)]), x, axis)


def decode_sharded(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    *,
    axis_name: AxisName,
    lengths: ArrayLike,
    causal: bool = True,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    num_splits: int = 0,
    return_lse: bool = False,
    implementation: api.Implementation = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attend to a KV cache of which each device of a mesh axis holds a block of the sequence.

    To be called inside ``jax.shard_map``. Each device attends to its block, then the results,
    small as they are, are merged by two all-reduces. The cache stays where it is.

    Args:
      q: ``(B, Sq, Hq, D)``, the same on all devices of `axis_name`: the last Sq tokens of each
        sequence. With `causal` each of several queries reads the cache for itself, so that this is
        for a few.
      k_cache: ``(B, C, Hk, D)``: the tokens i*C to (i+1)*C - 1 on the i-th device.
      v_cache: ``(B, C, Hk, Dv)``, likewise.
      axis_name: mesh axis (or a tuple of them) over which the cache is spread.
      lengths: int32 or int64 ``(B,)``, tokens of each sequence in the whole cache, those of q
        included; the same on all devices. Later ones have no influence even when they are NaN. What
        does not fit the cache counts as 0 or as all of it.
      causal: query t sees the keys up to its own position, ``lengths - Sq + t``; otherwise all.
      softmax_scale: factor on ``q.k``; None is ``1 / sqrt(D)``.
      softcap: c > 0 replaces a logit x by ``c * tanh(x / c)``; 0 is none.
      num_splits: parts into which each device cuts its keys; 0 lets the plan choose.
      return_lse: return ``(out, lse)``; gradients flow through both.
      implementation: None, "cuda" or "xla", as for `flash_attention`.

    Returns:
      out ``(B, Sq, Hq, Dv)`` of q's dtype and, on request, lse float32 ``(B, Hq, Sq)``, the same on
      all devices of `axis_name`.

    Raises:
      ValueError: wrong shapes or keywords, `axis_name` that is not there.
      TypeError: wrong dtypes or kinds of arguments.
      NotImplementedError: as for `flash_attention`.

    This is Flash-Decoding (Dao et al., 2023) with the devices as the splits.
    """
    size = _axis_size(axis_name)
    q, k, v = map(jnp.asarray, (q, k_cache, v_cache))
    problem.check_descriptor("lengths", lengths, q.shape[0])
    capacity = k.shape[1] if k.ndim > 1 else 0
    seqlen_q = q.shape[1] if q.ndim > 1 else 1
    attend = functools.partial(
        api.flash_attention,
        softmax_scale=softmax_scale,
        softcap=softcap,
        num_splits=num_splits,
        return_lse=True,
        implementation=implementation,
    )
    first = lax.axis_index(axis_name) * capacity
    lengths = jnp.clip(jnp.asarray(lengths), 0, size * capacity).astype(jnp.int32)
    if static.flag("causal", causal) and not (isinstance(seqlen_q, int) and seqlen_q == 1):
        # The mask of `flash_attention` is aligned with the last key, which the device may not have.
        seen = lengths[:, None] - jnp.arange(seqlen_q - 1, -1, -1, dtype=jnp.int32)

        def one_query(q: jax.Array, used: jax.Array) -> tuple[jax.Array, jax.Array]:
            out, lse = attend(q[:, None], k, v, seqused_k=used)
            return out[:, 0], lse[..., 0]

        used = jnp.clip(seen - first, 0, capacity)
        out, lse = jax.vmap(one_query, in_axes=(1, 1), out_axes=(1, 2))(q, used)
    else:
        out, lse = attend(q, k, v, seqused_k=jnp.clip(lengths - first, 0, capacity))
    out, lse = _merge_devices(axis_name, out, lse)
    out = out.astype(q.dtype)
    return (out, lse) if static.flag("return_lse", return_lse) else out


# ---- The ring -----------------------------------------------------------------------------------


class _Call(NamedTuple):
    """A call of attention within the ring; what `derivatives` wants to know."""

    facts: problem.AttentionProblem
    launch: plans.Launch | None


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Static facts of a call."""

    axis_name: AxisName
    size: int
    own: _Call  # a device's queries and its own keys
    others: _Call  # a device's queries and another one's keys
    zigzag: bool

    def is_alone(self, q: jax.Array, k: jax.Array) -> bool:
        """Whether a device's own queries and keys are all that there is."""
        return self.size == 1 or 0 in (*q.shape, *k.shape)

    def permute(self, tree: Any) -> Any:
        """Send the arrays of a tree to the next device."""
        to_next = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, to_next), tree)

    def swap(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """Exchange the chunks of the zigzag layout, which undoes itself.

        The queries that see keys of other devices come first then, as lengths can say it.
        """
        return jnp.roll(x, x.shape[axis] // 2, axis) if self.zigzag else x

    def lengths(self, step: jax.Array | int) -> tuple[jax.Array, ...]:
        """Used queries (zigzag only) and keys in a step, int32 (1,), where others' facts have them.

        In step s a device has the keys of the one s before it, or past the ring's beginning those
        of a later one.
        """
        if not self.others.facts.has_seqused_k:
            return ()
        full = self.own.facts.seqlen_q
        earlier, later = ((full,), (0,))
        if self.zigzag:
            earlier, later = (full, full // 2), (full // 2, full)
        is_earlier = lax.axis_index(self.axis_name) >= step
        return tuple(
            jnp.where(is_earlier, a, b).astype(jnp.int32)[None]
            for a, b in zip(earlier, later, strict=True)
        )


def _call(implementation: api.Implementation, facts: problem.AttentionProblem) -> _Call:
    if implementation == "xla":
        return _Call(facts, None)
    return _Call(facts, plans.launch("ring_attention", implementation, facts))


def _axis_size(axis_name: AxisName) -> int:
    if isinstance(axis_name, tuple) and len(set(axis_name)) < max(len(axis_name), 1):
        raise ValueError(f"axis_name={axis_name!r}; expected different names, at least one")
    try:
        return lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name={axis_name!r} is no axis of the mesh here; call inside jax.shard_map"
        ) from None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_attention(
    ring: _Ring, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _forward(ring, q, k, v)


def _forward(ring: _Ring, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    alone = ring.is_alone(q, k)
    keys = () if alone else ring.permute((k, v))
    out, lse = derivatives.attention_results(*ring.own, (q, k, v))
    if alone:
        return out, lse
    q, state = ring.swap(q), (ring.swap(out).astype(jnp.float32), ring.swap(lse, 2))

    def attend(step: jax.Array | int, keys: Any, state: Any) -> Any:
        operands = match_varying((q, *keys, *ring.lengths(step)))
        return _merge(*state, *derivatives.attention_results(*ring.others, operands))

    def body(step: jax.Array, carry: Any) -> Any:
        keys, state = carry
        following = ring.permute(keys)
        return following, attend(step, keys, state)

    # Written out step by step, XLA might hold the keys of all devices at once.
    keys, state = lax.fori_loop(1, ring.size - 1, body, (keys, state))
    merged, lse = attend(ring.size - 1, keys, state)
    return ring.swap(merged).astype(out.dtype), ring.swap(lse, 2)


def _forward_rule(
    ring: _Ring, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    q, k, v = primitives.first_order("ring_attention", q, k, v)
    out, lse = _forward(ring, q, k, v)
    out = checkpoint_name(out, "flash_attention_out")
    lse = checkpoint_name(lse, "flash_attention_lse")
    return (out, lse), (q, k, v, out, lse)


def _backward_rule(
    ring: _Ring, residuals: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v, out, lse = residuals
    dout, dlse = cotangents
    alone = ring.is_alone(q, k)
    keys = () if alone else ring.permute((k, v))
    own = derivatives.attention_gradients(*ring.own, (q, k, v), out, lse, dout, dlse)
    if alone:
        return own
    dq, *dkeys = (x.astype(jnp.float32) for x in own)
    q, out, dout, dq = (ring.swap(x) for x in (q, out, dout, dq))
    lse, dlse = ring.swap(lse, 2), ring.swap(dlse, 2)

    def add(step: jax.Array | int, keys: Any, dq: jax.Array, dkeys: Any) -> Any:
        """Add a step's gradients; those of the keys, up to the step before, come with the keys."""
        dkeys = ring.permute(dkeys)
        operands = match_varying((q, *keys, *ring.lengths(step)))
        parts = derivatives.attention_gradients(*ring.others, operands, out, lse, dout, dlse)
        dq, *dkeys = (total + part for total, part in zip((dq, *dkeys), parts, strict=True))
        return dq, dkeys

    def body(step: jax.Array, carry: Any) -> Any:
        keys, dq, dkeys = carry
        following = ring.permute(keys)
        return following, *add(step, keys, dq, dkeys)

    keys, dq, dkeys = lax.fori_loop(1, ring.size - 1, body, (keys, dq, dkeys))
    dq, dkeys = add(ring.size - 1, keys, dq, dkeys)
    dk, dv = ring.permute(dkeys)  # home
    return tuple(x.astype(q.dtype) for x in (ring.swap(dq), dk, dv))


_ring_attention.defvjp(_forward_rule, _backward_rule)


def _merge(
    out: jax.Array, lse: jax.Array, out_step: jax.Array, lse_step: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Merge two results, out (B, Sq, Hq, Dv) and lse (B, Hq, Sq), as ``combine`` does."""
    largest = jnp.maximum(lse, lse_step)
    largest = jnp.where(largest == -jnp.inf, 0.0, largest)  # -inf - -inf is NaN
    weight, weight_step = jnp.exp(lse - largest), jnp.exp(lse_step - largest)
    total = weight + weight_step
    lse = largest + jnp.log(total)
    total = jnp.where(total == 0, 1.0, total)
    out = out * _per_row(weight / total) + out_step * _per_row(weight_step / total)
    return out, lse


def _merge_devices(
    axis_name: AxisName, out: jax.Array, lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Merge the results of all devices."""
    largest = lax.pmax(lax.stop_gradient(lse), axis_name)
    largest = jnp.where(largest == -jnp.inf, 0.0, largest)
    weight = jnp.exp(lse - largest)
    total, out = lax.psum((weight, out * _per_row(weight)), axis_name)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    return out / _per_row(total), jnp.where(empty, -jnp.inf, largest + jnp.log(total))


def _per_row(x: jax.Array) -> jax.Array:
    """(B, H, S) -> (B, S, H, 1)."""
    return jnp.swapaxes(x, 1, 2)[..., None]


# ---- The zigzag layout --------------------------------------------------------------------------


def _chunks(x: jax.Array, num_shards: int, axis: int) -> jax.Array:
    """The 2P chunks of an array along an axis, as a new first axis."""
    num_chunks = 2 * static.integer("num_shards", num_shards, 1)
    length = x.shape[static.integer("axis", axis, -x.ndim, x.ndim - 1)]
    if isinstance(length, int) and length % num_chunks:
        raise ValueError(
            f"x has {length} tokens along axis {axis}; num_shards={num_shards} needs a multiple of "
            f"{num_chunks}"
        )
    x = jnp.moveaxis(x, axis, 0)
    return x.reshape(num_chunks, length // num_chunks, *x.shape[1:])


def _joined(chunks: jax.Array, like: jax.Array, axis: int) -> jax.Array:
    """Lay chunks, which may have several axes in front, out along an axis, shaped as `like`."""
    others = chunks.shape[chunks.ndim - like.ndim + 1 :]
    return jnp.moveaxis(chunks.reshape(like.shape[axis], *others), 0, axis)
