"""Plans: pure functions of the problem, checked without a device."""

from __future__ import annotations

import functools

import pytest

from jax_fa_epilogue import _native


def epilogue(**changes):
    problem = dict(out_dtype="bf16", batch=4, heads_kv=16, sequences=1, rows=8192, head_dim=128)
    return _native.plan_epilogue(**(problem | changes))


def combine(**changes):
    problem = dict(out_dtype="bf16", batch=4, heads=16, seqlen=2048, head_dim=128, num_splits=8)
    return _native.plan_combine(**(problem | changes))


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
@pytest.mark.parametrize("out_dtype", ["bf16", "f16", "f32"])
def test_every_head_dim_gets_the_narrowest_tile(head_dim, out_dtype):
    plan = epilogue(head_dim=head_dim, out_dtype=out_dtype)
    assert plan["head_dim"] == min(d for d in (64, 96, 128, 192, 256) if d >= head_dim)
    assert plan["out_dtype"] == out_dtype
    merged = combine(head_dim=head_dim, out_dtype=out_dtype)
    assert merged["head_dim"] == min(d for d in (32, 64, 128, 256) if d >= head_dim)


@pytest.mark.parametrize("head_dim", [0, 4, 7, 12, 100, 257, 264, -8])
def test_head_dims_out_of_range(head_dim):
    with pytest.raises(ValueError, match=f"head_dim = {head_dim}, allowed: multiples of 8"):
        epilogue(head_dim=head_dim)
    with pytest.raises(ValueError, match=f"head_dim = {head_dim}, allowed: multiples of 8"):
        combine(head_dim=head_dim)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 8192])
