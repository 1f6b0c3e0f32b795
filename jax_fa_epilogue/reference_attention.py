"""Attention of the reference, tile by tile; apart from ``reference.py`` to keep both short.

    logit = softcap(softmax_scale * q.k)          over the keys that a row sees
    lse   = log(sum(exp(logit)))                  natural logarithm, -inf for a row that sees no key
    out   = sum(exp(logit - lse) * v)             0 for such a row

Queries are cut into tiles, each within one sequence; a tile walks over the tiles of its own
sequence's keys with a running maximum and sum (online softmax), so that memory stays linear in the
sequence length:

    tile 0   k0            causal: a tile stops where its last row's keys end,
    tile 1   k0 k1         and with a window it starts where its first row's keys start
    tile 2   k0 k1 k2

The backward pass recomputes the weights from lse, once per tile of queries (dq) and once per tile
of keys (dk, dv); ``delta = rowsum(dout * out) - dlse`` is all that a gradient through lse costs.

Arrays are q (*b, Hk, G, Tq, D), k (*b, Hk, Tk, D), v (*b, Hk, Tk, Dv): batch axes and key/value
heads stay plain batch axes of every product, so that sharding over them needs no communication.
Dense attention is the case of a single sequence with batch axes; packed attention has many
sequences and no batch axes. Rows of a tile outside its sequence are replaced by 0 before any
product, since 0 * NaN is NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_fa_epilogue.varying import match_varying

_BLOCK_Q = 128
_BLOCK_K = 256


class Sequences(NamedTuple):
    """Where the sequences lie; all int32.

    There is at least one, and they lie in order. ``len_*`` may carry the batch axes in front; then
    they only mask.
    """

    start_q: jax.Array  # (S,) first row in the buffer
    start_k: jax.Array  # (S,)
    rows_q: jax.Array  # (S,) rows to walk over
    rows_k: jax.Array  # (S,)
    len_q: jax.Array  # (*b, S) rows in use, at most rows_q
    len_k: jax.Array  # (*b, S)
    keys: jax.Array  # (2,) positions [begin, end) of the keys to look at, in each sequence


@dataclasses.dataclass(frozen=True)
class Options:
    """Static facts of a call."""

    softmax_scale: float
    softcap: float
    window_left: int
    window_right: int
    top_left: bool
    packed: bool  # rows of the buffer are not the rows of one sequence
    out_dtype: np.dtype
    block_q: int
    block_k: int
    num_tiles_q: int
    num_tiles_k: int


def tiling(
    count: Any, total_q: Any, total_k: Any, longest_q: Any, longest_k: Any
) -> dict[str, Any]:
    """Choose the tiles for `count` sequences in buffers of `total_*` rows: fields of ``Options``.

    Each sequence may end with a partial tile; tiles about as long as the mean sequence keep what
    these waste proportional to the buffer.
    """

    def side(total: Any, longest: Any, block: int) -> tuple[int, Any]:
        if not all(isinstance(n, int) for n in (count, total, longest)):
            return block, count * _cdiv(longest, block)
        mean = _cdiv(total, max(count, 1))
        block = max(1, min(block, longest, 1 << max(mean - 1, 0).bit_length()))
        return block, max(1, min(total // block + count, count * _cdiv(longest, block)))

    block_q, num_tiles_q = side(total_q, longest_q, _BLOCK_Q)
    block_k, num_tiles_k = side(total_k, longest_k, _BLOCK_K)
    return {
        "block_q": block_q,
        "block_k": block_k,
        "num_tiles_q": num_tiles_q,
        "num_tiles_k": num_tiles_k,
    }


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(
    options: Options, q: jax.Array, k: jax.Array, v: jax.Array, sequences: Sequences
) -> tuple[jax.Array, jax.Array]:
    """Return out (*b, Hk, G, Tq, Dv) in options.out_dtype and lse (*b, Hk, G, Tq) float32."""
    return _forward(options, q, k, v, sequences)


def _forward(
    options: Options, q: jax.Array, k: jax.Array, v: jax.Array, sequences: Sequences
) -> tuple[jax.Array, jax.Array]:
    tiles_q, tiles_k = _sides(options, sequences)
    total_q, width = q.shape[-2], v.shape[-1]
    # Zeros, whatever v holds, that make lse depend on v: under a vmap over v alone, jax.custom_vjp
    # would count the cotangent of a result without the mapped axis once per index.
    of_v = v[..., :0, :0].astype(jnp.float32).sum(axis=(-2, -1))[..., None, None]
    q, k, v = tiles_q.pad(q), tiles_k.pad(k), tiles_k.pad(v)

    def query_tile(position: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        sequence, row = position
        q_tile = tiles_q.load(q, sequence, row)

        def key_tile(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, row_max, row_sum = state
            key = index * options.block_k
            k_tile = tiles_k.load(k, sequence, key)
            v_tile = tiles_k.load(v, sequence, key)
            visible = _visible(options, sequences, sequence, row, key)
            logits = jnp.where(visible, _logits(options, q_tile, k_tile), -jnp.inf)
            new_max = jnp.maximum(row_max, logits.max(axis=-1))
            # Where no key was seen yet the maximum is -inf, and -inf - -inf is NaN.
            shift = jnp.where(new_max == -jnp.inf, 0.0, new_max)
            weights = jnp.exp(logits - shift[..., None])
            rescale = jnp.exp(row_max - shift)
            acc = acc * rescale[..., None] + _product("...gqk,...kd->...gqd", weights, v_tile)
            return acc, new_max, row_sum * rescale + weights.sum(axis=-1)

        zero = _zeros(q_tile)
        acc = jnp.broadcast_to(zero, (*zero.shape[:-1], width))
        state = (acc, zero[..., 0] - jnp.inf, zero[..., 0])
        key_tiles = _key_tiles(options, sequences, sequence, row)
        acc, row_max, row_sum = lax.fori_loop(*key_tiles, key_tile, state)
        empty = row_sum == 0
        row_sum = jnp.where(empty, 1.0, row_sum)
        out = jnp.where(empty[..., None], 0.0, acc / row_sum[..., None])
        lse = jnp.where(empty, -jnp.inf, row_max + jnp.log(row_sum))
        return out.astype(options.out_dtype), lse[..., None]

    out, lse = lax.map(query_tile, tiles_q.positions())
    out, lse = tiles_q.rows(out, total_q), tiles_q.rows(lse, total_q, fill=-jnp.inf)[..., 0]
    return _as_varying(out, q), _as_varying(lse + of_v, q)


def _forward_rule(
    options: Options, q: jax.Array, k: jax.Array, v: jax.Array, sequences: Sequences
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    out, lse = _forward(options, q, k, v, sequences)
    out = checkpoint_name(out, "flash_attention_out")
    lse = checkpoint_name(lse, "flash_attention_lse")
    return (out, lse), (q, k, v, sequences, out, lse)


def _backward_rule(
    options: Options, residuals: tuple[Any, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    return (*backward(options, *residuals, *cotangents), None)


def backward(
    options: Options,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sequences: Sequences,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of q, k and v from the results and their cotangents."""
    total_q, total_k = q.shape[-2], k.shape[-2]
    dtypes = q.dtype, k.dtype, v.dtype
    # What rows without a key hold, and their cotangents, may be anything: 0 from here on. Their lse
    # becomes +inf, which makes every weight exp(logit - lse) vanish.
    lse = lse[..., None]
    empty = lse == -jnp.inf
    dout = jnp.where(empty, 0.0, dout.astype(jnp.float32))
    delta = (dout * out.astype(jnp.float32)).sum(axis=-1, keepdims=True) - dlse[..., None]
    delta = jnp.where(empty, 0.0, delta)
    lse = jnp.where(empty, jnp.inf, lse)
    q = jnp.where(empty, jnp.zeros((), q.dtype), q)

    tiles_q, tiles_k = _sides(options, sequences)
    queries = tuple(tiles_q.pad(x) for x in (q, dout, lse, delta))
    k, v = tiles_k.pad(k), tiles_k.pad(v)

    def recompute(
        sequence: jax.Array, row: jax.Array, key: jax.Array, queries: Any, k_tile: Any, v_tile: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Return the weights p and the gradient ds of softmax_scale * q.k, both (..., G, q, k)."""
        q_tile, dout_tile, lse_tile, delta_tile = queries
        visible = _visible(options, sequences, sequence, row, key)
        logits = _logits(options, q_tile, k_tile)
        p = jnp.where(visible, jnp.exp(logits - lse_tile), 0.0)
        ds = p * (_product("...gqd,...kd->...gqk", dout_tile, v_tile) - delta_tile)
        if options.softcap:
            ds = ds * (1.0 - jnp.square(logits / options.softcap))
        return p, jnp.where(visible, ds, 0.0)

    def query_tile(position: tuple[jax.Array, jax.Array]) -> jax.Array:
        sequence, row = position
        tile = tuple(tiles_q.load(x, sequence, row) for x in queries)

        def key_tile(index: jax.Array, dq: jax.Array) -> jax.Array:
            key = index * options.block_k
            k_tile = tiles_k.load(k, sequence, key)
            v_tile = tiles_k.load(v, sequence, key)
            _, ds = recompute(sequence, row, key, tile, k_tile, v_tile)
            return dq + _product("...gqk,...kd->...gqd", ds, k_tile)

        start = jnp.broadcast_to(_zeros(tile[0]), tile[0].shape)
        dq = lax.fori_loop(*_key_tiles(options, sequences, sequence, row), key_tile, start)
        return (dq * options.softmax_scale).astype(dtypes[0])

    def key_tile(position: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        sequence, key = position
        k_tile = tiles_k.load(k, sequence, key)
        v_tile = tiles_k.load(v, sequence, key)

        def query_tile(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            row = index * options.block_q
            tile = tuple(tiles_q.load(x, sequence, row) for x in queries)
            p, ds = recompute(sequence, row, key, tile, k_tile, v_tile)
            dk = state[0] + _product("...gqk,...gqd->...kd", ds, tile[0])
            return dk, state[1] + _product("...gqk,...gqd->...kd", p, tile[1])

        start = tuple(jnp.broadcast_to(_zeros(x), x.shape) for x in (k_tile, v_tile))
        query_tiles = _query_tiles(options, sequences, sequence, key)
        dk, dv = lax.fori_loop(*query_tiles, query_tile, start)
        return (dk * options.softmax_scale).astype(dtypes[1]), dv.astype(dtypes[2])

    dq = lax.map(query_tile, tiles_q.positions())
    dk, dv = lax.map(key_tile, tiles_k.positions())
    dq, dk, dv = tiles_q.rows(dq, total_q), tiles_k.rows(dk, total_k), tiles_k.rows(dv, total_k)
    return dq, dk, dv


attention.defvjp(_forward_rule, _backward_rule)


def attention_with_bias(
    options: Options,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    sequences: Sequences,
) -> tuple[jax.Array, jax.Array]:
    """Return what ``attention`` does for dense q, k and v, with a bias and a mask of the logits.

    `bias` (float) and `mask` (bool) have five axes, each of size 1 or that of the logits
    (B, Hk, G, Tq, Tk). A tile of queries meets all keys at once, and is computed again in the
    backward pass, so that JAX can derive it without keeping more than the operands.
    """
    total_q, total_k = q.shape[-2], k.shape[-2]
    all_keys = dataclasses.replace(options, block_k=total_k, num_tiles_k=1)
    tiles_q, tiles_k = _sides(all_keys, sequences)
    nothing = jnp.zeros((), jnp.int32)
    k, v = (tiles_k.load(x, nothing, nothing) for x in (k, v))
    inside = jnp.arange(total_q, dtype=jnp.int32)[:, None] < sequences.len_q[..., None, None, None]
    q = jnp.where(inside, q, jnp.zeros((), q.dtype))

    def rows_to_tiles(x: jax.Array | None) -> jax.Array | None:
        if x is None or x.shape[-2] == 1 != total_q:
            return None
        x = tiles_q.pad(x)
        x = x.reshape(*x.shape[:-2], options.num_tiles_q, options.block_q, x.shape[-1])
        return jnp.moveaxis(x, -3, 0)

    @jax.checkpoint
    def query_tile(tile: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        row, q_tile, bias_tile, mask_tile = tile
        visible = _visible(all_keys, sequences, nothing, row, nothing)
        if mask is not None:
            visible &= mask if mask_tile is None else mask_tile
        logits = _logits(options, q_tile.astype(jnp.float32), k)
        if bias is not None:
            logits += (bias if bias_tile is None else bias_tile).astype(jnp.float32)
        logits = jnp.where(visible, logits, -jnp.inf)
        row_max = lax.stop_gradient(logits.max(axis=-1, keepdims=True, initial=-jnp.inf))
        row_max = jnp.where(row_max == -jnp.inf, 0.0, row_max)
        weights = jnp.exp(logits - row_max)
        row_sum = weights.sum(axis=-1, keepdims=True)
        empty = row_sum == 0
        row_sum = jnp.where(empty, 1.0, row_sum)
        out = _product("...gqk,...kd->...gqd", weights, v) / row_sum
        out = jnp.where(empty, 0.0, out).astype(options.out_dtype)
        return out, jnp.where(empty, -jnp.inf, row_max + jnp.log(row_sum))

    _, first_rows = tiles_q.positions()
    tiles = (first_rows, rows_to_tiles(q), rows_to_tiles(bias), rows_to_tiles(mask))
    out, lse = lax.map(query_tile, tiles)
    return tiles_q.rows(out, total_q), tiles_q.rows(lse, total_q)[..., 0]


def locate_rows(
    starts: jax.Array, lengths: jax.Array, total: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return for each row of a packed buffer its sequence, its row there, and whether it has one.

    Sequences (S,), at least one, lie in order. Where a row has none, the first two results hold
    anything, the sequence within 0 to S - 1.
    """
    row = jnp.arange(total, dtype=jnp.int32)
    sequence = _passed(starts + lengths, total)
    local = row - starts[sequence]
    return sequence, local, (local >= 0) & (local < lengths[sequence])


def _passed(ends: jax.Array, total: Any) -> jax.Array:
    """Return for each i below `total` how many of the ascending `ends`, but the last, are <= i."""
    count = jnp.zeros((total,), jnp.int32).at[ends[:-1]].add(1, mode="drop")
    return jnp.cumsum(count, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class _Side:
    """The tiles of the queries or of the keys; all index arithmetic on the buffer is here."""

    packed: bool
    block: int
    num_tiles: Any
    start: jax.Array
    used: jax.Array
    rows_of: jax.Array

    def positions(self) -> tuple[jax.Array, jax.Array]:
        """Return each tile's sequence, and its first row within that sequence."""
        tile = jnp.arange(self.num_tiles, dtype=jnp.int32)
        sequence = _passed(self._tile_ends(), self.num_tiles)
        return sequence, (tile - self._first_tile()[sequence]) * self.block

    def pad(self, x: jax.Array) -> jax.Array:
        """Extend x (..., T, D) so that a tile may begin at every row of a sequence."""
        extra = self.block if self.packed else self.num_tiles * self.block - x.shape[-2]
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, extra), (0, 0)])

    def load(self, x: jax.Array, sequence: jax.Array, row: jax.Array) -> jax.Array:
        """Return a tile of x (*b, ..., T, D) as float32, 0 in rows past the sequence."""
        first = _at(self.start, sequence) + row
        tile = lax.dynamic_slice_in_dim(x, first, self.block, axis=x.ndim - 2)
        length = _at(self.used, sequence)
        length = length.reshape(length.shape + (1,) * (x.ndim - length.ndim))
        inside = row + jnp.arange(self.block, dtype=jnp.int32)[:, None] < length
        return _as_varying(jnp.where(inside, tile.astype(jnp.float32), 0.0), tile)

    def rows(self, tiles: jax.Array, total: Any, fill: float = 0.0) -> jax.Array:
        """Lay tiles (num_tiles, ..., block, D) out as the buffer's rows (..., total, D)."""
        tiles = jnp.moveaxis(tiles, 0, -3)
        axis = tiles.ndim - 3
        tiles = tiles.reshape(*tiles.shape[:-3], self.num_tiles * self.block, tiles.shape[-1])
        if not self.packed:
            return lax.slice_in_dim(tiles, 0, total, axis=axis)
        sequence, row, inside = locate_rows(self.start, self.rows_of, total)
        source = self._first_tile()[sequence] * self.block + jnp.where(inside, row, 0)
        out = jnp.take(tiles, source, axis=axis, mode="clip")
        return jnp.where(inside[:, None], out, jnp.asarray(fill, out.dtype))

    def _tile_ends(self) -> jax.Array:
        return jnp.cumsum(_cdiv(self.rows_of, self.block), dtype=jnp.int32)

    def _first_tile(self) -> jax.Array:
        return self._tile_ends() - _cdiv(self.rows_of, self.block)


