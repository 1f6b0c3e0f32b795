"""Between the layout of the public functions and the one by heads, in which attention is computed.

Heads become batch axes, and query heads are split by the key/value head that they read. ``*b`` is
the batch axis, or none where sequences are packed.

    public     by heads
    queries    (*b, S, Hq, D)  (*b, Hk, G, S, D)   and out, alike
    keys       (*b, S, Hk, D)  (*b, Hk, S, D)      and values, alike
    lse        (*b, Hq, S)     (*b, Hk, G, S)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_fa_epilogue import problem


def split_queries(facts: problem.AttentionProblem, x: Any) -> jax.Array:
    """(*b, S, Hq, D) -> (*b, Hk, G, S, D)."""
    x = jnp.asarray(x)
    x = x.reshape(*x.shape[:-2], facts.heads_kv, facts.qhead_per_khead, x.shape[-1])
    return jnp.moveaxis(x, -4, -2)


def split_keys(x: Any) -> jax.Array:
    """(*b, S, Hk, D) -> (*b, Hk, S, D), and back."""
    return jnp.swapaxes(jnp.asarray(x), -3, -2)


def split_lse(facts: problem.AttentionProblem, x: Any) -> jax.Array:
    """(*b, Hq, S) -> (*b, Hk, G, S)."""
    x = jnp.asarray(x)
    return x.reshape(*x.shape[:-2], facts.heads_kv, facts.qhead_per_khead, x.shape[-1])


def merge_queries(x: jax.Array) -> jax.Array:
    """(*b, Hk, G, S, D) -> (*b, S, Hq, D)."""
    return merge(jnp.moveaxis(x, -2, -4), x.ndim - 3)


def merge_lse(x: jax.Array) -> jax.Array:
    """(*b, Hk, G, S) -> (*b, Hq, S)."""
    return merge(x, x.ndim - 3)


def merge(x: jax.Array, axis: int) -> jax.Array:
    """Merge `axis` and the next one."""
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
