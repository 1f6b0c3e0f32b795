"""What the compiler gets and what it makes of it, for an H200 and without one.

The first part looks at the lowered text, the second at programs that XLA compiles for the target in
``data/h200_target_config.pbtxt``: one custom call, no copies, no communication, command buffers.
"""

import collections
import functools
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa_epilogue as fa
from jax_fa_epilogue import _native, native

B, H, M, D, G, N, SEQUENCES, TOTAL_Q, COPIES = 4, 8, 256, 128, 2, 3, 6, 1024, 2
KEYS, TOTAL_K = 512, 2048
F32, I32, BF16 = jnp.float32, jnp.int32, jnp.bfloat16
TARGET_CONFIG = pathlib.Path(__file__).parent / "data" / "h200_target_config.pbtxt"

BUILT = all(
    kernel["built"]
    for kernel in _native.kernels()
    if kernel["operation"] in ("epilogue", "combine", "schedule", "forward")
    and kernel.get("head_dim", D) == D
    and kernel.get("out_dtype", kernel.get("dtype", "bf16")) in ("bf16", "f32")
)
NOT_BUILT = f"built without the CUDA kernels for D = {D}"
needs_kernels = pytest.mark.skipif(not BUILT, reason=NOT_BUILT)


def dense(acc, lse, seqused=None):
    return fa.epilogue(acc, lse=lse, seqused=seqused)


def packed_heads(acc, row_max, row_sum):
    return fa.epilogue(acc, row_max=row_max, row_sum=row_sum, qhead_per_khead=G)


def varlen(acc, lse, cu_seqlens, seqused):
    return fa.epilogue(
        acc, lse=lse, cu_seqlens=cu_seqlens, seqused=seqused, total_q=TOTAL_Q, qhead_per_khead=G
    )


def splits(acc, row_max, row_sum):
    return fa.epilogue(acc, row_max=row_max, row_sum=row_sum, out_dtype=F32)


def attention(q, k, v, seqused_q=None, seqused_k=None):
    return fa.flash_attention(
        q,
        k,
        v,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        causal=True,
        num_splits=1,
        return_lse=True,
    )


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, num_splits=1):
    return fa.flash_attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q=300,
        max_seqlen_k=600,
        seqused_k=seqused_k,
        softcap=15.0,
        window_size=(100, 3),
        softmax_scale=0.5,
        num_splits=num_splits,
        return_lse=True,
    )


def attention_partials(q, k, v, seqused_k):
    return fa.flash_attention_partials(q, k, v, num_splits=N, seqused_k=seqused_k, pack_gqa=True)


def attention_as_in_jax(q, k, v):
    """Without the residual, whose layout in jax.nn costs a transpose."""
    return (fa.dot_product_attention(q, k, v, is_causal=True),)


