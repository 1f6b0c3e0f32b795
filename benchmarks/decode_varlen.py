"""Speed of decode and of packed sequences against cuDNN and FlashAttention-3.

    python benchmarks/decode_varlen.py --json decode_varlen.json --plot decode_varlen.png

Needs a CUDA device of compute capability 9.0. Decode: GB/s of K and V for a few queries per
sequence over a cache in one array, bfloat16, D 128. A contender calls itself REPEATS times inside
one program, each time on what came out, so that nothing but the device's time is left. Packed: 16
sequences whose lengths follow a Zipf law, 16,384 tokens in all, against the dense kernel on
sequences of the length at which every token has as much work; TFLOP/s count 4 H D sum(l^2)
operations, half as many with a causal mask. Layers: a decode step of LAYERS layers, a cache each,
as one program. cuDNN runs through ``jax.nn``; FlashAttention-3 takes part where the PyPI package
fa3-fwd is installed (through torch, its own choice of splits). By device time and, for JAX's
programs, by the wall (timing.py).
"""

from __future__ import annotations

import functools
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import command_line
import jax
import jax.numpy as jnp
import numpy as np
import timing

import jax_fa_epilogue as fa

HEAD_DIM = 128
REPEATS = 4
LAYERS = 20
# batch, queries, keys, query heads, key heads
DECODE = (
    (1, 1, 65536, 32, 8),
    (8, 1, 8192, 32, 8),
    (64, 1, 8192, 64, 8),
    (1, 1, 131072, 64, 8),
    (32, 1, 2048, 32, 8),
    (128, 1, 1024, 32, 8),
    (8, 4, 8192, 32, 8),
)
TOKENS, WIDTH, SEQUENCES = 16384, 2048, 16


