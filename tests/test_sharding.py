"""Every operation on several devices: shard_map, sharded jit, explicit sharding."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from operations import ALL, EVERY, MOST, OPERATIONS, assert_equal, gradient

import jax_fa_epilogue as fa


@pytest.fixture
def mesh(cpu_devices):
    return jax.sharding.Mesh(cpu_devices, ("data", "model"))


@pytest.fixture
def explicit_mesh(cpu_devices):
    mesh = jax.sharding.Mesh(cpu_devices, ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def on_host(tree):
    """Arrays that go to whichever devices a computation is for."""
    return jax.tree.map(np.asarray, tree)


@EVERY
def test_shard_map(operation, mesh):
    operands = on_host(operation.operands())
    mapped = jax.shard_map(
        operation.function, mesh=mesh, in_specs=operation.specs, out_specs=operation.result_specs
    )
    assert_equal(jax.jit(mapped)(*operands), operation.function(*operands))
    assert_equal(gradient(operation, mapped)(*operands), gradient(operation)(*operands))


@MOST
def test_shard_map_over_one_axis_leaves_the_other_to_the_partitioner(operation, mesh):
    operands = on_host(operation.operands())

    def only_model(spec):
        return P(*(axis if axis == "model" else None for axis in spec))

    mapped = jax.shard_map(
        operation.function,
        mesh=mesh,
        in_specs=tuple(map(only_model, operation.specs)),
        out_specs=tuple(map(only_model, operation.result_specs)),
        axis_names={"model"},
    )
    assert_equal(jax.jit(mapped)(*operands), operation.function(*operands))


@ALL
def test_shard_map_knows_that_results_vary(operation, mesh):
    operands = on_host(operation.operands())
    mapped = jax.shard_map(
        operation.function, mesh=mesh, in_specs=operation.specs, out_specs=(P(), P())
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(mapped)(*operands)


@MOST
def test_shard_map_sums_gradients_of_replicated_operands(operation, mesh):
    """Each device has its own first operand and shares all others."""
    copies = on_host(operation.operands(5, mesh.size))
    operands = (copies[0], *(x[0] for x in copies[1:]))
    everywhere = P(("data", "model"))
    vmapped = jax.vmap(operation.function, (0, *(None for _ in operands[1:])))
    mapped = jax.shard_map(
        vmapped,
        mesh=mesh,
        in_specs=(everywhere, *(P() for _ in operands[1:])),
        out_specs=(everywhere, everywhere),
    )
    actual = gradient(operation, mapped)(*operands)
    assert_equal(actual, gradient(operation, vmapped)(*operands))


def test_shard_map_of_query_heads_with_replicated_keys(mesh):
    """Multi-query attention: the gradients of k and v are sums over the devices."""
    q, k, v, used = on_host(OPERATIONS["attention"].operands())
    operands = q, k[:, :, :1], v[:, :, :1], used
    operation = OPERATIONS["attention"]
    heads, batch = P("data", None, "model"), P("data")
    mapped = jax.shard_map(
        operation.function,
        mesh=mesh,
        in_specs=(heads, batch, batch, batch),
        out_specs=operation.result_specs,
    )
    assert_equal(jax.jit(mapped)(*operands), operation.function(*operands))
    assert_equal(gradient(operation, mapped)(*operands), gradient(operation)(*operands))


@EVERY
def test_sharded_jit(operation, mesh):
    operands = on_host(operation.operands())
    sharded = [
        jax.device_put(x, NamedSharding(mesh, s))
        for x, s in zip(operands, operation.specs, strict=True)
    ]
    results = jax.jit(operation.function)(*sharded)
    assert_equal(results, operation.function(*operands))
    for result, spec in zip(results, operation.result_specs, strict=True):
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), result.ndim)
    assert_equal(gradient(operation)(*sharded), gradient(operation)(*operands))


@EVERY
def test_explicit_sharding(operation, explicit_mesh):
    operands = operation.operands()
    expected, expected_gradients = operation.function(*operands), gradient(operation)(*operands)
    sharded = [jax.device_put(x, s) for x, s in zip(operands, operation.specs, strict=True)]
    results = jax.jit(operation.function)(*sharded)
    for result, spec in zip(results, operation.result_specs, strict=True):
        assert jax.typeof(result).sharding.spec == P(*spec, *[None] * (result.ndim - len(spec)))
    gradients = gradient(operation)(*sharded)
    for g, index in zip(gradients, operation.floats, strict=True):
        assert jax.typeof(g).sharding == jax.typeof(sharded[index]).sharding
    assert_equal(on_host((results, gradients)), on_host((expected, expected_gradients)))


def test_explicit_sharding_of_the_mapped_axis(explicit_mesh):
    operation = OPERATIONS["dense"]
    acc, lse, seqused = operation.operands(6, 2)
    acc = jax.device_put(acc, P("data", None, "model"))
    lse, seqused = jax.device_put(lse[0], P(None, "model")), jax.device_put(seqused[0], P())
    out, _ = jax.jit(jax.vmap(operation.function, (0, None, None)))(acc, lse, seqused)
    assert jax.typeof(out).sharding.spec == P("data", None, None, "model", None)
    plain = on_host((acc, lse, seqused))
    expected, _ = jax.vmap(operation.function, (0, None, None))(*plain)
    assert_equal(on_host(out), on_host(expected))


SHARDED_INSIDE = pytest.mark.parametrize(
    ("spec", "what"),
    [(P("data", "model"), "axis of tokens"), (P("data", None, None, "model"), "head dimension")],
    ids=["tokens", "head_dim"],
)


def inside(spec, mesh):
    """Operands of attention that are sharded over an axis that the kernel needs whole."""
    rng = np.random.default_rng(8)
    shapes = (2, 8, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16)
    plain = [np.asarray(rng.standard_normal(shape), np.float32) for shape in shapes]
    return plain, [jax.device_put(x, NamedSharding(mesh, spec)) for x in plain]


@SHARDED_INSIDE
def test_sharded_jit_gathers_what_is_needed_whole(spec, what, mesh):
    plain, sharded = inside(spec, mesh)
    attend = jax.jit(functools.partial(fa.flash_attention, causal=True, return_lse=True))
    assert_equal(attend(*sharded), attend(*plain))


@SHARDED_INSIDE
@pytest.mark.parametrize("index", range(3))
def test_explicit_mode_names_what_is_needed_whole(spec, what, index, explicit_mesh):
    """Nothing is gathered that the user has not asked for."""
    operands, sharded = inside(spec, explicit_mesh)
    operands[index] = sharded[index]
    message = f" is sharded over 'model' along its {what}; .*ring_attention"
    with pytest.raises(ValueError, match="qkv"[index] + message):
        jax.eval_shape(fa.flash_attention, *operands)
    with pytest.raises(ValueError, match=("query", "key", "value")[index] + message):
        jax.eval_shape(fa.dot_product_attention, *operands)
