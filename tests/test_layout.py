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


@pytest.mark.parametrize("span", [32, 64, 128])
def test_swizzle_permutes_units_of_16_bytes(span):
    offsets = np.array([maps.swizzle(i, span) for i in range(8 * 128)])
    assert sorted(offsets) == list(range(8 * 128))
    assert (offsets % 16 == np.arange(8 * 128) % 16).all()
    assert (offsets // span == np.arange(8 * 128) // span).all(), "stays in its row"


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block_m", BLOCKS)
def test_output_tile_is_a_bijection_without_bank_conflicts(head_dim, block_m):
    offsets = np.array(
        [
            [maps.output_offset_bytes(row, column, block_m, head_dim) for column in range(head_dim)]
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
def test_accumulator_stage_is_a_bijection(head_dim):
    block_m = 64
    offsets = [
        maps.acc_offset_bytes(row, column, block_m)
        for row in range(block_m)
        for column in range(head_dim)
    ]
    assert sorted(offsets) == list(range(0, 4 * block_m * head_dim, 4))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_accumulator_reads_have_at_most_two_way_conflicts(head_dim):
    """A half warp reads 16 x 8 bytes at once: 1 wavefront is ideal, the swizzle reaches 2."""
    for index in range(0, head_dim // 2, 2):
        for half in range(2):
            words = []
            for thread in range(16 * half, 16 * half + 16):
                row, column = maps.accumulator_coordinate(thread, index)
                words += [maps.acc_offset_bytes(row, column, 64) // 4 + i for i in (0, 1)]
            assert np.bincount(np.array(words) % 32).max() <= 2