Q, KV = (B, M, H * G, D), (B, KEYS, H, D)
Q_SPEC = P("data", None, "model")
ACC, STATISTIC = (B, H, M, D), (B, H, M)
OVER_BOTH, OVER_HEADS = P("data", "model"), P(None, "model")
BEHIND_SPLITS = P(None, "data", "model")
# function, target, (shape, dtype, sharding) of each operand
CASES = {
    "attention": (
        attention,
        native.FORWARD_TARGET,
        [(Q, BF16, Q_SPEC), (KV, BF16, Q_SPEC), (KV, BF16, Q_SPEC)],
    ),
    "attention_seqused": (
        attention,
        native.FORWARD_TARGET,
        [
            *((shape, BF16, Q_SPEC) for shape in (Q, KV, KV)),
            ((B,), I32, P("data")),
            ((B,), I32, P("data")),
        ],
    ),
    "attention_varlen": (
        attention_varlen,
        native.FORWARD_TARGET,
        [
            ((TOTAL_Q, H * G, D), BF16, P(None, "model")),
            ((TOTAL_K, H, D), BF16, P(None, "model")),
            ((TOTAL_K, H, D), BF16, P(None, "model")),
            ((SEQUENCES + 1,), I32, P()),
            ((SEQUENCES + 1,), I32, P()),
            ((SEQUENCES,), I32, P()),
        ],
    ),
    "attention_partials": (
        attention_partials,
        native.FORWARD_TARGET,
        [*((shape, BF16, Q_SPEC) for shape in (Q, KV, KV)), ((B,), I32, P("data"))],
    ),
    "attention_as_in_jax": (
        attention_as_in_jax,
        native.FORWARD_TARGET,
        [(Q, BF16, Q_SPEC), (KV, BF16, Q_SPEC), (KV, BF16, Q_SPEC)],
    ),
    "dense": (dense, native.EPILOGUE_TARGET, [(ACC, F32, OVER_BOTH), (STATISTIC, F32, OVER_BOTH)]),
    "dense_seqused": (
        dense,
        native.EPILOGUE_TARGET,
        [(ACC, F32, OVER_BOTH), (STATISTIC, F32, OVER_BOTH), ((B,), I32, P("data"))],
    ),
    "packed_heads": (
        packed_heads,
        native.EPILOGUE_TARGET,
        [(ACC, F32, OVER_BOTH), (STATISTIC, F32, OVER_BOTH), (STATISTIC, F32, OVER_BOTH)],
    ),
    "varlen": (
        varlen,
        native.EPILOGUE_TARGET,
        [
            ((SEQUENCES, H, M, D), F32, OVER_HEADS),
            ((SEQUENCES, H, M), F32, OVER_HEADS),
            ((SEQUENCES + 1,), I32, P()),
            ((SEQUENCES,), I32, P()),
        ],
    ),
    "splits": (
        splits,
        native.EPILOGUE_TARGET,
        [
            ((N, *ACC), F32, BEHIND_SPLITS),
            ((N, *STATISTIC), F32, BEHIND_SPLITS),
            ((N, *STATISTIC), F32, BEHIND_SPLITS),
        ],
    ),
    "combine": (
        fa.combine,
        native.COMBINE_TARGET,
        [
            ((N, B, M, H, D), F32, P(None, "data", None, "model")),
            ((N, B, H, M), F32, BEHIND_SPLITS),
        ],
    ),
    "combine_packed": (
        fa.combine,
        native.COMBINE_TARGET,
        [((N, M, H, D), F32, P(None, None, "model")), ((N, H, M), F32, P(None, "model"))],
    ),
}
EVERY = pytest.mark.parametrize("name", CASES)
LAYOUTS = re.compile(r"operand_layouts = \[(.*?)\], result_layouts = \[(.*?)\][,}]")


def shapes(name):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in CASES[name][2]]


# ---- Lowered text -------------------------------------------------------------------------------


def lowered(function, *operands):
    traced = jax.jit(function).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def custom_call(text, target):
    """The line of the only custom call."""
    (line,) = [line for line in text.splitlines() if "stablehlo.custom_call" in line]
    assert f"@{target}(" in line
    return line


@needs_kernels
@EVERY
def test_lowers_to_the_handler(name):
    function, target, _ = CASES[name]
    custom_call(lowered(function, *shapes(name)), target)


def attributes_and_layouts(name):
    """Text of the attributes, and minor-to-major layouts of operands and of results."""
    line = custom_call(lowered(CASES[name][0], *shapes(name)), CASES[name][1])
    attributes = re.search(r"mhlo.backend_config = \{([^}]*)\}", line)[1]
    layouts = LAYOUTS.search(line).groups()
    return attributes, *(re.findall(r"dense<\[(.*?)\]>", part) for part in layouts)


@needs_kernels
def test_attributes_and_layouts_of_the_forward():
    attributes, operands, results = attributes_and_layouts("attention_varlen")
    assert attributes == (
        "has_cu_seqlens = 1 : i32, has_seqused_k = 1 : i32, has_seqused_q = 0 : i32, "
        "max_seqlen_k = 600 : i32, max_seqlen_q = 300 : i32, num_batch_dims = 0 : i32, "
        "num_splits = 0 : i32, pack_gqa = -1 : i32, softcap = 1.500000e+01 : f32, "
        "softmax_scale = 5.000000e-01 : f32, top_left = 0 : i32, window_left = 100 : i32, "
        "window_right = 3 : i32"
    )
    # q and o (Hk, G, T, D) lie as (T, Hk, G, D), k and v (Hk, S, D) as (S, Hk, D).
    assert operands == ["3, 1, 0, 2", "2, 0, 1", "2, 0, 1", "1, 0", "1, 0", "1, 0"]
    assert results == ["3, 1, 0, 2", "2, 1, 0", "1, 0"]