def random(*shapes):
    """bfloat16 arrays of these shapes, and the device has them."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    arrays = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]
    return jax.block_until_ready(arrays)


def chained(function, operands):
    """One program that calls `function` REPEATS times on its own result."""

    def program(q, *others):
        for _ in range(REPEATS):
            q = function(q, *others)
        return q

    compiled = jax.jit(program).lower(*operands).compile()
    return lambda: compiled(*operands)


def fa3_call(call, operands):
    """FA3 through torch, `call(interface, *tensors)`, REPEATS times; None if not installed."""
    try:
        import fa3_fwd_interface
        import torch
    except ImportError:
        return None
    tensors = [torch.utils.dlpack.from_dlpack(x) for x in operands]

    def repeat():
        for _ in range(REPEATS):
            result = call(fa3_fwd_interface, *tensors)
        return result

    return repeat, torch.cuda.synchronize


def times(calls, fa3, rounds, repeats=REPEATS, enqueued=5):
    """Device and wall seconds per repetition of each contender, by clock."""
    wait = {}
    wall = timing.Clock(dict(calls)).wall(rounds, enqueued)
    if fa3 is not None:
        calls["fa3"], wait["fa3"] = fa3
    device = timing.Clock(calls, wait).device(rounds)
    return {
        clock: {name: [s / repeats for s in seconds] for name, seconds in measured.items()}
        for clock, measured in (("device", device), ("wall", wall))
    }


def row(kind, name, amount, unit, seconds):
    """Amount per second of each contender, and ratios of ours to the others, by either clock."""
    result = {"kind": kind, "name": name, "unit": unit}
    for clock, measured in seconds.items():
        result[clock] = {
            "microseconds": {k: timing.median(v) * 1e6 for k, v in measured.items()},
            "speed": {k: amount / timing.median(v) for k, v in measured.items()},
            "speedup": {
                k: timing.ratio(v, measured["ours"]) for k, v in measured.items() if k != "ours"
            },
        }
    print(f"{kind} {name}")
    for clock in seconds:
        shown = (
            f"{k} {us:.1f} us {result[clock]['speed'][k]:.0f} {unit}"
            + ("" if k == "ours" else f" x{result[clock]['speedup'][k]:.3f}")
            for k, us in result[clock]["microseconds"].items()
        )
        print(f"    {clock:6} " + "  ".join(shown), flush=True)
    return result


def decode(batch, queries, keys, heads, heads_kv, rounds):
    """One decode shape."""
    cache = (batch, keys, heads_kv, HEAD_DIM)
    operands = random((batch, queries, heads, HEAD_DIM), cache, cache)
    functions = {
        "ours": functools.partial(fa.flash_attention, causal=True, implementation="cuda"),
        # One query sees every key; more would need a mask, which cuDNN takes at a cost.
        "cudnn": functools.partial(
            jax.nn.dot_product_attention, implementation="cudnn", is_causal=False
        ),
    }
    calls = {name: chained(function, operands) for name, function in functions.items()}
    fa3 = fa3_call(lambda fa3, q, k, v: fa3.flash_attn_with_kvcache(q, k, v, causal=True), operands)
    name = f"B {batch}, Sq {queries}, Sk {keys}, {heads}/{heads_kv} heads"
    moved = 2 * operands[1].nbytes
    return row("decode", name, moved / 1e9, "GB/s", times(calls, fa3, rounds))


def layers(rounds):
    """A decode step: what the wall takes per layer beyond the kernels."""
    batch, _, keys, heads, heads_kv = DECODE[1]
    q, *caches = random(
        (batch, 1, heads, HEAD_DIM), *[(batch, keys, heads_kv, HEAD_DIM)] * (2 * LAYERS)
    )
    lengths = jnp.full((batch,), keys, jnp.int32)

    def step(q, caches, lengths):
        for k, v in zip(caches[::2], caches[1::2], strict=True):
            q = fa.flash_attention(q, k, v, seqused_k=lengths, causal=True, implementation="cuda")
        return q

    compiled = jax.jit(step).lower(q, caches, lengths).compile()
    calls = {"ours": lambda: compiled(q, caches, lengths)}
    # Many steps without waiting in between: what is per program and per wait is not the layers'.
    seconds = times(calls, None, rounds, LAYERS, enqueued=50)
    name = f"{LAYERS} x B {batch}, Sk {keys}, {heads}/{heads_kv} heads"
    result = row("layers", name, 2 * caches[0].nbytes / 1e9, "GB/s", seconds)
    device, wall = (result[clock]["microseconds"]["ours"] for clock in ("device", "wall"))
    print(f"    beyond the kernels: {wall - device:.1f} us per layer")
    return result


def zipf_lengths():
    """Lengths of SEQUENCES sequences, shuffled: the n-th longest has 1/n of the longest."""
    weights = 1 / np.arange(1, SEQUENCES + 1)
    lengths = np.maximum(1, (weights / weights.sum() * TOKENS).astype(int))
    lengths[0] += TOKENS - lengths.sum()
    return np.random.default_rng(0).permutation(lengths)


def packed(head_dim, causal, rounds):
    """Zipf-like lengths against dense sequences with as much work per token."""
    lengths = zipf_lengths()
    heads = WIDTH // head_dim
    cu_seqlens = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
    longest = int(lengths.max())
    operands = random(*[(TOKENS, heads, head_dim)] * 3)
    seqlen = round((lengths.astype(float) ** 2).sum() / TOKENS / 128) * 128
    batch = TOKENS // seqlen
    dense = [x[: batch * seqlen].reshape(batch, seqlen, heads, head_dim) for x in operands]

    def ours(q, k, v, offsets):
        return fa.flash_attention_varlen(
            q,
            k,
            v,
            offsets,
            offsets,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=causal,
            implementation="cuda",
        )

    calls = {
        "ours": chained(ours, [*operands, cu_seqlens]),
        "ours, dense": chained(
            functools.partial(fa.flash_attention, causal=causal, implementation="cuda"), dense
        ),
    }
    fa3 = fa3_call(
        lambda fa3, q, k, v, offsets: fa3.flash_attn_varlen_func(
            q, k, v, offsets, offsets, max_seqlen_q=longest, max_seqlen_k=longest, causal=causal
        ),
        [*operands, cu_seqlens],
    )
    seconds = times(calls, fa3, rounds)
    share = batch * seqlen**2 / (lengths.astype(float) ** 2).sum()
    for measured in seconds.values():  # at equal work
        measured["ours, dense"] = [s / share for s in measured["ours, dense"]]
    work = 4 * WIDTH * (lengths.astype(float) ** 2).sum() / (2 if causal else 1)
    name = f"D {head_dim}{', causal' if causal else ''}"
    return row("packed", name, work / 1e12, "TFLOP/s", seconds)


def draw(result, path):
    """Bars of device speed, a chart per kind."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(14, 5), layout="constrained")
    for ax, kind in zip(axes, ("decode", "packed"), strict=True):
        chosen = [r for r in result["rows"] if r["kind"] == kind]
        contenders = list(dict.fromkeys(k for r in chosen for k in r["device"]["speed"]))
        width = 0.8 / max(len(contenders), 1)
        for i, contender in enumerate(contenders):
            speed = [r["device"]["speed"].get(contender, 0) for r in chosen]
            ax.bar([n + i * width for n in range(len(chosen))], speed, width, label=contender)
        names = [r["name"].replace(", ", "\n") for r in chosen]
        ax.set_xticks([n + 0.4 - width / 2 for n in range(len(chosen))], names, fontsize=8)
        ax.set_ylabel(f"{chosen[0]['unit'] if chosen else ''} of device time")
        ax.set_title(kind)
        ax.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main():
    """Measure, write, draw, as the command line says."""
    parser = command_line.parser(__doc__, rounds=7)
    parser.add_argument("--only", choices=("decode", "layers", "packed"))
    arguments = parser.parse_args()

    def measure():
        rows = []
        if arguments.only in (None, "decode"):
            rows += [decode(*shape, arguments.rounds) for shape in DECODE]
        if arguments.only in (None, "layers"):
            rows.append(layers(arguments.rounds))
        if arguments.only in (None, "packed"):
            rows += [
                packed(head_dim, causal, arguments.rounds)
                for head_dim in (64, 128)
                for causal in (False, True)
            ]
        return {"rows": rows}

    command_line.run(arguments, measure, draw)


if __name__ == "__main__":
    main()