def _sides(options: Options, sequences: Sequences) -> tuple[_Side, _Side]:
    """Return the tiles of the queries and of the keys."""
    return (
        _Side(
            options.packed,
            options.block_q,
            options.num_tiles_q,
            sequences.start_q,
            sequences.len_q,
            sequences.rows_q,
        ),
        _Side(
            options.packed,
            options.block_k,
            options.num_tiles_k,
            sequences.start_k,
            sequences.len_k,
            sequences.rows_k,
        ),
    )


def _visible(
    options: Options, sequences: Sequences, sequence: jax.Array, row: jax.Array, key: jax.Array
) -> jax.Array:
    """Return which rows of the tile at `row` see which keys of that at `key`, (*b, 1, 1, q, k)."""
    len_q, len_k = (
        _at(x, sequence)[..., None, None, None, None] for x in (sequences.len_q, sequences.len_k)
    )
    i = row + jnp.arange(options.block_q, dtype=jnp.int32)[:, None]
    j = key + jnp.arange(options.block_k, dtype=jnp.int32)
    visible = (i < len_q) & (j < len_k) & (j >= sequences.keys[0]) & (j < sequences.keys[1])
    ahead = j - i - _shift(options, len_q, len_k)
    if options.window_left >= 0:
        visible &= ahead >= -options.window_left
    if options.window_right >= 0:
        visible &= ahead <= options.window_right
    return visible


