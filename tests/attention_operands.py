"""Operands of attention, and how its results and gradients are computed; for several test files."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed, *shapes, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def with_gradients(function):
    """Return a jitted (q, k, v, dout, dlse, *rest) -> out, lse, dq, dk, dv."""

    @jax.jit
    def run(q, k, v, dout, dlse, *rest):
        results, vjp = jax.vjp(lambda q, k, v: function(q, k, v, *rest), q, k, v)
        return *results, *vjp((dout, dlse))

    return run


def dense_operands(seed, batch, seqlen_q, seqlen_k, heads, heads_kv, dim, dim_v, dtype=jnp.float32):
    """Return q, k, v, dout, dlse."""
    q, k, v, dout = normal(
        seed,
        (batch, seqlen_q, heads, dim),
        (batch, seqlen_k, heads_kv, dim),
        (batch, seqlen_k, heads_kv, dim_v),
        (batch, seqlen_q, heads, dim_v),
        dtype=dtype,
    )
    return q, k, v, dout, *normal(seed + 1, (batch, heads, seqlen_q))


def packed_operands(seed, total_q, total_k, heads, heads_kv, dim, dim_v, dtype=jnp.float32):
    """Return q, k, v, dout, dlse."""
    return [
        x[0] for x in dense_operands(seed, 1, total_q, total_k, heads, heads_kv, dim, dim_v, dtype)
    ]