@pytest.mark.parametrize("group", [1, 4])
def test_every_row_block_once(rows, group):
    plan = epilogue(rows=rows * group, batch=3, heads_kv=5, qhead_per_khead=group)
    assert plan["grid"] == 3 * 5 * -(-rows * group // plan["block_m"])


def test_packed_sequences_share_tiles():
    """CTAs cover the output buffer, however it is cut into sequences."""
    plan = epilogue(sequences=1000, batch=1, rows=100, total_q=640)
    assert plan["grid"] == 16 * 640 // plan["block_m"]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("out_dtype", ["bf16", "f32"])
def test_blocks_fit_a_multiprocessor(head_dim, out_dtype):
    """Compute capability 9.0: 228 KiB of shared memory, 1 KiB of it reserved per block."""
    plan = epilogue(head_dim=head_dim, out_dtype=out_dtype)
    assert plan["blocks_per_sm"] * (plan["smem_bytes"] + 1024) <= 228 * 1024
    assert plan["smem_bytes"] <= 227 * 1024


@pytest.mark.parametrize("changes", [{"batch": 0}, {"heads_kv": 0}, {"rows": 0}])
def test_nothing_to_do_is_no_launch(changes):
    assert epilogue(**changes)["grid"] == 0
    names = {"heads_kv": "heads", "rows": "seqlen"}
    assert combine(**{names.get(k, k): v for k, v in changes.items()})["grid"] == 0


def test_empty_acc_with_a_buffer_to_fill_is_a_launch():
    assert epilogue(sequences=0, rows=64, total_q=5)["grid"] > 0
    assert epilogue(sequences=2, rows=0, total_q=5)["grid"] > 0


@pytest.mark.parametrize("num_splits", [0, 257, -1])
def test_split_counts_out_of_range(num_splits):
    with pytest.raises(ValueError, match=f"num_splits = {num_splits}, allowed: 1 to 256"):
        combine(num_splits=num_splits)


@pytest.mark.parametrize(
    ("head_dim", "batch", "queries_per_warp"),
    [(128, 2, 1), (64, 2, 2), (32, 2, 4), (256, 2, 1), (128, 2000, 4), (64, 2000, 4)],
)
def test_combine_tasks_cover_every_row(head_dim, batch, queries_per_warp):
    plan = combine(seqlen=17, batch=batch, heads=3, head_dim=head_dim)
    assert plan["queries_per_warp"] == queries_per_warp
    assert plan["num_tasks"] == batch * 3 * -(-17 // queries_per_warp)
    assert plan["grid"] * plan["num_threads"] // 32 >= plan["num_tasks"]


def test_what_the_kernels_cannot_count_is_said():
    with pytest.raises(NotImplementedError, match="31 bits"):
        epilogue(rows=2**31)
    with pytest.raises(NotImplementedError, match="31 bits"):
        epilogue(batch=2**31)
    with pytest.raises(NotImplementedError, match="31 bits"):
        epilogue(batch=2**24, heads_kv=16, rows=8192)
    with pytest.raises(NotImplementedError, match="31 bits"):
        combine(batch=2**28, heads=16)
    with pytest.raises(NotImplementedError, match="31 bits"):
        combine(batch=1, heads=1, seqlen=2**31)


def test_wrong_problems():
    with pytest.raises(ValueError, match="qhead_per_khead = 0, allowed: 1 or more"):
        epilogue(qhead_per_khead=0)
    with pytest.raises(ValueError, match="head_dim = 72, allowed: multiples of 16"):
        epilogue(head_dim=72, fp8_permuted_columns=True)


def test_golden_plans():
    assert epilogue() == {
        "out_dtype": "bf16",
        "head_dim": 128,
        "column_order": "plain",
        "block_m": 64,
        "blocks_per_sm": 5,
        "kernel": "epilogue_bf16_128_plain_64_5",
        "built": epilogue()["built"],
        "grid": 8192,
        "num_threads": 128,
        "smem_bytes": 34848,
    }
    assert combine() == {
        "out_dtype": "bf16",
        "head_dim": 128,
        "kernel": "combine_bf16_128",
        "built": combine()["built"],
        "grid": 4096,
        "num_threads": 256,
        "smem_bytes": 1152,
        "queries_per_warp": 4,
        "num_tasks": 32768,
    }


def forward(**changes):
    problem = {
        "dtype": "bf16",
        "batch": 2,
        "heads_kv": 4,
        "qhead_per_khead": 4,
        "seqlen_q": 1000,
        "seqlen_k": 1000,
        "head_dim": 128,
        "head_dim_v": 128,
    }
    return _native.plan_forward(**(problem | changes))


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize("seqlen_q", [1, 1000])
def test_forward_takes_the_narrowest_tile(head_dim, num_splits, seqlen_q):
    plan = forward(head_dim=head_dim, head_dim_v=head_dim, num_splits=num_splits, seqlen_q=seqlen_q)
    tile = min(d for d in (64, 96, 128, 192, 256) if d >= head_dim)
    assert (plan["head_dim"], plan["head_dim_v"]) == (tile, tile)
    assert plan["output"] == ("partial" if num_splits else "final")
    assert (plan["block_m"] == 64) == (seqlen_q == 1)
    assert plan["smem_bytes"] <= 227 * 1024


def test_forward_takes_the_largest_tile_but_for_few_queries():
    def rows(**changes):
        return forward(head_dim=64, head_dim_v=64, **changes)["block_m"]

    assert rows() == 192
    assert rows(window_right=0) == 192
    assert rows(window_right=0, seqlen_q=1) == 64


@pytest.mark.parametrize(
    ("head_dim", "seqlen", "heads"),
    [
        (64, 256, 64),
        (64, 1024, 64),
        (64, 4096, 32),
        (128, 1024, 64),
        (128, 4096, 16),
        (192, 4096, 10),
        (256, 2048, 16),
        (256, 4096, 16),
        (256, 16384, 4),
        (256, 1 << 20, 1),
    ],
)
def test_heads_whose_tiles_run_from_long_to_short_together(head_dim, seqlen, heads):
    """32 MB of keys and values, and 64 with D 256 from 4,096 keys on; at most 64 heads."""
    changes = dict.fromkeys(("head_dim", "head_dim_v"), head_dim)
    changes |= {"seqlen_q": seqlen, "seqlen_k": seqlen}
    changes |= {"batch": 64, "qhead_per_khead": 1, "window_right": 0}
    assert forward(**changes)["section_heads"] == heads


def test_forward_packs_heads_where_it_saves_tiles():
    assert forward(seqlen_q=1)["pack_gqa"]
    assert not forward(seqlen_q=1, pack_gqa=0)["pack_gqa"]
    assert not forward(seqlen_q=4096)["pack_gqa"]


@pytest.mark.parametrize("seqlen_q", [1, 100])
@pytest.mark.parametrize("group", [2, 3, 5, 7, 48, 71, 128, 129, 300])
def test_forward_packs_whole_groups(group, seqlen_q):
    plan = forward(qhead_per_khead=group, seqlen_q=seqlen_q, pack_gqa=1)
    assert plan["pack_gqa"] == (group <= 128)
    if plan["pack_gqa"]:
        assert plan["rows_per_tile"] % group == 0
        assert plan["block_m"] - group < plan["rows_per_tile"] <= plan["block_m"]


@pytest.mark.parametrize("num_splits", [0, 1, 5])
def test_forward_tiles_cover_every_row(num_splits):
    for changes in ({}, {"seqlen_q": 1}, {"seqlen_q": 129, "pack_gqa": 1}):
        plan = forward(**changes, num_splits=num_splits)
        rows = changes.get("seqlen_q", 1000) * (4 if plan["pack_gqa"] else 1)
        heads = 2 * 4 * (1 if plan["pack_gqa"] else 4)
        assert plan["row_blocks"] == -(-rows // plan["rows_per_tile"])
        assert plan["num_tiles"] == plan["row_blocks"] * heads * max(num_splits, 1)
        assert plan["grid"] == min(132, plan["num_tiles"])


def test_forward_with_a_causal_mask_starts_with_the_longest_tiles():
    assert forward(window_right=0)["last_first"]
    assert not forward()["last_first"]
    assert forward(window_right=0)["dynamic"]
    assert forward(has_seqused_k=True)["dynamic"]


def test_a_side_that_excludes_no_key_is_no_window():
    """As a causal mask for the last query."""
    many = functools.partial(forward, batch=100)
    assert not many(seqlen_q=1, window_right=0)["dynamic"]
    assert many(seqlen_q=2, window_right=0)["dynamic"]
    assert not many(seqlen_q=5, seqlen_k=9, window_left=8)["dynamic"]
    assert many(seqlen_q=5, seqlen_k=9, window_left=7)["dynamic"]


def packed(**changes):
    problem = {"has_cu_seqlens": True, "sequences": 3, "batch": 1, "max_seqlen_q": 400}
    return forward(**(problem | {"max_seqlen_k": 400} | changes))


def test_packed_forward_reserves_a_tile_per_segment():
    """Rows before, between and after the sequences are in tiles too: two segments more."""
    plan = packed(pack_gqa=0)
    assert plan["num_tiles"] == 16 * (-(-1000 // 128) + 3 + 2)
    assert plan["schedule_kernel"] in {kernel["name"] for kernel in _native.kernels()}
    assert plan["dynamic"]
    assert plan["workspace_size"] == 3 + 4 * (3 + 2)
    assert forward()["workspace_size"] == 3
    assert forward()["schedule_kernel"] == ""


def test_forward_with_a_counter_resets_it_first():
    plan = forward(has_seqused_k=True)
    assert plan["dynamic"]
    assert plan["schedule_kernel"] == "schedule_1024_1"


@pytest.mark.parametrize(
    ("sequences", "kernel"),
    [(3, "schedule_1024_1"), (1022, "schedule_1024_1"), (1023, "schedule_1024_8")],
)
def test_packed_forward_looks_at_few_sequences_at_once(sequences, kernel):
    assert packed(sequences=sequences)["schedule_kernel"] == kernel
    assert packed(sequences=10**6)["schedule_kernel"] == "schedule_1024_8"


def test_packed_forward_chooses_by_the_longest_sequence():
    assert packed(max_seqlen_q=1)["block_m"] == 64
    assert packed(max_seqlen_q=1)["pack_gqa"]
    assert packed(max_seqlen_q=10**9)["kernel"] == packed(max_seqlen_q=-1)["kernel"]
    wide = {"window_left": 10**6, "window_right": 10**6}
    assert packed(**wide)["kernel"] == packed()["kernel"], "bounds nothing"


@pytest.mark.parametrize("group", [64, 65, 100, 128, 129, 192, 193])
@pytest.mark.parametrize("num_splits", [0, -1, 3])
def test_forward_without_queries_has_tiles_for_any_group(group, num_splits):
    changes = {"qhead_per_khead": group, "num_splits": num_splits}
    for plan in (forward(seqlen_q=0, **changes), packed(max_seqlen_q=0, **changes)):
        assert plan["rows_per_tile"] >= (group if plan["pack_gqa"] else 1)


def test_packed_forward_without_rows_is_no_launch():
    assert packed(seqlen_q=0)["grid"] == 0
    assert packed(batch=0)["grid"] == 0
    assert packed(sequences=0)["grid"] > 0, "rows outside every sequence are written"


def decode(**changes):
    problem = {"batch": 1, "heads_kv": 8, "qhead_per_khead": 4, "seqlen_q": 1}
    return forward(**(problem | {"num_splits": -1} | changes))


@pytest.mark.parametrize(
    ("changes", "num_splits"),
    [
        ({"seqlen_k": 65536}, 16),
        ({"batch": 8, "seqlen_k": 8192}, 2),
        ({"batch": 64, "qhead_per_khead": 8, "seqlen_k": 8192}, 0),
        ({"qhead_per_khead": 8, "seqlen_k": 131072}, 16),
        ({"batch": 128, "seqlen_k": 1024}, 0),
        ({"batch": 1, "heads_kv": 1, "seqlen_k": 1 << 24}, 122),
        ({"seqlen_k": 512}, 0),
        ({"seqlen_k": 0}, 0),
        ({"seqlen_q": 0, "seqlen_k": 65536}, 0),
    ],
)
def test_forward_splits_few_tiles(changes, num_splits):
    assert decode(**changes)["num_splits"] == num_splits
    if num_splits:
        assert decode(**changes) == decode(**changes | {"num_splits": num_splits})


@pytest.mark.parametrize("seqlen_q", [1, 64, 512, 2048])
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_partial_results_take_bounded_memory(seqlen_q, batch, head_dim):
    problem = {"seqlen_q": seqlen_q, "batch": batch, "head_dim": head_dim, "head_dim_v": head_dim}
    plan = decode(seqlen_k=1 << 20, heads_kv=1, qhead_per_khead=2, **problem)
    rows = batch * 2 * seqlen_q
    partial = plan["num_splits"] * rows * 4 * (head_dim + 1)
    assert partial <= 2 * rows * (2 * head_dim + 4) + (64 << 20)


def test_a_window_needs_few_splits():
    assert decode(seqlen_k=65536, window_left=255, window_right=0)["num_splits"] == 0


@pytest.mark.parametrize("num_splits", [-2, 257])
def test_forward_split_counts_out_of_range(num_splits):
    with pytest.raises(ValueError, match=f"num_splits = {num_splits}, allowed: -1 to 256"):
        forward(num_splits=num_splits)


def test_forward_counts():
    with pytest.raises(NotImplementedError, match="30 bits"):
        forward(seqlen_k=2**30 + 1)
    with pytest.raises(NotImplementedError, match="30 bits"):
        packed(sequences=2**30)
    with pytest.raises(NotImplementedError, match="30 bits"):
        forward(batch=2**24, seqlen_q=8192, num_splits=8)
