"""Backward plans and index maps: pure functions, checked without a device."""

from __future__ import annotations

import collections
import itertools

import pytest

from jax_fa_epilogue import _native

maps = _native.index_maps

WINDOWS = [(-1, -1), (-1, 0), (0, 0), (5, -1), (5, 3), (-1, 7), (25, 0)]
LENGTHS = [(1, 1), (7, 20), (20, 7), (21, 21), (16, 0), (0, 16), (1, 30), (30, 1)]


def problems():
    for (left, right), (seqlen_q, seqlen_k), top_left in itertools.product(
        WINDOWS, LENGTHS, (False, True)
    ):
        yield left, right, 0 if top_left else seqlen_k - seqlen_q, seqlen_q, seqlen_k


def sees(left, right, shift, seqlen_k, query, key):
    begin, end = maps.visible_keys(left, right, shift, seqlen_k, query)
    return begin <= key < end


def test_visible_queries_are_the_other_side_of_visible_keys():
    for left, right, shift, seqlen_q, seqlen_k in problems():
        for key in range(seqlen_k + 3):
            begin, end = maps.visible_queries(left, right, shift, seqlen_q, seqlen_k, key)
            for query in range(seqlen_q):
                expected = key < seqlen_k and sees(left, right, shift, seqlen_k, query, key)
                assert (begin <= query < end) == expected


def test_seeing_queries():
    for left, right, shift, seqlen_q, seqlen_k in problems():
        begin, end = maps.seeing_queries(left, right, shift, seqlen_q, seqlen_k)
        for query in range(seqlen_q):
            expected = any(
                sees(left, right, shift, seqlen_k, query, key) for key in range(seqlen_k)
            )
            assert (begin <= query < end) == expected