def _key_tiles(
    options: Options, sequences: Sequences, sequence: jax.Array, row: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the range of key tiles that holds every key seen from the query tile at `row`."""
    begin = sequences.keys[0]
    end = jnp.minimum(sequences.keys[1], _at(sequences.rows_k, sequence))
    if sequences.len_k.ndim == 1 and sequences.len_q.ndim == 1:
        shift = _shift(options, _at(sequences.len_q, sequence), _at(sequences.len_k, sequence))
        if options.window_left >= 0:
            begin = jnp.maximum(begin, row + shift - options.window_left)
        if options.window_right >= 0:
            end = jnp.minimum(end, row + options.block_q + shift + options.window_right)
    end = jnp.where(row < _at(sequences.rows_q, sequence), jnp.maximum(end, 0), 0)
    return begin // options.block_k, _cdiv(end, options.block_k)


def _query_tiles(
    options: Options, sequences: Sequences, sequence: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the range of query tiles that holds every row which sees the key tile at `key`."""
    begin, end = jnp.zeros((), jnp.int32), _at(sequences.rows_q, sequence)
    if sequences.len_k.ndim == 1 and sequences.len_q.ndim == 1:
        shift = _shift(options, _at(sequences.len_q, sequence), _at(sequences.len_k, sequence))
        if options.window_left >= 0:
            end = jnp.minimum(end, key + options.block_k - shift + options.window_left)
        if options.window_right >= 0:
            begin = jnp.maximum(begin, key - shift - options.window_right)
    looked_at = (key < sequences.keys[1]) & (key + options.block_k > sequences.keys[0])
    looked_at &= key < _at(sequences.rows_k, sequence)
    end = jnp.where(looked_at, jnp.maximum(end, 0), 0)
    return begin // options.block_q, _cdiv(end, options.block_q)


def _shift(options: Options, len_q: jax.Array, len_k: jax.Array) -> jax.Array | int:
    """Return the key position with which a mask's diagonal meets row 0."""
    return 0 if options.top_left else len_k - len_q


def _logits(options: Options, q_tile: jax.Array, k_tile: jax.Array) -> jax.Array:
    logits = _product("...gqd,...kd->...gqk", q_tile, k_tile) * options.softmax_scale
    if options.softcap:
        logits = options.softcap * jnp.tanh(logits / options.softcap)
    return logits


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    # Without this precision an accelerator would round the factors to fewer bits.
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST)


def _zeros(x: jax.Array) -> jax.Array:
    """Return zeros (..., 1), varying and sharded as x (..., n), as a loop's state has to be."""
    zero = jnp.zeros((), jnp.float32)
    return _as_varying(jnp.where(jnp.isnan(x[..., :1]), zero, zero), x)


def _as_varying(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return x as it is, but varying as `like`, which jnp.where forgets of empty arrays."""
    return match_varying((x, like))[0]


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return x[..., index]."""
    return lax.dynamic_index_in_dim(x, index, axis=x.ndim - 1, keepdims=False)


def _cdiv(a: Any, b: int) -> Any:
    return (a + b - 1) // b