@needs_kernels
def test_layouts_of_partial_results():
    attributes, operands, results = attributes_and_layouts("attention_partials")
    assert f"num_splits = {N} : i32, pack_gqa = 1 : i32" in attributes
    assert operands == ["4, 2, 1, 3, 0", "3, 1, 2, 0", "3, 1, 2, 0", "2, 1, 0"]
    # out (B, Hk, N, G, T, D) lies as (N, B, T, Hk, G, D), lse (B, Hk, N, G, T) as (N, B, Hk, G, T).
    assert results == ["5, 3, 1, 4, 0, 2", "4, 3, 1, 0, 2", "2, 1, 0"]


@needs_kernels
@pytest.mark.parametrize("name", ["attention_as_in_jax", "attention"])
def test_alignment_reaches_the_handler(name):
    attributes, _, _ = attributes_and_layouts(name)
    assert f"top_left = {int(name == 'attention_as_in_jax')} : i32" in attributes
    assert "window_left = -1 : i32, window_right = 0 : i32" in attributes


@needs_kernels
def test_attributes_and_layouts_of_the_epilogue():
    attributes, operands, results = attributes_and_layouts("varlen")
    assert attributes == (
        "fp8_permuted_columns = 0 : i32, has_cu_seqlens = 1 : i32, has_seqused = 1 : i32, "
        "normalised = 1 : i32, num_batch_dims = 0 : i32"
    )
    # acc (Hk, S, M, D) lies as (S, Hk, M, D), o (Hk, G, T, D) as (T, Hk, G, D).
    assert operands == ["3, 2, 0, 1", "2, 0, 1", "1, 0", "1, 0"]
    assert results == ["3, 1, 0, 2", "2, 1, 0"]


@needs_kernels
def test_attributes_and_layouts_of_combine():
    attributes, operands, results = attributes_and_layouts("combine")
    assert attributes == "num_batch_dims = 1 : i32"
    # out_partial (B, H, N, T, D) lies as (N, B, T, H, D), lse_partial (B, H, N, T) as (N, B, H, T).
    assert operands == ["4, 1, 3, 0, 2", "3, 1, 0, 2"]
    assert results == ["3, 1, 2, 0", "2, 1, 0"]


@needs_kernels
def test_fp8_order_and_unnormalised_form_reach_the_handler():
    def function(acc, row_max, row_sum):
        return fa.epilogue(acc, row_max=row_max, row_sum=row_sum, fp8_permuted_columns=True)

    text = lowered(function, *shapes("packed_heads"))
    line = custom_call(text, native.EPILOGUE_TARGET)
    assert "fp8_permuted_columns = 1 : i32" in line and "normalised = 0 : i32" in line


@EVERY
def test_xla_is_the_reference_on_cuda(name):
    function = CASES[name][0]
    if function is fa.combine:
        function = fa.reference.combine
    else:
        function = functools.partial(xla_only, function)
    assert "custom_call" not in lowered(function, *shapes(name))


def xla_only(function, *operands):
    """Call `function` where the public functions are those of ``implementation="xla"``."""
    names = ("epilogue", "flash_attention", "flash_attention_varlen", "flash_attention_partials")
    with pytest.MonkeyPatch.context() as patch:
        for name in (*names, "dot_product_attention"):
            xla = functools.partial(getattr(fa, name), implementation="xla")
            patch.setattr(fa, name, xla)
        return function(*operands)


def test_partial_results_in_16_bits_run_the_reference():
    out_partial, lse_partial = shapes("combine")
    out_partial = jax.ShapeDtypeStruct(out_partial.shape, jnp.bfloat16)
    assert "custom_call" not in lowered(fa.combine, out_partial, lse_partial)