@pytest.mark.parametrize("block_m, block_n", [(4, 8), (5, 8), (64, 128)])
def test_query_blocks_hold_every_visible_pair_and_masks_where_needed(block_m, block_n):
    for left, right, shift, seqlen_q, seqlen_k in problems():
        for first in range(0, seqlen_k, block_n):
            begin, end, full_begin, full_end = maps.query_blocks(
                left, right, shift, seqlen_q, seqlen_k, first, block_m, block_n
            )
            for block in range(-(-seqlen_q // block_m)):
                queries = range(block * block_m, min((block + 1) * block_m, seqlen_q))
                pairs = [
                    key < seqlen_k and sees(left, right, shift, seqlen_k, query, key)
                    for query in queries
                    for key in range(first, first + block_n)
                ]
                assert any(pairs) <= (begin <= block < end)
                if begin <= block < end and full_begin <= block < full_end:
                    assert all(pairs)


@pytest.mark.parametrize("tiles, first_split, parts", [(7, 7, 1), (7, 5, 3), (7, 0, 2), (1, 0, 8)])
def test_numbers_hold_whole_tiles_and_every_part_of_the_others(tiles, first_split, parts):
    count = first_split + (tiles - first_split) * parts
    found = [maps.tile_part(first_split, parts, number) for number in range(count)]
    whole = [(tile, 0) for tile in range(first_split)]
    split = [(tile, part) for tile in range(first_split, tiles) for part in range(parts)]
    assert [(tile, part) for tile, part, _ in found] == whole + split
    assert [number for _, _, number in found] == [-1] * first_split + list(range(len(split)))


@pytest.mark.parametrize("begin, end, full", [(0, 7, (0, 7)), (2, 12, (4, 9)), (3, 11, (0, 0))])
def test_parts_share_the_blocks_of_a_tile(begin, end, full):
    for parts in range(1, end - begin + 1):
        shares = [maps.blocks_of_part(begin, end, *full, part, parts) for part in range(parts)]
        assert [b for share in shares for b in range(*share[:2])] == list(range(begin, end))
        sizes = [last - first for first, last, _, _ in shares]
        assert 1 <= min(sizes) <= max(sizes) <= min(sizes) + 1
        for first, last, full_first, full_last in shares:
            for block in range(first, last):
                assert (full_first <= block < full_last) == (full[0] <= block < full[1])
            assert full_last <= last and full_first >= first


@pytest.mark.parametrize("block_m, block_n", [(4, 8), (5, 8)])
def test_turns_count_the_visitors_of_a_block(block_m, block_n):
    """A tile waits for as many additions as tiles of higher keys make, no more and no fewer."""
    for left, right, shift, seqlen_q, seqlen_k in problems():
        visited = [
            maps.query_blocks(left, right, shift, seqlen_q, seqlen_k, first, block_m, block_n)[:2]
            for first in range(0, seqlen_k, block_n)
        ]
        for block in range(-(-seqlen_q // block_m)):
            added = 0
            for tile, (begin, end) in reversed(list(enumerate(visited))):
                if begin <= block < end:
                    last = maps.last_visitor(
                        left, right, shift, seqlen_q, seqlen_k, block, block_m, block_n
                    )
                    assert last - tile == added
                    added += 1


@pytest.mark.parametrize("block", [4, 64])
@pytest.mark.parametrize(
    "cu_seqlens", [[0, 0], [0, 5], [0, 4, 4, 9, 9, 30], [2, 3, 3, 20], [0, 1, 2, 3, 4, 5]]
)
def test_slots_hold_every_row_of_every_sequence_once(cu_seqlens, block):
    total = cu_seqlens[-1] + 3
    sequences = len(cu_seqlens) - 1
    found = []
    for slot in range(maps.num_slots(total, sequences, block, True)):
        sequence, row = maps.slot_position(cu_seqlens, sequences, total, slot, block)
        if sequence < 0:
            continue
        begin, length = maps.span_of(cu_seqlens, [], sequence, total)
        found += [begin + r for r in range(row, min(row + block, length))]
    assert found == list(range(cu_seqlens[0], cu_seqlens[-1]))


@pytest.mark.parametrize("cu_seqlens", [[9, 3, 50, -7, 12], [100, 200, 300], [-5, 4, 1000, 2, 2]])
def test_lying_descriptors_stay_inside(cu_seqlens):
    total, block = 20, 4
    sequences = len(cu_seqlens) - 1
    slots = maps.num_slots(total, sequences, block, True)
    for sequence in range(sequences):
        begin, length = maps.span_of(cu_seqlens, [5] * sequences, sequence, total)
        assert 0 <= begin <= begin + length <= total
        last = begin // block + sequence + -(-length // block)
        assert last <= slots
    for slot in range(slots):
        sequence, row = maps.slot_position(cu_seqlens, sequences, total, slot, block)
        assert -1 <= sequence < sequences and row >= 0


@pytest.mark.parametrize(
    "block_m, head_dim, warpgroups",
    [(64, 128, 2), (80, 128, 2), (128, 64, 2), (128, 192, 2), (96, 256, 4), (128, 192, 4)],
)
def test_accumulator_of_dq_is_a_permutation(block_m, head_dim, warpgroups):
    threads = 128 * warpgroups
    count = block_m * head_dim // threads
    elements, offsets = set(), set()
    for thread, index in itertools.product(range(threads), range(count)):
        row, column = maps.dq_coordinate(thread, index, block_m, head_dim, warpgroups)
        assert 0 <= row < block_m and 0 <= column < head_dim
        elements.add((row, column))
        offsets.add(maps.dq_offset(thread, index, block_m, head_dim, warpgroups))
    assert len(elements) == block_m * head_dim
    assert offsets == set(range(block_m * head_dim))


def backward(**changes):
    problem = {
        "dtype": "bf16",
        "batch": 2,
        "heads_kv": 4,
        "qhead_per_khead": 2,
        "sequences": 1,
        "seqlen_q": 1000,
        "seqlen_k": 1000,
        "head_dim": 128,
        "head_dim_v": 128,
    }
    return _native.plan_backward(**(problem | changes))


@pytest.mark.parametrize("head_dim", (8, 64, 72, 128, 136, 192, 200, 256))
@pytest.mark.parametrize("head_dim_v", (8, 64, 128, 144, 256))
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("right", [-1, 0])
def test_a_kernel_that_holds_the_columns_and_fits(head_dim, head_dim_v, dtype, right):
    plan = backward(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, window_right=right)
    assert plan["head_dim"] >= head_dim and plan["head_dim_v"] >= head_dim_v
    assert plan["dtype"] == dtype
    assert plan["main"]["smem_bytes"] <= 227 * 1024
    assert plan["postprocess"]["kernel"] == f"postprocess_{dtype}_{plan['head_dim']}_" + str(
        plan["block_m"]
    )


@pytest.mark.parametrize("head_dim, cluster", [(128, 1), (192, 2), (256, 2)])
@pytest.mark.parametrize("seqlen_k", [1, 128, 129, 100_000])
def test_the_grid_is_whole_clusters_and_no_more_than_tiles(head_dim, cluster, seqlen_k):
    plan = backward(head_dim=head_dim, head_dim_v=head_dim, seqlen_k=seqlen_k)
    main = plan["main"]
    assert main["cluster"] == cluster
    assert main["grid"] % cluster == 0
    assert 0 < main["grid"] // cluster <= plan["num_tiles"]
    tiles = 2 * 4 * -(-seqlen_k // plan["block_n"])
    split = tiles - plan["first_split"]
    assert plan["num_tiles"] == tiles + split * (plan["parts"] - 1)


def test_workspace_is_one_fp32_copy_of_q_in_whole_blocks():
    plan = backward()
    blocks = -(-1000 // plan["block_m"])
    assert plan["q_slots"] == blocks
    assert plan["dq_accum_size"] == 2 * blocks * plan["block_m"] * plan["head_dim"]
    assert plan["statistics_size"] == 2 * blocks * plan["block_m"] * 2
    # The arrivals of 8 warps at each of 8 blocks of keys, of which some may be split.
    assert plan["semaphore_size"] == 1 + 8 * 8
    assert backward(window_right=0)["semaphore_size"] == 1
    assert backward(has_seqused_k=True)["semaphore_size"] == 1
    assert backward(deterministic=True)["semaphore_size"] == 1 + 2 * blocks
    # Wide heads: one turn per consumer warp of the two CTAs.
    wide = backward(head_dim=256, head_dim_v=256, deterministic=True)
    assert wide["semaphore_size"] == 1 + 2 * 16 * wide["q_slots"]
    packed = backward(batch=1, has_cu_seqlens=True, sequences=7)
    assert packed["q_slots"] == 1000 // plan["block_m"] + 7


def test_tiles_and_launches():
    plan = backward()
    assert plan["num_tiles"] == 2 * 4 * 8
    assert plan["main"]["grid"] == 64
    assert plan["preprocess"]["grid"] == plan["postprocess"]["grid"] == 2 * 8 * plan["q_slots"]
    # 32 rows of 256 columns per CTA.
    wide = backward(head_dim=256, head_dim_v=256)
    assert wide["preprocess"]["grid"] == 3 * wide["postprocess"]["grid"] == 3 * 2 * 8 * 11
    assert not plan["dynamic"] and plan["semaphores_in_use"] == 0
    causal = backward(batch=8, window_right=0)
    assert causal["dynamic"] and causal["main"]["grid"] == 132
    assert causal["semaphores_in_use"] == 1
    assert not backward(batch=8)["dynamic"]
    assert backward(batch=8, deterministic=True)["dynamic"]
    # However few: whoever waits for another tile must know it in work.
    assert backward(deterministic=True)["dynamic"]
    assert backward(seqlen_q=0)["main"]["grid"] == 0


def test_the_last_round_of_tiles_is_split():
    """15 rounds of 132 tiles are whole; the 68 that are left would leave half of the CTAs idle."""
    sizes = {"batch": 1, "heads_kv": 16, "qhead_per_khead": 1}
    long = sizes | {"seqlen_q": 1 << 14, "seqlen_k": 1 << 14}
    plan = backward(**long)
    assert plan["first_split"] == 15 * 132
    assert plan["parts"] > 2
    assert plan["num_tiles"] == 15 * 132 + 68 * plan["parts"]
    # Tiles that differ in length are balanced by their order, and ordered additions need it.
    for change in ({"window_right": 0}, {"has_seqused_q": True}, {"deterministic": True}):
        plan = backward(**long, **change)
        assert plan["first_split"] == plan["num_tiles"] and plan["parts"] == 1
    # Full rounds, tiles too short to be worth it, and the one kernel that cannot.
    assert backward(**(long | {"heads_kv": 33}), num_sms=132)["parts"] == 1
    assert backward(**sizes, seqlen_q=128, seqlen_k=1 << 17)["parts"] == 1
    assert backward(**long, head_dim=64, head_dim_v=64)["parts"] == 1


@pytest.mark.parametrize("num_sms", (1, 16, 78, 114, 132))
@pytest.mark.parametrize(
    "head_dim, head_dim_v", [(72, 40), (128, 64), (128, 128), (192, 128), (256, 256)]
)
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k", [(300, 500), (700, 2000), (4096, 64), (1 << 15, 700)]
)
@pytest.mark.parametrize("batch", (1, 9))
def test_parts_fit_into_the_memory_of_dq(head_dim, head_dim_v, seqlen_q, seqlen_k, batch, num_sms):
    problem = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "batch": batch, "num_sms": num_sms}
    plan = backward(head_dim=head_dim, head_dim_v=head_dim_v, **problem)
    assert 1 <= plan["parts"] <= plan["q_slots"]
    tiles = batch * 4 * plan["row_blocks"]
    split = tiles - plan["first_split"]
    bytes_per_part = plan["block_n"] * (plan["head_dim"] + plan["head_dim_v"]) * 4
    assert split * plan["parts"] * bytes_per_part <= batch * 8 * seqlen_q * head_dim * 2
    arrivals = split * plan["main"]["cluster"] * 8
    assert plan["semaphores_in_use"] == (1 + arrivals if split else 0)
    assert plan["semaphores_in_use"] <= batch * 4 * plan["semaphore_size"]


@pytest.mark.parametrize(
    "head_dim, seqlen, heads",
    [
        (64, 256, 16),
        (64, 1024, 16),
        (64, 16384, 4),
        (128, 4096, 8),
        (256, 1024, 8),
        (256, 4096, 4),
        (192, 1024, 8),
        (256, 1 << 20, 1),
    ],
)
def test_heads_whose_tiles_run_together(head_dim, seqlen, heads):
    """32 MB of queries and their gradients, at most 16 heads, 8 wide ones; without a mask one."""
    changes = dict.fromkeys(("head_dim", "head_dim_v"), head_dim)
    changes |= {"batch": 64, "heads_kv": 8, "seqlen_q": seqlen, "seqlen_k": seqlen}
    changes |= {"qhead_per_khead": 1}
    assert backward(**changes, window_right=0)["section_heads"] == heads
    assert backward(**changes)["section_heads"] == 1


@pytest.mark.parametrize("right", [-1, 0])
@pytest.mark.parametrize("heads, seqlen", [(1, 5000), (7, 300), (40, 1000)])
def test_ordered_tiles_wait_for_lower_numbers_only(heads, seqlen, right):
    """The tiles of a head are handed out from the last keys to the first, all of them."""
    plan = backward(
        batch=1,
        heads_kv=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        window_right=right,
        deterministic=True,
    )
    row_blocks = collections.defaultdict(list)
    for tile in range(plan["num_tiles"]):
        block, head = maps.tile_position(
            plan["row_blocks"], heads, plan["section_heads"], True, tile
        )
        row_blocks[head].append(block)
    assert row_blocks == {h: list(range(plan["row_blocks"]))[::-1] for h in range(heads)}


def test_wrong_problems():
    with pytest.raises(ValueError, match="head_dim = 12, allowed: multiples of 8"):
        backward(head_dim=12)
    with pytest.raises(ValueError, match="qhead_per_khead = 0"):
        backward(qhead_per_khead=0)
    with pytest.raises(ValueError, match="sequences = 3"):
        backward(sequences=3)
    with pytest.raises(NotImplementedError, match="29 bits"):
        backward(seqlen_q=2**29 + 1)
    with pytest.raises(NotImplementedError, match="30 bits"):
        backward(batch=2**22, heads_kv=2**10)
