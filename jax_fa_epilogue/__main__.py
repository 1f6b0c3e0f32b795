"""``python -m jax_fa_epilogue``: show what this installation can do, and check that it does it.

Prints the version, the kernels built and the devices found, runs attention forward and backward,
the epilogue in each of its modes and combine on one device, and compares every result with NumPy
float64. Exits with status 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fa_epilogue as fa
from jax_fa_epilogue import _native

# Largest accepted error (see `_error`), by dtype of the result.
_LIMITS = {"bfloat16": 5e-2, "float32": 1e-3}
_NUM_SPLITS = 4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Extents of every check: `heads` of the queries, `heads_kv` of keys and values."""

    batch: int
    seqlen: int
    heads: int
    heads_kv: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.heads_kv


_QUICK = Sizes(batch=1, seqlen=256, heads=4, heads_kv=2, head_dim=64)
_CPU = Sizes(batch=1, seqlen=2048, heads=8, heads_kv=2, head_dim=128)
_GPU = Sizes(batch=2, seqlen=4096, heads=16, heads_kv=4, head_dim=128)


@dataclasses.dataclass(frozen=True)
class Check:
    """One function on one set of arguments.

    Attributes:
      name: what the table shows.
      function: a JAX function of `arguments`, returning a tuple of arrays.
      arguments: host arrays.
      pairs: from the results to the pairs (result or a part of it, float64 value it should have).
    """

    name: str
    function: Callable[..., tuple[jax.Array, ...]]
    arguments: tuple[np.ndarray, ...]
    pairs: Callable[[tuple[np.ndarray, ...]], list[tuple[np.ndarray, np.ndarray]]]


def _error(got: np.ndarray, want: np.ndarray) -> float:
    """Distance of the worst row (last axis), in units of the root mean square norm of a row."""
    if got.shape != want.shape:
        return math.inf
    got = got.astype(np.float64)
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        return math.inf
    if not np.isfinite(got[finite]).all():
        return math.inf
    want = np.where(finite, want, 0.0)
    distance = np.linalg.norm(np.where(finite, got, 0.0) - want, axis=-1)
    scale = math.sqrt(np.mean(np.linalg.norm(want, axis=-1) ** 2))
    return float(distance.max() / scale) if scale else float(distance.max())


# ---- Attention ----------------------------------------------------------------------------------


def _direct_attention(q, k, v, do, dlse):
    """Causal attention of one head and its gradients, naively: (S, D) each, dlse (S,), float64."""
    scale = 1 / math.sqrt(q.shape[-1])
    logits = np.where(np.tri(len(q), dtype=bool), scale * (q @ k.T), -np.inf)
    lse = np.logaddexp.reduce(logits, axis=-1)
    p = np.exp(logits - lse[:, None])
    out = p @ v
    ds = p * (do @ v.T - np.sum(do * out, axis=-1, keepdims=True) + dlse[:, None])
    return out, lse, scale * ds @ k, scale * ds.T @ q, p.T @ do


def _attention_checks(sizes: Sizes, rng: np.random.Generator) -> list[Check]:
    """Forward and backward; the last key/value head of the last batch item is compared in full."""

    def random(*shape, dtype=jnp.bfloat16):
        return rng.standard_normal(shape, np.float32).astype(dtype)

    b, s, d = sizes.batch, sizes.seqlen, sizes.head_dim
    q, do = random(b, s, sizes.heads, d), random(b, s, sizes.heads, d)
    k, v = random(b, s, sizes.heads_kv, d), random(b, s, sizes.heads_kv, d)
    dlse = random(b, sizes.heads, s, dtype=np.float32)
    group = slice(sizes.heads - sizes.group, sizes.heads)

    def forward(q, k, v):
        return fa.flash_attention(q, k, v, causal=True, return_lse=True)

    def backward(q, k, v, do, dlse):
        return jax.vjp(forward, q, k, v)[1]((do, dlse))

    @functools.cache
    def expected():
        k64, v64 = (x[-1, :, -1].astype(np.float64) for x in (k, v))
        heads = [
            _direct_attention(
                q[-1, :, h].astype(np.float64),
                k64,
                v64,
                do[-1, :, h].astype(np.float64),
                dlse[-1, h],
            )
            for h in range(group.start, group.stop)
        ]
        out, lse, dq, dk, dv = (np.stack(x) for x in zip(*heads, strict=True))
        return out.swapaxes(0, 1), lse, dq.swapaxes(0, 1), dk.sum(0), dv.sum(0)

    def forward_pairs(results):
        out, lse, *_ = expected()
        return [(results[0][-1, :, group], out), (results[1][-1, group], lse)]

    def backward_pairs(results):
        *_, dq, dk, dv = expected()
        parts = results[0][-1, :, group], results[1][-1, :, -1], results[2][-1, :, -1]
        return list(zip(parts, (dq, dk, dv), strict=True))

    return [
        Check("flash_attention, causal, forward", forward, (q, k, v), forward_pairs),
        Check("flash_attention, causal, backward", backward, (q, k, v, do, dlse), backward_pairs),
    ]