def test_too_many_batch_axes_run_the_reference():
    """vmaps that map acc and lse in turn, more than the handler can walk."""
    function, acc, lse = dense, jnp.zeros((1, 1, 1, 8)), jnp.zeros((1, 1, 1))
    for level in range(10):
        function = jax.vmap(function, in_axes=(0, None) if level % 2 else (None, 0))
        acc, lse = (acc[None], lse) if level % 2 else (acc, lse[None])
    acc, lse = (jnp.broadcast_to(x, (2,) * 5 + x.shape[5:]) for x in (acc, lse))
    assert native.EPILOGUE_TARGET not in lowered(function, acc, lse)


# ---- Compiled for an H200 -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def topology():
    if not BUILT:
        pytest.skip(NOT_BUILT)
    pytest.importorskip("jax_plugins.xla_cuda13", reason="jax-cuda13-plugin is not installed")
    return topologies.get_topology_desc(
        platform="cuda", target_config=TARGET_CONFIG.read_text(), topology="1x1x8"
    )


@pytest.fixture(scope="module")
def device(topology):
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def compiled(function, operands, options=None):
    lowered = jax.jit(function).lower(*operands)
    try:
        return lowered.compile(compiler_options=options).as_text()
    except jax.errors.JaxRuntimeError as error:
        if "ptxas" in str(error) and shutil.which("ptxas") is None:
            pytest.skip("ptxas is not installed")
        raise


def instructions(text):
    """How often the program has each instruction, those inside fusions included."""
    found = re.findall(r"^\s+(?:ROOT )?%?\S+ = .*? ([a-z][a-z0-9-]*)\(", text, re.MULTILINE)
    return collections.Counter(found)


FREE = {"parameter", "bitcast", "get-tuple-element", "tuple", "custom-call"}
COLLECTIVES = r"all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|partition-id"


def place(name, sharding):
    return [jax.ShapeDtypeStruct(s, t, sharding=sharding(spec)) for s, t, spec in CASES[name][2]]


@EVERY
def test_one_custom_call_and_no_copies(name, device):
    text = compiled(CASES[name][0], place(name, lambda spec: device))
    found = instructions(text)
    assert found["custom-call"] == 1
    assert set(found) <= FREE, found


@EVERY
def test_unmapped_operands_are_not_broadcast(name, device):
    """vmap over the first operand only."""
    first, *rest = place(name, lambda spec: device)
    first = jax.ShapeDtypeStruct((COPIES, *first.shape), first.dtype, sharding=device)
    mapped = jax.vmap(CASES[name][0], (0, *(None for _ in rest)))
    found = instructions(compiled(mapped, [first, *rest]))
    assert found["custom-call"] == 1
    assert set(found) <= FREE, found


def local_shapes(text, target):
    """Sizes of operands of the only custom call."""
    (line,) = [line for line in text.splitlines() if f'custom_call_target="{target}"' in line]
    constraints = re.search(r"operand_layout_constraints=\{(.*?\})\}", line)[1]
    return [
        tuple(map(int, sizes.split(","))) for sizes in re.findall(r"\w\[([\d,]+)\]", constraints)
    ]


@needs_kernels
@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "vmap"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_splits_are_merged_without_copies(packed, mapped, device):
    """Two kernels; the partial results lie as the second one reads them."""
    name = "attention_varlen" if packed else "attention"
    function = functools.partial(attention_varlen, num_splits=N)
    if not packed:
        function = functools.partial(fa.flash_attention, num_splits=N)
    operands = place(name, lambda spec: device)
    if mapped:
        function = jax.vmap(function, (0, *(None for _ in operands[1:])))
        first = (COPIES, *operands[0].shape)
        operands[0] = jax.ShapeDtypeStruct(first, operands[0].dtype, sharding=device)
    text = compiled(function, operands)
    found = instructions(text)
    assert found["custom-call"] == 2
    assert native.FORWARD_TARGET in text and native.COMBINE_TARGET in text
    assert set(found) <= FREE, found


@needs_kernels
def test_chunks_of_keys_share_the_queries(device):
    """vmap over a chunk axis of k and v: partial results in one launch, q is not copied."""
    q, k, v = place("attention", lambda spec: device)
    k, v = (jax.ShapeDtypeStruct((COPIES, *x.shape), x.dtype, sharding=device) for x in (k, v))
    found = instructions(compiled(jax.vmap(attention, (None, 0, 0)), [q, k, v]))
    assert found["custom-call"] == 1
    assert set(found) <= FREE, found


