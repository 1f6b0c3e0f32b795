"""What the compiler makes of attention's gradient; as test_lowering.py, whose cases these are."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import pytest
import test_lowering as forward
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_lowering import (
    B_LOCAL,
    CASES,
    COPIES,
    FREE,
    H_LOCAL,
    KV_LOCAL,
    SEQUENCES,
    TOTAL_K,
    TOTAL_Q,
    USED_LOCAL,
    D,
    G,
    M,
)

from jax_fa_epilogue import _native, native, plans, problem

topology, device = forward.topology, forward.device

BUILT = forward.BUILT and all(
    kernel["built"]
    for kernel in _native.kernels()
    if kernel["operation"] in ("preprocess", "backward", "postprocess")
    and kernel.get("head_dim", D) == D
    and kernel["dtype"] == "bf16"
)
pytestmark = pytest.mark.skipif(
    not BUILT, reason=f"built without the backward's CUDA kernels for D = {D}"
)

DENSE = ["attention", "attention_seqused", "attention_as_in_jax"]
EVERY = pytest.mark.parametrize("name", [*DENSE, "attention_varlen"])


def gradient(name):
    """(operands, cotangents of the results) -> dq, dk, dv."""
    function, _, operands = CASES[name]

    def pull(*arrays):
        q, k, v, *descriptors = arrays[: len(operands)]
        _, vjp = jax.vjp(lambda *x: function(*x, *descriptors), q, k, v)
        return vjp(arrays[len(operands) :])

    return pull


def place(name, sharding, copies=None):
    """Shapes of what `gradient` takes; with `copies`, q and the cotangents have one more axis."""
    operands = forward.place(name, sharding)
    results = jax.eval_shape(CASES[name][0], *forward.shapes(name))
    specs = [CASES[name][2][0][2]]
    specs.append(P("model") if name == "attention_varlen" else P("data", "model"))
    operands += [
        jax.ShapeDtypeStruct(r.shape, r.dtype, sharding=sharding(spec))
        for r, spec in zip(results, specs, strict=False)
    ]
    if copies is not None:
        mapped = {0, *range(len(CASES[name][2]), len(operands))}
        operands = [
            jax.ShapeDtypeStruct((copies, *x.shape), x.dtype, sharding=x.sharding)
            if i in mapped
            else x
            for i, x in enumerate(operands)
        ]
    return operands


def calls(text):
    """How often the program calls each kernel."""
    return tuple(
        text.count(f'custom_call_target="{target}"')
        for target in (native.FORWARD_TARGET, native.BACKWARD_TARGET)
    )


def lowered_call(name):
    text = forward.lowered(
        gradient(name),
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in place(name, lambda spec: None)),
    )
    (line,) = [line for line in text.splitlines() if f"@{native.BACKWARD_TARGET}(" in line]
    attributes = re.search(r"mhlo.backend_config = \{([^}]*)\}", line)[1]
    layouts = forward.LAYOUTS.search(line).groups()
    return attributes, *(re.findall(r"dense<\[(.*?)\]>", part) for part in layouts)


def test_attributes_and_layouts():
    attributes, operands, results = lowered_call("attention_varlen")
    assert attributes == (
        "deterministic = 0 : i32, has_cu_seqlens = 1 : i32, has_seqused_k = 1 : i32, "
        "has_seqused_q = 1 : i32, num_batch_dims = 0 : i32, softcap = 1.500000e+01 : f32, "
        "softmax_scale = 5.000000e-01 : f32, top_left = 0 : i32, window_left = 100 : i32, "
        "window_right = 3 : i32"
    )
    # As in the forward: q, out, dout, dq (Hk, G, T, D) lie as (T, Hk, G, D), k, v, dk, dv
    # (Hk, S, D) as (S, Hk, D).
    queries, keys, rest = "3, 1, 0, 2", "2, 0, 1", "1, 0"
    statistic = "2, 1, 0"
    arrays = [queries, keys, keys, queries, statistic, queries, statistic]
    assert operands == [*arrays, rest, rest, rest, rest]
    assert results == [queries, keys, keys, rest, rest, rest]
    attributes, _, _ = lowered_call("attention_as_in_jax")
    assert "top_left = 1 : i32, window_left = -1 : i32, window_right = 0 : i32" in attributes


@EVERY
def test_one_call_each_and_no_copies(name, device):
    text = forward.compiled(gradient(name), place(name, lambda spec: device))
    assert calls(text) == (1, 1)
    found = forward.instructions(text)
    if name == "attention_varlen":  # offsets and lengths are made true, which is little
        assert not {"copy", "transpose", "pad"} & set(found), found
        assert not re.search(r"fusion.*\[\d+,\d+,\d+", text)
    elif name == "attention_as_in_jax":  # lse is not used: its cotangent is made, zeros
        assert set(found) <= {*FREE, "constant", "broadcast", "fusion"}, found
    else:
        assert set(found) <= FREE, found


@pytest.mark.parametrize("name", DENSE[:2])
def test_unmapped_operands_are_not_broadcast(name, device):
    """vmap over q: k and v are read where they are; only their gradients are summed."""
    operands = place(name, lambda spec: device, copies=COPIES)
    num_operands = len(CASES[name][2])
    in_axes = (0, *(None for _ in range(num_operands - 1)), 0, 0)
    text = forward.compiled(jax.vmap(gradient(name), in_axes), operands)
    assert calls(text) == (1, 1)
    found = forward.instructions(text)
    assert set(found) <= FREE, found

    def summed(q, *rest):
        rest, (dout, dlse) = rest[:-2], rest[-2:]
        _, vjp = jax.vjp(
            lambda q, k, v: jax.vmap(CASES[name][0], in_axes[:num_operands])(q, k, v, *rest[2:]),
            q,
            *rest[:2],
        )
        return vjp((dout, dlse))

    text = forward.compiled(summed, operands)
    assert calls(text) == (1, 1)
    found = forward.instructions(text)
    assert found["reduce"] == 2 and not {"copy", "transpose", "pad"} & set(found), found


QUERIES = (B_LOCAL, H_LOCAL, G, M, D)
LOCAL_DENSE = [QUERIES, KV_LOCAL, KV_LOCAL, QUERIES, QUERIES[:-1], QUERIES, QUERIES[:-1]]
PACKED, PACKED_KEYS = (H_LOCAL, G, TOTAL_Q, D), (H_LOCAL, TOTAL_K, D)
LOCAL = {
    "attention": LOCAL_DENSE,
    "attention_as_in_jax": LOCAL_DENSE,
    "attention_seqused": [*LOCAL_DENSE, USED_LOCAL, USED_LOCAL],
    "attention_varlen": [
        *(PACKED, PACKED_KEYS, PACKED_KEYS, PACKED, PACKED[:-1], PACKED, PACKED[:-1]),
        *((H_LOCAL, SEQUENCES + 1),) * 2,
        *((H_LOCAL, SEQUENCES),) * 2,
    ],
}


def check_local(text, name):
    assert calls(text) == (1, 1)
    assert not re.search(forward.COLLECTIVES, text)
    assert not {"copy", "transpose"} & set(forward.instructions(text))
    assert forward.local_shapes(text, native.BACKWARD_TARGET) == LOCAL[name]


@EVERY
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_partitioned_without_communication(name, explicit, topology):
    mesh = forward.mesh_of(topology, AxisType.Explicit if explicit else AxisType.Auto)
    operands = place(name, functools.partial(NamedSharding, mesh))
    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
        check_local(forward.compiled(gradient(name), operands), name)


@EVERY
def test_shard_map_over_heads(name, topology):
    """Heads by hand, batch by the partitioner."""
    mesh = forward.mesh_of(topology, AxisType.Auto)
    operands = place(name, functools.partial(NamedSharding, mesh))

    def only_model(spec):
        return P(*(axis if axis == "model" else None for axis in spec))

    specs = tuple(only_model(x.sharding.spec) for x in operands)
    mapped = jax.shard_map(
        gradient(name), mesh=mesh, in_specs=specs, out_specs=specs[:3], axis_names={"model"}
    )
    check_local(forward.compiled(mapped, operands), name)


def test_gradients_of_replicated_keys_are_summed_once(topology):
    """shard_map where each device has its own queries and all share k and v."""
    mesh = forward.mesh_of(topology, AxisType.Auto)
    mapped = jax.shard_map(
        jax.vmap(CASES["attention"][0], (0, None, None)),
        mesh=mesh,
        in_specs=(P("data"), P(), P()),
        out_specs=(P("data"), P("data")),
    )

    def pull(q, k, v, *cotangents):
        return jax.vjp(mapped, q, k, v)[1](cotangents)

    operands = place("attention", lambda spec: NamedSharding(mesh, P()), copies=COPIES)
    for i in (0, 3, 4):
        shape, dtype = operands[i].shape, operands[i].dtype
        sharding = NamedSharding(mesh, P("data"))
        operands[i] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    text = forward.compiled(pull, operands)
    assert calls(text) == (1, 1)
    assert re.search("all-reduce", text) and not re.search("all-gather|all-to-all", text)


@pytest.mark.parametrize("saved", [True, False])
def test_r27_saved_by_name_the_forward_runs_once(saved, device):
    names = ("flash_attention_out", "flash_attention_lse")
    policy = jax.checkpoint_policies.save_only_these_names(*names) if saved else None

    def loss(q, k, v):
        out, lse = jax.checkpoint(forward.attention, policy=policy)(jnp.sin(q), k, v)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.sin(lse))

    operands = forward.place("attention", lambda spec: device)
    text = forward.compiled(jax.grad(loss, (0, 1, 2)), operands)
    assert calls(text) == (1 if saved else 2, 1)


def test_gradient_recorded_into_command_buffers(device, tmp_path):
    def layers(q, k, v, dout, dlse):
        return [gradient("attention")(q * n, k, v, dout, dlse) for n in range(1, 4)]

    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    forward.compiled(layers, place("attention", lambda spec: device), options)
    (dump,) = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    outside, inside = [], []
    for line in dump.read_text().splitlines():
        (inside if line.startswith(" ") else outside).append(line)
    assert not any("kCustomCall" in line for line in outside)
    assert sum("kCustomCall " in line for line in inside) == 6


@pytest.mark.parametrize("deterministic", [False, True])
def test_size_of_the_workspaces(deterministic):
    """The accumulator is as large as q in float32, in whole blocks of queries, once."""
    facts = problem.flash_attention(
        *forward.shapes("attention"),
        softmax_scale=None,
        causal=True,
        window_size=(-1, -1),
        softcap=0.0,
        seqused_q=None,
        seqused_k=None,
        num_splits=0,
        pack_gqa=None,
        deterministic=deterministic,
        return_lse=True,
    )
    launch = plans.launch_backward(plans.launch("flash_attention", "cuda", facts), facts)
    assert launch.dq_accum_size == G * M * D
    assert launch.statistics_size == 2 * G * M
    assert launch.semaphore_size <= 1 + deterministic * (G * M + forward.KEYS)