# ---- Epilogue and combine -----------------------------------------------------------------------


def _unpack_rows(x: np.ndarray, group: int) -> np.ndarray:
    """(.., Hk, S * G, ...) -> (.., Hk * G, S, ...), for x of shape (B, Hk, S * G[, D])."""
    b, heads_kv, rows, *rest = x.shape
    x = x.reshape(b, heads_kv, rows // group, group, *rest).swapaxes(2, 3)
    return x.reshape(b, heads_kv * group, rows // group, *rest)


def _epilogue_checks(sizes: Sizes, rng: np.random.Generator) -> list[Check]:
    b, rows, d, group = sizes.batch, sizes.seqlen, sizes.head_dim, sizes.group
    shape = (b, sizes.heads, rows)
    acc = rng.standard_normal((*shape, d), np.float32)
    row_max = rng.standard_normal(shape, np.float32)
    row_sum = rng.uniform(8, 16, shape).astype(np.float32)
    row_sum[:, :, -1] = 0  # rows that saw no key

    acc64, max64, sum64 = (x.astype(np.float64) for x in (acc, row_max, row_sum))
    empty = sum64 == 0
    safe_sum = np.where(empty, 1, sum64)
    out = np.where(empty[..., None], 0, acc64 / safe_sum[..., None])
    lse = np.where(empty, -np.inf, max64 + np.log(safe_sum))

    def check(mode, out, lse, arguments=(acc, row_max, row_sum), **keywords):
        def function(acc, row_max, row_sum, *cu_seqlens):
            more = {"cu_seqlens": cu_seqlens[0]} if cu_seqlens else {}
            return fa.epilogue(acc, row_max=row_max, row_sum=row_sum, **more, **keywords)

        return Check(
            f"epilogue, {mode}", function, arguments, lambda got: [(got[0], out), (got[1], lse)]
        )

    # Sequences of falling length: row r of sequence i is token starts[i] + r.
    lengths = np.array([rows - i * rows // (2 * b) for i in range(b)])
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    packed_out, packed_lse = _unpack_rows(out, group), _unpack_rows(lse, group)
    varlen_out = np.concatenate([out[i, :, :n].swapaxes(0, 1) for i, n in enumerate(lengths)])
    varlen_lse = np.concatenate([lse[i, :, :n] for i, n in enumerate(lengths)], axis=-1)
    columns = np.arange(d)
    permuted = columns // 16 * 16 + 8 * (columns & 1) + columns % 16 // 2
    splits = tuple(np.stack([x, x[::-1]]) for x in (acc, row_max, row_sum))

    return [
        check("dense", out.swapaxes(1, 2), lse),
        check("dense, float32", out.swapaxes(1, 2), lse, out_dtype=jnp.float32),
        check("packed heads", packed_out.swapaxes(1, 2), packed_lse, qhead_per_khead=group),
        check(
            "variable length",
            varlen_out,
            varlen_lse,
            (acc, row_max, row_sum, starts),
            total_q=int(starts[-1]),
        ),
        check(
            "two splits",
            np.stack([out, out[::-1]]).swapaxes(2, 3),
            np.stack([lse, lse[::-1]]),
            splits,
        ),
        check(
            "fp8 column order",
            out[..., permuted].swapaxes(1, 2),
            lse,
            fp8_permuted_columns=True,
        ),
    ]


def _combine_checks(sizes: Sizes, rng: np.random.Generator) -> list[Check]:
    shape = (_NUM_SPLITS, sizes.batch, sizes.seqlen, sizes.heads)
    out_partial = rng.standard_normal((*shape, sizes.head_dim), np.float32)
    lse_partial = rng.standard_normal(shape, np.float32).swapaxes(2, 3).copy()
    lse_partial[0, ..., ::3] = -np.inf  # a split without keys
    lse_partial[..., -1] = -np.inf  # a row without keys

    def pairs(results):
        lse = np.logaddexp.reduce(lse_partial.astype(np.float64), axis=0)
        weights = np.exp(lse_partial - np.where(np.isinf(lse), 0, lse))
        out = np.einsum("nbhs,nbshd->bshd", weights, out_partial.astype(np.float64))
        return [(results[0], out), (results[1], lse)]

    def function(out_partial, lse_partial):
        return fa.combine(out_partial, lse_partial, out_dtype=jnp.bfloat16)

    return [Check(f"combine, {_NUM_SPLITS} splits", function, (out_partial, lse_partial), pairs)]


# ---- Running and printing -----------------------------------------------------------------------


def _run(check: Check, device: Any) -> tuple[str, float, float, bool]:
    """Run one check: what ran, seconds per call after compilation, worst error, right or not."""
    arguments = jax.device_put(check.arguments, device)
    lowered = jax.jit(check.function).lower(*arguments)
    what_ran = "CUDA" if "@jax_fa_epilogue_" in lowered.as_text() else "XLA"
    compiled = lowered.compile()
    jax.block_until_ready(compiled(*arguments))
    repeats = 5 if device.platform != "cpu" else 1
    start = time.perf_counter()
    for _ in range(repeats):
        results = jax.block_until_ready(compiled(*arguments))
    seconds = (time.perf_counter() - start) / repeats

    errors = [
        (_error(got, want), _LIMITS[got.dtype.name])
        for got, want in check.pairs(tuple(np.asarray(x) for x in results))
    ]
    right = all(error <= limit for error, limit in errors)
    return what_ran, seconds, max(error for error, _ in errors), right


def _print_installation() -> None:
    kernels = _native.kernels()
    built = sum(kernel["built"] for kernel in kernels)
    if _native.cuda_built:
        major, minor = divmod(_native.cuda_version() // 10, 100)
        about = f"{built} of {len(kernels)} for sm_90a, CUDA {major}.{minor}"
    else:
        about = "none (built without CUDA)"
    print(
        f"jax_fa_epilogue {fa.__version__}, jax {jax.__version__}, "
        f"Python {platform.python_version()}"
    )
    print(f"kernels  {about}")
    print("devices  " + ", ".join(f"{x} ({x.device_kind})" for x in jax.devices()))


def _choose_device(platform_name: str | None) -> Any:
    if platform_name is not None:
        return jax.devices(platform_name)[0]
    return jax.devices()[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; `arguments` as on the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jax_fa_epilogue", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small shapes, a few seconds")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: the best there is")
    options = parser.parse_args(arguments)

    _print_installation()
    try:
        device = _choose_device(options.device)
    except RuntimeError as error:
        print(f"no {options.device} device: {error}", file=sys.stderr)
        return 2
    sizes = _QUICK if options.quick else _CPU if device.platform == "cpu" else _GPU
    print(
        f"checks   on {device}: batch {sizes.batch}, sequence length {sizes.seqlen}, "
        f"{sizes.heads} query and {sizes.heads_kv} key/value heads of {sizes.head_dim}, bfloat16\n"
    )

    rng = np.random.default_rng(0)
    checks = [make for build in _CHECKS for make in build(sizes, rng)]
    width = max(len(check.name) for check in checks)
    print(f"{'':{width}}  ran    ms/call    error")
    wrong = 0
    for check in checks:
        note = threading.Timer(
            2.0, print, [f"... {check.name}"], {"file": sys.stderr, "flush": True}
        )
        note.start()
        try:
            what_ran, seconds, error, right = _run(check, device)
        finally:
            note.cancel()
        wrong += not right
        verdict = "" if right else "  WRONG"
        print(
            f"{check.name:{width}}  {what_ran:4} {1e3 * seconds:9.2f}  {error:7.1e}{verdict}",
            flush=True,
        )
    print()
    if wrong:
        print(f"{wrong} of {len(checks)} results are wrong")
        return 1
    print("All results agree with NumPy float64. Speed: see benchmarks/.")
    return 0


_CHECKS = (_attention_checks, _epilogue_checks, _combine_checks)

if __name__ == "__main__":
    sys.exit(main())
