"""Training steps on a mesh of (data, model): batch over the one, heads over the other.

    python examples/sharded_training.py

An attention layer learns to imitate another one. Nothing in the model is about devices: the arrays
are placed, and `jax.jit` partitions the program. Each device runs the attention kernel on its own
sequences and heads, forward and backward; the compiled program is searched for gathers to show it.
The losses are compared with those of one device. Without GPUs it runs on 8 simulated CPU devices.
"""

from __future__ import annotations

import functools
import math
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

BATCH, SEQLEN, WIDTH, HEADS, HEADS_KV, HEAD_DIM = 8, 64, 32, 8, 4, 64
STEPS, LEARNING_RATE = 10, 1.0
# Heads of each matrix are over "model"; activations are (batch, token, width).
SPECS = {
    "query": P(None, "model"),
    "key": P(None, "model"),
    "value": P(None, "model"),
    "out": P("model"),
}
BATCH_SPEC = P("data")


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Matrices (width, heads, head_dim), and (heads, head_dim, width) of the output."""
    shapes = {
        "query": (WIDTH, HEADS, HEAD_DIM),
        "key": (WIDTH, HEADS_KV, HEAD_DIM),
        "value": (WIDTH, HEADS_KV, HEAD_DIM),
        "out": (HEADS, HEAD_DIM, WIDTH),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) / math.sqrt(math.prod(shape) / shape[-1])
        if name == "out"
        else jax.random.normal(k, shape) / math.sqrt(WIDTH)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def layer(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Causal attention with its projections: (batch, token, width) to the same."""
    q, k, v = (
        jnp.einsum("btw,whd->bthd", x, params[name]).astype(jnp.bfloat16)
        for name in ("query", "key", "value")
    )
    out = fa.flash_attention(q, k, v, causal=True)
    return jnp.einsum("bthd,hdw->btw", out.astype(jnp.float32), params["out"])


@functools.partial(jax.jit, donate_argnames="params")
def step(
    params: dict[str, jax.Array], x: jax.Array, target: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    """One step of gradient descent; returns new parameters and the loss before it."""

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean(jnp.square(layer(params, x) - target))

    value, gradients = jax.value_and_grad(loss)(params)
    params = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, gradients)
    return params, value


def train(params: dict[str, jax.Array], x: jax.Array, target: jax.Array) -> list[float]:
    """The losses of all steps."""
    losses = []
    for _ in range(STEPS):
        params, loss = step(params, x, target)
        losses.append(float(loss))
    return losses


def main() -> None:
    """Train on all devices and on one, and compare."""
    devices = jax.devices()
    data = 2 if len(devices) % 2 == 0 else 1
    model = math.gcd(HEADS_KV, len(devices) // data)
    mesh = jax.make_mesh(
        (data, model),
        ("data", "model"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=devices[: data * model],
    )
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (BATCH, SEQLEN, WIDTH))
    target = layer(init(keys[1]), x)

    placed = {
        name: jax.device_put(value, NamedSharding(mesh, SPECS[name]))
        for name, value in init(keys[2]).items()
    }
    batches = [jax.device_put(value, NamedSharding(mesh, BATCH_SPEC)) for value in (x, target)]
    text = step.lower(placed, *batches).compile().as_text()
    found = [name for name in ("all-gather", "all-to-all", "collective-permute") if name in text]
    losses = train(placed, *batches)
    expected = train(init(keys[2]), x, target)

    print(f"mesh {dict(mesh.shape)}: losses {', '.join(f'{loss:.4f}' for loss in losses)}")
    worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    print(f"largest relative difference from one device: {worst:.1e}")
    if found:
        raise SystemExit(f"the program has {', '.join(found)}: arrays are moved between devices")
    if not worst < 1e-2 or not losses[-1] < 0.9 * losses[0]:
        raise SystemExit("training on the mesh is not that on one device, or learns nothing")


if __name__ == "__main__":
    main()
