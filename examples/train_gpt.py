"""Training a small decoder-only transformer, with this package's attention and with JAX's.

    python examples/train_gpt.py                      both, and their loss curves side by side
    python examples/train_gpt.py --attention ours     one of them
    python examples/train_gpt.py --plot loss.png      the curves as a picture (needs matplotlib)

The text is the source code of the installed package, a token per byte. A step is one compiled
function: it draws its batch, differentiates the loss and updates the parameters, which are donated.
Each block of the transformer is computed again in the backward pass, except for what attention
left: with out and lse saved under their names its kernel runs once per block and step, not twice.
JAX's attention has no such names. ``--no-remat`` keeps everything instead, for either.

On a GPU the default is D = 128 in bfloat16 on sequences of 8192 tokens, and JAX's attention is
cuDNN's; elsewhere both are small and in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_fa_epilogue as fa

VOCABULARY = 256
WARM_UP = 3  # steps before the clock starts: the first one compiles
COINCIDE = 0.01  # largest mean distance of two loss curves, relative to the loss
ON_GPU = jax.default_backend() == "gpu"
SAVED = jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_lse")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the model, of a batch and of the run."""

    layers: int
    heads: int
    heads_kv: int
    head_dim: int
    seqlen: int
    batch: int
    steps: int
    learning_rate: float
    dtype: str  # of activations; parameters are float32
    remat: bool = True

    @property
    def width(self) -> int:
        """Size of the residual stream."""
        return self.heads * self.head_dim


GPU = Settings(8, 16, 4, 128, seqlen=8192, batch=1, steps=60, learning_rate=6e-4, dtype="bfloat16")
CPU = Settings(2, 4, 2, 32, seqlen=128, batch=4, steps=30, learning_rate=3e-3, dtype="float32")

Tree = Any  # of arrays


def package_text() -> np.ndarray:
    """The package's source code, int32 (T,)."""
    sources = sorted(pathlib.Path(fa.__file__).parent.glob("*.py"))
    text = b"".join(source.read_bytes() for source in sources)
    return np.frombuffer(text, np.uint8).astype(np.int32)