# Local shapes on a (2, 4) mesh, logical forms; descriptors are broadcast over batch and heads.
B_LOCAL, H_LOCAL = B // 2, H // 4
KV_LOCAL, USED_LOCAL = (B_LOCAL, H_LOCAL, KEYS, D), (B_LOCAL, H_LOCAL, 1)
ATTENTION_LOCAL = [(B_LOCAL, H_LOCAL, G, M, D), KV_LOCAL, KV_LOCAL]
LOCAL = {
    "attention": ATTENTION_LOCAL,
    "attention_seqused": [*ATTENTION_LOCAL, USED_LOCAL, USED_LOCAL],
    "attention_partials": [*ATTENTION_LOCAL, USED_LOCAL],
    "attention_as_in_jax": ATTENTION_LOCAL,
    "attention_varlen": [
        (H_LOCAL, G, TOTAL_Q, D),
        (H_LOCAL, TOTAL_K, D),
        (H_LOCAL, TOTAL_K, D),
        (H_LOCAL, SEQUENCES + 1),
        (H_LOCAL, SEQUENCES + 1),
        (H_LOCAL, SEQUENCES),
    ],
    "dense": [(B_LOCAL, H_LOCAL, 1, M, D), (B_LOCAL, H_LOCAL, 1, M)],
    "dense_seqused": [
        (B_LOCAL, H_LOCAL, 1, M, D),
        (B_LOCAL, H_LOCAL, 1, M),
        (B_LOCAL, H_LOCAL, 1),
    ],
    "packed_heads": [
        (B_LOCAL, H_LOCAL, 1, M, D),
        (B_LOCAL, H_LOCAL, 1, M),
        (B_LOCAL, H_LOCAL, 1, M),
    ],
    "varlen": [
        (H_LOCAL, SEQUENCES, M, D),
        (H_LOCAL, SEQUENCES, M),
        (H_LOCAL, SEQUENCES + 1),
        (H_LOCAL, SEQUENCES),
    ],
    "splits": [
        (N, B_LOCAL, H_LOCAL, 1, M, D),
        (N, B_LOCAL, H_LOCAL, 1, M),
        (N, B_LOCAL, H_LOCAL, 1, M),
    ],
    "combine": [(B_LOCAL, H_LOCAL, N, M, D), (B_LOCAL, H_LOCAL, N, M)],
    "combine_packed": [(1, H_LOCAL, N, M, D), (1, H_LOCAL, N, M)],
}


def check_local(text, name, shapes=None):
    """Each device works on its own part, without communication and without padding."""
    assert not re.search(COLLECTIVES, text)
    assert not {"pad", "copy", "transpose", "dynamic-slice"} & set(instructions(text))
    assert local_shapes(text, CASES[name][1]) == (shapes or LOCAL[name])


def mesh_of(topology, axis_type):
    names = ("data", "model")
    devices = topologies.make_mesh(topology, (2, 4), names).devices
    return jax.sharding.Mesh(devices, names, axis_types=(axis_type, axis_type))


@EVERY
def test_partitioned_without_communication(name, topology):
    mesh = mesh_of(topology, AxisType.Auto)
    text = compiled(CASES[name][0], place(name, functools.partial(NamedSharding, mesh)))
    check_local(text, name)


@EVERY
def test_explicit_sharding_without_communication(name, topology):
    mesh = mesh_of(topology, AxisType.Explicit)
    with jax.set_mesh(mesh):
        text = compiled(CASES[name][0], place(name, functools.partial(NamedSharding, mesh)))
    check_local(text, name)


@EVERY
def test_shard_map_over_one_axis_without_communication(name, topology):
    """Heads by hand, batch by the partitioner."""
    mesh = mesh_of(topology, AxisType.Auto)
    function, _, operands = CASES[name]
    results = jax.eval_shape(function, *shapes(name))

    def only_model(spec):
        return P(*(axis if axis == "model" else None for axis in spec))

    # In out heads are the axis before the last one, in lse the axis before the queries.
    out_specs = tuple(P(*[None] * (r.ndim - 2), "model") for r in results)
    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=tuple(only_model(spec) for _, _, spec in operands),
        out_specs=out_specs,
        axis_names={"model"},
    )
    check_local(compiled(mapped, place(name, functools.partial(NamedSharding, mesh))), name)


