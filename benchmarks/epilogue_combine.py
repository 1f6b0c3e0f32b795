"""Memory speed of the epilogue and the combine against plain XLA, FA3's combine and a device copy.

    python benchmarks/epilogue_combine.py --json result.json --plot result.png

Needs a CUDA device of compute capability 9.0. All contenders of a row are measured interleaved in
one run. GB/s count each input and output byte once (valid rows only for packed sequences), in 1e9
bytes. FA3's combine takes part where torch and the PyPI package fa3-fwd are installed, in a process
of its own memory pool. The plot can be drawn elsewhere from the JSON: `--plot result.png --from
result.json`.
"""

from __future__ import annotations

import functools
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import command_line
import jax
import jax.numpy as jnp
import timing

import jax_fa_epilogue as fa

BATCH, HEADS, ROWS, HEAD_DIM = 4, 16, 8192, 128
LENGTHS = (8192, 5120, 4096, 3072)
SPLITS = (2, 3, 4, 8, 16, 32)
REPEATS = 8


def nbytes(*arrays):
    """Bytes of all arrays together."""
    return sum(x.nbytes for x in jax.tree.leaves(arrays))


def normalise(acc, row_max, row_sum):
    """Plain formulation of the row arithmetic: out and lse in acc's layout."""
    lse = row_max + jnp.log(row_sum)
    empty = jnp.isneginf(lse)
    scale = jnp.where(empty, 0, jnp.where(jnp.isnan(lse), jnp.nan, 1 / row_sum))
    return jnp.where(empty[..., None], 0, acc * scale[..., None]), lse


def xla_dense(acc, row_max, row_sum, dtype):
    """Heads behind rows; also with leading splits."""
    out, lse = normalise(acc, row_max, row_sum)
    return jnp.swapaxes(out.astype(dtype), -3, -2), lse


