"""Decoding with a KV cache that is updated in place.

    python examples/decode.py

One attention layer without weights: prompts of different lengths are put into one cache array, then
each step appends a token per sequence and attends to all before it. The cache is donated, so that
XLA writes the new keys and values into it where it lies; attention reads it as it is, up to each
sequence's length. At the end every output is compared with attention over the whole sequence.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jax_fa_epilogue as fa

BATCH, CAPACITY, HEADS, HEADS_KV, HEAD_DIM = 4, 256, 8, 2, 64
PROMPTS = (100, 7, 53, 1)
STEPS = 20


def append(cache: jax.Array, new: jax.Array, lengths: jax.Array) -> jax.Array:
    """Write new (B, S, Hk, D) behind the first `lengths` (B,) tokens of cache (B, C, Hk, D)."""
    return jax.vmap(lambda c, x, n: jax.lax.dynamic_update_slice(c, x, (n, 0, 0)))(
        cache, new, lengths
    )


@functools.partial(jax.jit, donate_argnames=("k_cache", "v_cache"))
def step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Append one token per sequence and attend to it and all before it.

    Args:
      q: queries of the new tokens (B, 1, Hq, D).
      k: their keys (B, 1, Hk, D).
      v: their values (B, 1, Hk, D).
      k_cache: keys (B, C, Hk, D); donated.
      v_cache: values (B, C, Hk, D); donated.
      lengths: int32 (B,), tokens in the cache so far.

    Returns:
      out (B, 1, Hq, D), the caches and the lengths with the new token.
    """
    k_cache, v_cache = append(k_cache, k, lengths), append(v_cache, v, lengths)
    lengths = lengths + 1
    out = fa.flash_attention(q, k_cache, v_cache, seqused_k=lengths, causal=True)
    return out, k_cache, v_cache, lengths


def main() -> None:
    """Decode, and compare with attention over the whole sequences."""
    keys = jax.random.split(jax.random.key(0), 3)
    total = max(PROMPTS) + STEPS
    q = jax.random.normal(keys[0], (BATCH, total, HEADS, HEAD_DIM), jnp.bfloat16)
    k, v = (
        jax.random.normal(key, (BATCH, total, HEADS_KV, HEAD_DIM), jnp.bfloat16) for key in keys[1:]
    )
    lengths = jnp.array(PROMPTS, jnp.int32)
    # What the cache holds past a sequence's length has no influence, whatever it is.
    empty = jnp.full((BATCH, CAPACITY, HEADS_KV, HEAD_DIM), jnp.nan, jnp.bfloat16)
    k_cache = empty.at[:, :total].set(k)
    v_cache = empty.at[:, :total].set(v)
    expected = fa.flash_attention(q, k, v, causal=True)
    rows = jnp.arange(BATCH)
    worst = 0.0
    for _ in range(STEPS):
        new = (x[rows, lengths][:, None] for x in (q, k, v))
        position = lengths
        out, k_cache, v_cache, lengths = step(*new, k_cache, v_cache, lengths)
        difference = out[:, 0].astype(jnp.float32) - expected[rows, position].astype(jnp.float32)
        worst = float(jnp.maximum(worst, jnp.abs(difference).max()))  # NaN stays
    print(f"{STEPS} steps, lengths {lengths.tolist()}, largest difference {worst:.1e}")
    if math.isnan(worst) or worst > 0.02:
        raise SystemExit("decoding differs from attention over the whole sequence")


if __name__ == "__main__":
    main()