def optimiser(settings: Settings) -> optax.GradientTransformation:
    """AdamW behind a clip of the gradient's norm."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(settings.learning_rate))


@functools.partial(jax.jit, static_argnums=0)
def start(settings: Settings, key: jax.Array) -> tuple[Tree, Tree]:
    """Parameters, those of the blocks with the layer as first axis, and the optimiser's state."""
    width, layers = settings.width, settings.layers
    shapes = {
        "q": (layers, width, settings.heads, settings.head_dim),
        "kv": (layers, width, 2, settings.heads_kv, settings.head_dim),
        "out": (layers, settings.heads, settings.head_dim, width),
        "up": (layers, width, 4 * width),
        "down": (layers, 4 * width, width),
        "tokens": (VOCABULARY, width),
        "positions": (settings.seqlen, width),
    }
    keys = jax.random.split(key, len(shapes))
    weights = {
        name: 0.02 * jax.random.normal(k, shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    params = {name: weights.pop(name) for name in ("tokens", "positions")} | {"blocks": weights}
    return params, optimiser(settings).init(params)


def normalise(x: jax.Array) -> jax.Array:
    """Root mean square 1 over the last axis."""
    square = jnp.square(x.astype(jnp.float32)).mean(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype)


def attend(attention: str, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention, q (B, S, Hq, D), k and v (B, S, Hk, D) -> (B, S, Hq, D)."""
    if attention == "ours":
        return fa.flash_attention(q, k, v, causal=True)
    implementation = "cudnn" if ON_GPU else "xla"
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)


def loss_of(settings: Settings, attention: str, params: Tree, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of each next token, from tokens (B, S + 1)."""

    def block(x: jax.Array, weights: Tree) -> tuple[jax.Array, None]:
        h = normalise(x)
        q = jnp.einsum("bsw,whd->bshd", h, weights["q"])
        k, v = jnp.moveaxis(jnp.einsum("bsw,wchd->bschd", h, weights["kv"]), 2, 0)
        x += jnp.einsum("bshd,hdw->bsw", attend(attention, q, k, v), weights["out"])
        return x + jax.nn.gelu(normalise(x) @ weights["up"]) @ weights["down"], None

    if settings.remat:
        block = jax.checkpoint(block, policy=SAVED)
    params = jax.tree.map(lambda x: x.astype(settings.dtype), params)
    x = params["tokens"][tokens[:, :-1]] + params["positions"]
    x, _ = jax.lax.scan(block, x, params["blocks"])
    logits = (normalise(x) @ params["tokens"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@functools.partial(
    jax.jit, static_argnames=("settings", "attention"), donate_argnames=("params", "state")
)
def step(
    settings: Settings, attention: str, params: Tree, state: Tree, text: jax.Array, key: jax.Array
) -> tuple[Tree, Tree, jax.Array]:
    """One training step: parameters, the optimiser's state, and the loss before the step."""
    starts = jax.random.randint(key, (settings.batch,), 0, text.shape[0] - settings.seqlen)
    cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=settings.seqlen + 1)
    tokens = jax.vmap(cut, (None, 0))(text, starts)
    loss, gradients = jax.value_and_grad(functools.partial(loss_of, settings, attention))(
        params, tokens
    )
    updates, state = optimiser(settings).update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


def train(settings: Settings, attention: str) -> tuple[np.ndarray, float]:
    """Train from the same start on the same batches; loss of each step, and tokens per second."""
    key = jax.random.key(0)
    params, state = start(settings, key)
    text = jnp.asarray(package_text())
    losses = []
    for i in range(settings.steps):
        if i == WARM_UP:
            jax.block_until_ready(losses)
            begin = time.perf_counter()
        batch_key = jax.random.fold_in(key, i)
        params, state, loss = step(settings, attention, params, state, text, batch_key)
        losses.append(loss)
    jax.block_until_ready((params, losses))
    seconds = time.perf_counter() - begin
    tokens = (settings.steps - WARM_UP) * settings.batch * settings.seqlen
    return np.array(losses), tokens / seconds


def show(curves: dict[str, np.ndarray], plot: str | None) -> None:
    """Print the loss curves, and draw them into the file `plot`."""
    steps = len(next(iter(curves.values())))
    highest = max(losses.max() for losses in curves.values())
    print("step  " + "  ".join(f"{name:>7}" for name in curves))
    for i in sorted({*range(0, steps, max(1, steps // 15)), steps - 1}):
        values = [losses[i] for losses in curves.values()]
        bar = "#" * round(40 * values[0] / highest)
        print(f"{i:4d}  " + "  ".join(f"{x:7.4f}" for x in values) + f"  {bar}")
    if plot is not None:
        from matplotlib import pyplot

        for (name, losses), style in zip(curves.items(), ("-", "--"), strict=False):
            pyplot.plot(losses, style, label=name)
        pyplot.xlabel("step")
        pyplot.ylabel("loss")
        pyplot.legend()
        pyplot.savefig(plot)


def main() -> None:
    """Train with one attention or both; exits with an error where the curves do not coincide."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", choices=("ours", "jax", "both"), default="both")
    parser.add_argument("--no-remat", action="store_true", help="keep all activations")
    parser.add_argument("--plot", metavar="FILE", help="draw the loss curves into this file")
    for name in ("layers", "seqlen", "batch", "steps"):
        parser.add_argument(f"--{name}", type=int, metavar="N")
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in ("layers", "seqlen", "batch", "steps")}
    settings = dataclasses.replace(
        GPU if ON_GPU else CPU,
        remat=not arguments.no_remat,
        **{name: size for name, size in sizes.items() if size is not None},
    )
    if settings.steps <= WARM_UP:
        parser.error(f"--steps {settings.steps}; allowed are {WARM_UP + 1} or more")
    print(settings)
    chosen = ("ours", "jax") if arguments.attention == "both" else (arguments.attention,)
    curves = {}
    for attention in chosen:
        curves[attention], speed = train(settings, attention)
        last = curves[attention][-1]
        print(
            f"{attention:<5} {speed:10.0f} tokens/s, loss {curves[attention][0]:.4f} -> {last:.4f}"
        )
    show(curves, arguments.plot)
    for attention, losses in curves.items():
        if not losses[-1] < 0.9 * losses[0]:
            raise SystemExit(f"{attention}: the loss does not fall")
    if len(curves) == 2:
        distance = np.abs(curves["ours"] - curves["jax"]).mean() / curves["jax"].mean()
        print(f"mean distance of the curves {distance:.1e} of the loss")
        if not distance <= COINCIDE:
            raise SystemExit("the loss curves do not coincide")


if __name__ == "__main__":
    main()
