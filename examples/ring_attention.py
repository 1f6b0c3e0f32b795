"""Attention over a sequence that is spread over devices, forward and backward.

    python examples/ring_attention.py

The sequence is arranged in the zigzag layout, so that all devices have the same work under the
causal mask, and cut into a block for each device. Keys and values go around the ring of devices;
no device ever holds the whole sequence. Output and gradients are compared with plain attention on
one device. Without GPUs it runs on 8 simulated CPU devices.
"""

from __future__ import annotations

import functools
import os

# Read when JAX starts, and about CPUs only.
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jax_fa_epilogue as fa  # noqa: E402

BATCH, SEQLEN, HEADS, HEADS_KV, HEAD_DIM = 1, 512, 4, 2, 64


def main() -> None:
    """Compare the ring with plain attention."""
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = P(None, "seq")  # (B, S, H, D)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    def ring(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return fa.ring_attention(q, k, v, axis_name="seq", causal=True, layout="zigzag")

    plain = functools.partial(fa.flash_attention, causal=True)

    def with_gradients(attend):
        def run(q, k, v, dout):
            out, vjp = jax.vjp(attend, q, k, v)
            return out, *vjp(dout)

        return jax.jit(run)

    keys = jax.random.split(jax.random.key(0), 4)
    heads = (HEADS, HEADS_KV, HEADS_KV, HEADS)  # of q, k, v and the cotangent of out
    whole = [
        jax.random.normal(key, (BATCH, SEQLEN, n, HEAD_DIM), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    ]
    # In a model only the tokens and their positions are arranged, once, before the first layer.
    spread = [
        jax.device_put(fa.to_zigzag(x, len(devices)), NamedSharding(mesh, spec)) for x in whole
    ]
    expected = with_gradients(plain)(*whole)
    results = with_gradients(ring)(*spread)
    print(f"{len(devices)} devices, blocks of {results[0].sharding.shard_shape(results[0].shape)}")
    for name, result, want in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
        got = jax.device_put(fa.from_zigzag(result, len(devices)), devices[0])
        error = float(jnp.abs(got.astype(jnp.float32) - want.astype(jnp.float32)).max())
        largest = float(jnp.abs(want).max())
        print(f"{name:<4} largest difference {error:.1e}, largest value {largest:.1f}")
        if not error <= 0.02 * largest:
            raise SystemExit(f"{name} of the ring differs from that of plain attention")


if __name__ == "__main__":
    main()