@pytest.mark.parametrize(
    ("name", "replicated"),
    [*((name, False) for name in CASES), ("attention_seqused", True)],
    ids=[*CASES, "replicated_cotangents"],
)
def test_backward_without_communication(name, replicated, topology):
    mesh = mesh_of(topology, AxisType.Auto)
    function, _, operands = CASES[name]
    num_floats = sum(dtype != I32 for _, dtype, _ in operands)

    def pulled(cotangents, *operands):
        floats, descriptors = operands[:num_floats], operands[num_floats:]
        results, vjp = jax.vjp(lambda *floats: function(*floats, *descriptors), *floats)
        return vjp(cotangents or results)

    everywhere = NamedSharding(mesh, P())
    cotangents = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
        jax.eval_shape(function, *shapes(name)) if replicated else (),
    )
    placed = place(name, functools.partial(NamedSharding, mesh))
    text = compiled(pulled, [cotangents, *placed])
    # By its number a device finds its part of what is replicated.
    assert set(re.findall(COLLECTIVES, text)) <= ({"partition-id"} if replicated else set())


@needs_kernels
def test_ring_transfers_while_the_kernel_runs(topology):
    """Keys and values leave before each kernel and arrive after it; nothing else is sent."""
    mesh = topologies.make_mesh(topology, (2, 4), ("data", "seq"))
    spec = P("data", "seq")
    ring = jax.shard_map(
        functools.partial(fa.ring_attention, axis_name="seq", causal=True, layout="zigzag"),
        mesh=mesh,
        in_specs=(spec,) * 3,
        out_specs=spec,
    )
    placed = [
        jax.ShapeDtypeStruct((2, 4 * M, heads, D), BF16, sharding=NamedSharding(mesh, spec))
        for heads in (H * G, H, H)
    ]
    text = compiled(ring, placed)
    assert set(re.findall(COLLECTIVES, text)) == {"collective-permute", "partition-id"}
    names = re.findall(
        r"^.*? (collective-permute-(?:start|done)|custom-call)\(", text, re.MULTILINE
    )
    step = ["collective-permute-start", "custom-call", "collective-permute-done"]
    # The loop's body stands before the program: first step, and the last one without a transfer.
    assert names == [*step, *step, "custom-call"]


def test_shared_operands_are_not_padded_when_the_mapped_axis_is_sharded(topology):
    """XLA would give all devices but the first one zeros; they are broadcast instead."""
    mesh = mesh_of(topology, AxisType.Auto)
    sharding = functools.partial(NamedSharding, mesh)
    acc = jax.ShapeDtypeStruct((COPIES, *ACC), F32, sharding=sharding(P("data", None, "model")))
    lse = jax.ShapeDtypeStruct(STATISTIC, F32, sharding=sharding(P(None, "model")))
    seqused = jax.ShapeDtypeStruct((B,), I32, sharding=sharding(P()))
    text = compiled(jax.vmap(dense, (0, None, None)), [acc, lse, seqused])
    copies = COPIES // 2
    local = [(copies, B, H_LOCAL, 1, M, D), (copies, B, H_LOCAL, 1, M), (copies, B, H_LOCAL, 1)]
    check_local(text, "dense", local)


OPERATIONS = ("attention_seqused", "attention_varlen", "attention_partials", "combine", "dense")


@pytest.mark.parametrize("name", OPERATIONS)
def test_recorded_into_command_buffers(name, device, tmp_path):
    function = CASES[name][0]

    def layers(first, *rest):
        return [function(first * layer, *rest) for layer in range(6)]

    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    compiled(layers, place(name, lambda spec: device), options)
    (dump,) = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    outside, inside = [], []
    for line in dump.read_text().splitlines():
        (inside if line.startswith(" ") else outside).append(line)
    assert any("kCommandBuffer" in line for line in outside)
    assert not any("kCustomCall" in line for line in outside)
    assert sum("kCustomCall " in line for line in inside) == 6
