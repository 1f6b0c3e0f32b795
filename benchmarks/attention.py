"""Speed of attention, forward or backward, against cuDNN and FlashAttention-3.

    python benchmarks/attention.py --json attention.json --plot attention.png
    python benchmarks/attention.py --backward --json backward.json --plot backward.png

Needs a CUDA device of compute capability 9.0. 16,384 tokens, a model width of 2,048, bfloat16,
causal and not. TFLOP/s count 4 B S^2 H D operations, half as many with a causal mask and 2.5 times
as many in the backward, in 1e12, by device time (timing.py). The backward alone is timed, with all
its kernels: the forward's results are there before. cuDNN runs through ``jax.nn``;
FlashAttention-3's kernels take part where the PyPI package dew-flash-attn-cu13 is installed. All
contenders of a point run interleaved. The plot can be drawn elsewhere from the JSON:
`--plot attention.png --from attention.json`.
"""

from __future__ import annotations

import functools
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import command_line
import jax
import jax.numpy as jnp
import timing

TOKENS, WIDTH = 16384, 2048
HEAD_DIMS = (64, 128, 256)
SEQLENS = (1024, 2048, 4096, 8192, 16384)


def contenders(causal, backward):
    """Functions of (q, k, v), by name; ours first."""
    import jax_fa_epilogue as fa

    ours = functools.partial(fa.flash_attention, causal=causal, implementation="cuda")
    functions = {"ours": ours}
    if backward:
        functions["ours, deterministic"] = functools.partial(ours, deterministic=True)
    functions["cudnn"] = functools.partial(
        jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn"
    )
    try:
        from dew_flash_attn import flash_mha
    except ImportError:
        return functions
    functions["fa3"] = functools.partial(flash_mha, is_causal=causal)
    return functions


def pull_back(function, operands, cotangent):
    """A call of the function's backward alone."""
    _, vjp = jax.vjp(jax.jit(function), *operands)
    return functools.partial(jax.jit(lambda vjp, cotangent: vjp(cotangent)), vjp, cotangent)


def measure(head_dim, seqlen, causal, backward, rounds):
    """One point: TFLOP/s of each contender, and ratios of ours to the others."""
    shape = (TOKENS // seqlen, seqlen, WIDTH // head_dim, head_dim)
    keys = jax.random.split(jax.random.key(seqlen + head_dim), 4)
    *operands, cotangent = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    calls, expected = {}, None
    for name, function in contenders(causal, backward).items():
        if backward:
            calls[name] = pull_back(function, operands, cotangent)
        else:
            calls[name] = functools.partial(jax.jit(function), *operands)
        results = [x.astype(jnp.float32) for x in jax.tree.leaves(calls[name]())]
        expected = expected or results
        for result, e in zip(results, expected, strict=True):
            error = float(jnp.abs(result - e).max() / jnp.abs(e).max())
            assert error < 0.03, (name, head_dim, seqlen, causal, error)
    del results, expected
    seconds = timing.Clock(calls).device(rounds)
    operations = 4 * TOKENS * seqlen * WIDTH / (2 if causal else 1) * (2.5 if backward else 1)
    others = [name for name in seconds if name != "ours"]
    return {
        "head_dim": head_dim,
        "seqlen": seqlen,
        "causal": causal,
        "tflop_per_s": {k: operations / timing.median(v) / 1e12 for k, v in seconds.items()},
        "speedup": {k: timing.ratio(seconds[k], seconds["ours"]) for k in others},
    }


def draw(result, path):
    """TFLOP/s over sequence length: a chart per head dimension and mask."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points = result["points"]
    head_dims = sorted({point["head_dim"] for point in points})
    figure, axes = plt.subplots(
        2, len(head_dims), figsize=(4 * len(head_dims), 7), layout="constrained", squeeze=False
    )
    for column, head_dim in enumerate(head_dims):
        for row, causal in enumerate((False, True)):
            ax = axes[row][column]
            chosen = [p for p in points if (p["head_dim"], p["causal"]) == (head_dim, causal)]
            for name in chosen[0]["tflop_per_s"] if chosen else ():
                speed = [point["tflop_per_s"][name] for point in chosen]
                ax.plot([p["seqlen"] for p in chosen], speed, marker="o", label=name)
            ax.set_xscale("log", base=2)
            ax.set_ylim(bottom=0)
            ax.set_title(f"head_dim {head_dim}{', causal' if causal else ''}")
            ax.set_xlabel("sequence length")
            ax.set_ylabel("TFLOP/s")
            ax.legend()
    figure.savefig(path, dpi=110)


def main():
    """Measure, write, draw, as the command line says."""
    parser = command_line.parser(__doc__, rounds=7)
    parser.add_argument("--seqlens", type=int, nargs="+", default=SEQLENS)
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--backward", action="store_true")
    arguments = parser.parse_args()

    def measure_all():
        points = []
        for head_dim in arguments.head_dims:
            for causal in (False, True):
                for seqlen in arguments.seqlens:
                    point = measure(head_dim, seqlen, causal, arguments.backward, arguments.rounds)
                    points.append(point)
                    speeds = "  ".join(f"{k} {v:4.0f}" for k, v in point["tflop_per_s"].items())
                    ratios = "  ".join(f"x{v:.3f} {k}" for k, v in point["speedup"].items())
                    mask = "causal" if causal else "full"
                    print(f"D {head_dim:3} S {seqlen:5} {mask:6}  {speeds}  {ratios}", flush=True)
        return {"points": points}

    command_line.run(arguments, measure_all, draw)


if __name__ == "__main__":
    main()
