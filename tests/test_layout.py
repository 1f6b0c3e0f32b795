"""The kernels' index maps, exhaustively: fragments, swizzles, column order, packed rows."""

from __future__ import annotations

import numpy as np
import pytest

from jax_fa_epilogue import _native

maps = _native.index_maps
HEAD_DIMS = (64, 96, 128, 192, 256)
BLOCKS = (64, 128, 192)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block_m", BLOCKS)
def test_accumulator_fragment_is_a_bijection(head_dim, block_m):
    seen = np.zeros((block_m, head_dim), int)
    for thread in range(2 * block_m):
        for index in range(head_dim // 2):
            row, column = maps.accumulator_coordinate(thread, index)
            seen[row, column] += 1
            # PTX ISA, wgmma m64nNk accumulator: a warp has 16 rows, a quad 8 columns of one row.
            assert row // 16 == thread // 32 and row % 8 == thread % 32 // 4
            assert column % 8 // 2 == thread % 4
    assert (seen == 1).all()


def test_fp8_column_order():
    column = [maps.fp8_output_column(n) for n in range(256)]
    assert sorted(column) == list(range(256))
    for d in range(256):  # out[d] = acc[8 * (d & 1) + (d >> 1)] within each 16
        assert column[d // 16 * 16 + 8 * (d & 1) + (d % 16 >> 1)] == d


def test_fp8_columns_of_a_thread_are_contiguous():
    """What the epilogue relies on: after a 2 x 2 swap lane q of a quad has columns 4q to 4q + 3."""
    for thread in range(32):
        for group in range(0, 128, 8):
            columns = [
                maps.fp8_output_column(maps.accumulator_coordinate(thread, group + i)[1])
                for i in (0, 4, 1, 5)
            ]
            first = columns[0]
            assert columns == [first, first + 1, first + 2, first + 3]
            assert first % 16 == 4 * (thread % 4)


@pytest.mark.parametrize("span", [64, 128])
def test_swizzle_permutes_units_of_16_bytes(span):
    offsets = np.array([maps.swizzle(i, span) for i in range(8 * 128)])
    assert sorted(offsets) == list(range(8 * 128))
    assert (offsets % 16 == np.arange(8 * 128) % 16).all()
    assert (offsets // span == np.arange(8 * 128) // span).all(), "stays in its row"


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block_m", BLOCKS)
def test_swizzled_tile_is_a_bijection_without_bank_conflicts(head_dim, block_m):
    offsets = np.array(
        [
            [maps.panel_offset_bytes(row, column, block_m, head_dim) for column in range(head_dim)]
            for row in range(block_m)
        ]
    )
    assert sorted(offsets.ravel()) == list(range(0, 2 * block_m * head_dim, 2))
    assert (np.diff(offsets.reshape(block_m, -1, 8), axis=2) == 2).all(), "16 bytes stay together"
    # One stmatrix phase writes 8 rows of one 16-byte unit: they must hit different banks.
    units = offsets[:, ::8]
    for first in range(0, block_m, 8):
        for unit in range(head_dim // 8):
            banks = units[first : first + 8, unit] % 128 // 16
            assert len(set(banks)) == 8


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_accumulator_rows_do_not_overlap(head_dim):
    pitch = maps.acc_offset_bytes(1, 0, head_dim)
    assert pitch >= 4 * head_dim and pitch % 16 == 0, "bulk copies write whole units of 16 bytes"
    for row in range(64):
        for column in range(head_dim):
            assert maps.acc_offset_bytes(row, column, head_dim) == row * pitch + 4 * column


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_accumulator_reads_have_no_bank_conflicts(head_dim):
    """A half warp reads 16 x 8 bytes at once: they must cover all 32 banks."""
    for index in range(0, head_dim // 2, 2):
        for half in range(2):
            words = []
            for thread in range(16 * half, 16 * half + 16):
                row, column = maps.accumulator_coordinate(thread, index)
                words += [maps.acc_offset_bytes(row, column, head_dim) // 4 + i for i in (0, 1)]
            assert sorted(word % 32 for word in words) == list(range(32))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_output_rows_lie_in_those_of_the_accumulator(head_dim, element_bytes):
    """A bulk copy reads a row whole: contiguous, aligned to 16 bytes, and no other row's."""
    for row in range(16):
        offsets = [maps.acc_offset_bytes(row, c, head_dim, element_bytes) for c in range(head_dim)]
        first = maps.acc_offset_bytes(row, 0, head_dim)
        assert offsets == list(range(first, first + element_bytes * head_dim, element_bytes))
        assert first % 16 == 0
        assert offsets[-1] + element_bytes <= maps.acc_offset_bytes(row + 1, 0, head_dim)


@pytest.mark.parametrize(
    "offsets", [(0,), (0, 0), (0, 5), (0, 3, 3, 7, 7), (2, 4, 9), tuple(range(40))]
)
def test_find_sequence(offsets):
    sequences = len(offsets) - 1
    for token in range(-1, offsets[-1] + 2):
        found = maps.find_sequence(list(offsets), token)
        holding = [b for b in range(sequences) if offsets[b] <= token < offsets[b + 1]]
        assert found == (holding[0] if holding else -1 if token < offsets[0] else sequences)


@pytest.mark.parametrize("seed", range(20))
def test_find_sequence_keeps_its_promise_on_offsets_that_lie(seed):
    offsets = [int(x) for x in np.random.default_rng(seed).integers(-5, 20, 9)]
    for token in range(20):
        found = maps.find_sequence(offsets, token)
        if 0 <= found < len(offsets) - 1:
            assert offsets[found] <= token < offsets[found + 1]


WINDOWS = [(-1, -1), (-1, 0), (0, 0), (3, -1), (2, 5), (0, 40), (40, 0)]
LENGTHS = [(0, 4), (4, 0), (1, 9), (9, 1), (7, 7), (5, 23), (23, 5)]


def brute_force_keys(window, shift, seqlen_k, query):
    left, right = window
    return [
        j
        for j in range(seqlen_k)
        if (left == -1 or j >= query + shift - left) and (right == -1 or j <= query + shift + right)
    ]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("top_left", [False, True])
def test_forward_visits_the_visible_keys(window, lengths, top_left):
    seqlen_q, seqlen_k = lengths
    shift = 0 if top_left else seqlen_k - seqlen_q
    for query in range(seqlen_q):
        begin, end = maps.visible_keys(*window, shift, seqlen_k, query)
        assert list(range(begin, end)) == brute_force_keys(window, shift, seqlen_k, query)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("top_left", [False, True])
def test_forward_key_blocks(window, lengths, top_left):
    """Every block with a visible key is visited; blocks without a mask are seen whole by all."""
    seqlen_q, seqlen_k = lengths
    shift = 0 if top_left else seqlen_k - seqlen_q
    block_m, block_n = 4, 3
    for first in range(0, seqlen_q, block_m):
        last = min(first + block_m, seqlen_q) - 1
        begin, end, full_begin, full_end = maps.key_blocks(
            *window, shift, seqlen_k, first, last, block_n
        )
        keys = [brute_force_keys(window, shift, seqlen_k, i) for i in range(first, last + 1)]
        needed = {j // block_n for row in keys for j in row}
        assert needed <= set(range(begin, end))
        for block in range(max(begin, full_begin), min(end, full_end)):
            whole = set(range(block * block_n, (block + 1) * block_n))
            assert all(whole <= set(row) for row in keys)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("num_splits", [1, 2])
def test_rows_of_a_forward_tile_leave_out_only_what_they_do_not_see(window, lengths, num_splits):
    seqlen_q, seqlen_k = lengths
    shift = seqlen_k - seqlen_q
    block_m, share_m, block_n = 6, 2, 3
    for tile_first in range(0, seqlen_q, block_m):
        tile_last = min(tile_first + block_m, seqlen_q) - 1
        of_tile = maps.key_blocks(*window, shift, seqlen_k, tile_first, tile_last, block_n)
        for split in range(num_splits):
            tile = maps.split_blocks(*of_tile[:2], split, num_splits)
            if tile[1] <= tile[0]:
                continue
            for first in range(tile_first, tile_first + block_m, share_m):
                last = min(first + share_m - 1, tile_last)
                own = maps.key_blocks(*window, shift, seqlen_k, first, last, block_n)
                begin, end, full_begin, full_end = maps.share_of_rows(*tile, *own)
                assert begin == tile[0] < end <= tile[1]
                keys = [
                    brute_force_keys(window, shift, seqlen_k, i) for i in range(first, last + 1)
                ]
                seen = {j // block_n for row in keys for j in row}
                assert seen & set(range(*tile)) <= set(range(begin, end))
                if end < tile[1]:
                    assert end - 1 in seen or end == begin + 1, "as many as possible are left out"
                for block in range(max(begin, full_begin), min(end, full_end)):
                    whole = set(range(block * block_n, (block + 1) * block_n))
                    assert all(whole <= set(row) for row in keys)


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize(
    ("row_blocks", "heads", "section"), [(1, 1, 1), (5, 7, 3), (4, 6, 6), (3, 8, 1)]
)
def test_forward_tile_order_is_a_bijection(row_blocks, heads, section, last_first):
    order = [
        maps.tile_position(row_blocks, heads, section, last_first, tile)
        for tile in range(row_blocks * heads)
    ]
    assert sorted(order) == [(m, h) for m in range(row_blocks) for h in range(heads)]
    sections = [head // section for _, head in order]
    assert sections == sorted(sections), "a section's heads come together"


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 256])
@pytest.mark.parametrize("blocks", [(0, 0), (5, 5), (3, 4), (0, 7), (2, 16), (1, 300)])
def test_splits_share_the_key_blocks(blocks, num_splits):
    shares = [maps.split_blocks(*blocks, split, num_splits) for split in range(num_splits)]
    visited = [block for begin, end in shares for block in range(begin, end)]
    assert visited == list(range(*blocks))
    most = -(-(blocks[1] - blocks[0]) // num_splits)
    assert all(end - begin <= most for begin, end in shares)


@pytest.mark.parametrize(("outer", "splits", "inner"), [(1, 1, 1), (3, 4, 5), (2, 1, 3), (1, 6, 1)])
def test_partial_results_lie_outside_the_innermost_batch_axis(outer, splits, inner):
    expected = np.arange(outer * splits * inner).reshape(outer, splits, inner)
    for batch in range(outer * inner):
        for split in range(splits):
            found = maps.partial_batch(batch, split, splits, inner)
            assert found == expected[batch // inner, split, batch % inner]


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 65, 1000, 1055, 1056, 1057, 33000])
@pytest.mark.parametrize("step", [1, 40, 5000])
def test_window_moves_to_the_segment_of_each_tile(count, step):
    ends = np.cumsum(np.random.default_rng(count).integers(1, 4, count))
    base = 0
    for tile in range(0, int(ends[-1]), step):
        while ends[min(base + 31, count - 1)] <= tile:
            probes = [ends[maps.window_probe(base, lane, count)] for lane in range(32)]
            base = maps.next_window(base, next((i for i in range(32) if probes[i] > tile), 32))
            assert base < count
        assert base == 0 or ends[base - 1] <= tile, "the window begins at or before the tile"


def test_work_classes_grow_with_the_keys():
    classes = [maps.work_class(n) for n in (0, 1, 64, 65, 128, 129, 256, 257, 2**30)]
    assert classes == [0, 1, 1, 2, 2, 2, 3, 3, 25]
    everything = [maps.work_class(n) for n in range(3000)]
    assert everything == sorted(everything) and max(classes) < 32