def xla_packed(acc, row_max, row_sum, group):
    """Rows of acc run over (query, query head of the group)."""
    out, lse = normalise(acc, row_max, row_sum)
    batch, heads, rows, head_dim = acc.shape
    split = (batch, heads, rows // group, group)
    out = out.astype(jnp.bfloat16).reshape(*split, head_dim).transpose(0, 2, 1, 3, 4)
    return (
        out.reshape(batch, rows // group, heads * group, head_dim),
        lse.reshape(split).swapaxes(2, 3).reshape(batch, heads * group, rows // group),
    )


def xla_fp8(acc, row_max, row_sum):
    """The column order of fp8 main loops."""
    out, lse = normalise(acc, row_max, row_sum)
    *leading, head_dim = acc.shape
    out = out.astype(jnp.bfloat16).reshape(*leading, head_dim // 16, 2, 8)
    return jnp.swapaxes(jnp.swapaxes(out, -2, -1).reshape(acc.shape), 1, 2), lse


def xla_varlen_gather(acc, row_max, row_sum, cu_seqlens, total_q):
    """Each token looks up its sequence and gathers its rows."""
    token = jnp.arange(total_q)
    sequence = jnp.clip(jnp.searchsorted(cu_seqlens, token, side="right") - 1, 0, acc.shape[0] - 1)
    row = jnp.clip(token - cu_seqlens[sequence], 0, acc.shape[2] - 1)
    inside = token < cu_seqlens[-1]
    out, lse = normalise(*(x[sequence, :, row] for x in (acc, row_max, row_sum)))
    out = jnp.where(inside[:, None, None], out, 0).astype(jnp.bfloat16)
    return out, jnp.where(inside[:, None], lse, -jnp.inf).T


def xla_varlen_slices(acc, row_max, row_sum, cu_seqlens, total_q):
    """Each sequence is written whole at its offset; the next one overwrites what is too much."""
    out, lse = normalise(acc, row_max, row_sum)
    batch, heads, rows, head_dim = acc.shape
    out = out.astype(jnp.bfloat16).swapaxes(1, 2)
    result = jnp.zeros((total_q + rows, heads, head_dim), jnp.bfloat16)
    result_lse = jnp.full((heads, total_q + rows), -jnp.inf)
    for b in range(batch):
        result = jax.lax.dynamic_update_slice(result, out[b], (cu_seqlens[b], 0, 0))
        result_lse = jax.lax.dynamic_update_slice(result_lse, lse[b], (0, cu_seqlens[b]))
    inside = jnp.arange(total_q) < cu_seqlens[-1]
    return (
        jnp.where(inside[:, None, None], result[:total_q], 0),
        jnp.where(inside, result_lse[:, :total_q], -jnp.inf),
    )


def xla_combine(out_partial, lse_partial):
    """Plain formulation of the merger."""
    lse = jax.nn.logsumexp(lse_partial, axis=0)
    weight = jnp.exp(lse_partial - jnp.where(jnp.isneginf(lse), 0, lse))
    weight = jnp.swapaxes(weight, -1, -2)[..., None]
    return jnp.where(weight == 0, 0, weight * out_partial).sum(0).astype(jnp.bfloat16), lse


def copy_contender():
    """A device copy of 1 GiB, as a JAX program that reads and writes every byte."""
    source = jnp.ones((1 << 28,), jnp.float32)
    copy = jax.jit(lambda x: -x)
    return (lambda: copy(source)), 2 * source.nbytes


def programs(functions, operands, shared=()):
    """Each function as one program that calls it REPEATS times, on as many copies of the operands.

    One call takes about 0.1 ms, as long as dispatching it from Python; inside one program, as in a
    model, only the device's time is left. `shared`: operands after the others, the same ones for
    all calls, so that XLA computes once what depends on nothing else.
    """
    copies = [jax.tree.map(jnp.copy, operands) for _ in range(REPEATS)]
    contenders = {}
    for name, function in functions.items():

        def program(copies, shared, function=function):
            return [function(*operands, *shared) for operands in copies]

        compiled = jax.jit(program).lower(copies, shared).compile()
        contenders[name] = lambda compiled=compiled: compiled(copies, shared)
    return contenders


def report(rows, name, clock, rounds, size, copy_size):
    """Measure a row by both clocks, append its results in GB/s, and print them."""
    row = {"name": name, "bytes": size}
    for kind, seconds in (("device", clock.device(rounds)), ("wall", clock.wall(rounds))):
        speed = {
            k: (copy_size if k == "copy" else size) / timing.median(v) / 1e9
            for k, v in seconds.items()
        }
        others = [k for k in seconds if k not in ("ours", "copy")]
        best = max(others, key=speed.get)
        speedup = timing.ratio(seconds[best], seconds["ours"])
        row[kind] = {"gb_per_s": speed, "best_other": best, "speedup": speedup}
        print(
            f"{name:22} {kind:6} ours {speed['ours']:5.0f}  {best:13} {speed[best]:5.0f}  "
            f"x{speedup:.3f}  of copy {speed['ours'] / speed['copy']:.3f}",
            flush=True,
        )
    rows.append(row)


def measure_epilogue(rows, rounds):
    """Append a row for each form of the epilogue, after a comparison of the results."""
    copy, copy_bytes = copy_contender()
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (BATCH, HEADS, ROWS)
    acc = jax.random.normal(keys[0], (*shape, HEAD_DIM))
    statistics = {
        "row_max": jax.random.normal(keys[1], shape),
        "row_sum": jnp.exp(jax.random.normal(keys[2], shape)),
    }
    cu_seqlens = jnp.cumsum(jnp.array((0, *LENGTHS))).astype(jnp.int32)
    total_q = sum(LENGTHS)

    def cases():
        yield "dense", {}, {"xla": lambda a, m, s: xla_dense(a, m, s, jnp.bfloat16)}
        yield "packed G=4", {"qhead_per_khead": 4}, {"xla": lambda a, m, s: xla_packed(a, m, s, 4)}
        for name in ("varlen", "varlen, offsets shared"):
            yield (
                name,
                {"total_q": total_q},
                {
                    "xla gather": lambda a, m, s, cu: xla_varlen_gather(a, m, s, cu, total_q),
                    "xla slices": lambda a, m, s, cu: xla_varlen_slices(a, m, s, cu, total_q),
                },
            )
        yield "fp8 order", {"fp8_permuted_columns": True}, {"xla": xla_fp8}
        yield (
            "fp32, 4 splits",
            {"out_dtype": jnp.float32},
            {"xla": lambda a, m, s: xla_dense(a, m, s, jnp.float32)},
        )

    for name, keywords, others in cases():
        operands = (acc, statistics["row_max"], statistics["row_sum"])
        if name == "fp32, 4 splits":
            operands = tuple(x.reshape(4, 1, *x.shape[1:]) for x in operands)
        if name == "varlen":
            operands = (*operands, cu_seqlens)
        shared = (cu_seqlens,) if name == "varlen, offsets shared" else ()

        def epilogue(acc, row_max, row_sum, cu_seqlens=None, *, implementation, keywords=keywords):
            return fa.epilogue(
                acc,
                row_max=row_max,
                row_sum=row_sum,
                cu_seqlens=cu_seqlens,
                implementation=implementation,
                **keywords,
            )

        functions = {
            "ours": functools.partial(epilogue, implementation="cuda"),
            "xla reference": functools.partial(epilogue, implementation="xla"),
            **others,
        }
        contenders = programs(functions, operands, shared)
        results = {key: contender()[0] for key, contender in contenders.items()}
        for key, (out, lse) in results.items():
            error = jnp.abs(out.astype(jnp.float32) - results["ours"][0].astype(jnp.float32)).max()
            assert error < 0.1 and jnp.allclose(lse, results["ours"][1]), (name, key, error)
        moved = nbytes(results["ours"]) + nbytes(operands)
        if name.startswith("varlen"):
            moved = nbytes(results["ours"]) + nbytes(operands) * total_q // (BATCH * ROWS)
        del results
        clock = timing.Clock(contenders | {"copy": copy})
        report(rows, f"epilogue {name}", clock, rounds, REPEATS * moved, copy_bytes)


def fa3_combine(out_partial, lse_partial):
    """FA3's combine through torch, or None where it is not installed."""
    try:
        import torch
        from fa3_fwd_interface import flash_attn_combine
    except ImportError:
        return None
    out = torch.utils.dlpack.from_dlpack(out_partial)
    # FA3 wants (N, B, Sq, Hq) with Sq contiguous.
    lse = torch.utils.dlpack.from_dlpack(lse_partial).transpose(2, 3)

    def repeat():
        for _ in range(REPEATS):
            flash_attn_combine(out, lse, out_dtype=torch.bfloat16)

    return repeat, torch.cuda.synchronize


def measure_combine(rows, rounds):
    """Append a row for each number of splits, after a comparison of the results."""
    copy, copy_bytes = copy_contender()
    seqlen = ROWS // 2
    for splits in SPLITS:
        keys = jax.random.split(jax.random.key(1), 2)
        out_partial = jax.random.normal(keys[0], (splits, BATCH, seqlen, HEADS, HEAD_DIM))
        lse_partial = jax.random.normal(keys[1], (splits, BATCH, HEADS, seqlen))
        functions = {
            "ours": lambda o, s: fa.combine(o, s, out_dtype=jnp.bfloat16),
            "xla": xla_combine,
            "xla reference": lambda o, s: fa.reference.combine(o, s, out_dtype=jnp.bfloat16),
        }
        contenders = programs(functions, (out_partial, lse_partial))
        results = {key: contender()[0] for key, contender in contenders.items()}
        for out, lse in results.values():
            error = jnp.abs(out.astype(jnp.float32) - results["ours"][0].astype(jnp.float32)).max()
            assert error < 0.1 and jnp.allclose(lse, results["ours"][1], atol=1e-5)
        wait = {}
        if peer := fa3_combine(out_partial, lse_partial):
            contenders["fa3"], wait["fa3"] = peer
        moved = nbytes(results["ours"], out_partial, lse_partial)
        del results
        clock = timing.Clock(contenders | {"copy": copy}, wait)
        report(rows, f"combine {splits} splits", clock, rounds, REPEATS * moved, copy_bytes)


def draw(result, path):
    """Bar charts of all rows, a chart per operation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for ax, operation in zip(axes, ("epilogue", "combine"), strict=True):
        rows = [row for row in result["rows"] if row["name"].startswith(operation)]
        speeds = [row["device"]["gb_per_s"] for row in rows]
        contenders = sorted({k for s in speeds for k in s} - {"copy"}, key=lambda k: k != "ours")
        width = 0.8 / len(contenders)
        for i, contender in enumerate(contenders):
            at = [n + i * width for n, speed in enumerate(speeds) if contender in speed]
            speed = [speed[contender] for speed in speeds if contender in speed]
            ax.bar(at, speed, width, label=contender)
        copy = result["rows"][0]["device"]["gb_per_s"]["copy"]
        ax.axhline(copy, color="black", linewidth=1, label="device copy")
        names = [row["name"].removeprefix(operation + " ") for row in rows]
        ax.set_xticks([n + 0.4 - width / 2 for n in range(len(rows))], names, rotation=20)
        ax.set_ylabel("GB/s of device time")
        ax.set_title(operation)
        ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=5)
    figure.savefig(path, dpi=120)


def main():
    """Measure, write, draw, as the command line says."""
    parser = command_line.parser(__doc__, rounds=11)
    parser.add_argument("--only", choices=("epilogue", "combine"))
    arguments = parser.parse_args()

    def measure():
        rows = []
        if arguments.only != "combine":
            measure_epilogue(rows, arguments.rounds)
        if arguments.only != "epilogue":
            measure_combine(rows, arguments.rounds)
        return {"rows": rows}

    command_line.run(arguments, measure, draw)


if __name__ == "__main__":
    main()
