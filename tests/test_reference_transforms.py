"""The attention of the reference under JAX's transforms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_operands import dense_operands, packed_operands, with_gradients
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fa_epilogue import reference


def loss(q, k, v, used=None):
    out, lse = reference.flash_attention(q, k, v, causal=True, seqused_k=used, return_lse=True)
    return jnp.sum(jnp.square(out)) + jnp.sum(jnp.where(lse == -jnp.inf, 0.0, lse))


gradients = jax.jit(jax.grad(loss, (0, 1, 2)))


def packed_loss(q, k, v, cu_q, cu_k):
    out, lse = reference.flash_attention_varlen(
        q, k, v, cu_q, cu_k, max_seqlen_q=12, max_seqlen_k=14, causal=True, return_lse=True
    )
    return jnp.sum(jnp.square(out)) + jnp.sum(jnp.where(lse == -jnp.inf, 0.0, lse))


packed_gradients = jax.jit(jax.grad(packed_loss, (0, 1, 2)))

SHAPE = (4, 6, 7, 4, 2, 8, 8)
USED = np.array([7, 0, 3, 5], np.int32)


def assert_trees_close(actual, expected):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5)


def loop(function, in_axes, *operands):
    """Return what vmap over two items has to give."""
    results = [
        function(
            *(x if a is None else jnp.take(x, i, a) for x, a in zip(operands, in_axes, strict=True))
        )
        for i in range(2)
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *results)


@pytest.mark.parametrize(
    "in_axes", [(0, None, None, None), (None, 1, 1, 0), (None, None, None, 0)], ids=str
)
def test_vmap(in_axes):
    q, k, v, *_ = dense_operands(21, *SHAPE)
    operands = [
        x if a is None else jnp.stack([x, x[::-1]], a)
        for x, a in zip((q, k, v, jnp.asarray(USED)), in_axes, strict=True)
    ]
    actual = jax.jit(jax.vmap(gradients, in_axes))(*operands)
    assert_trees_close(actual, loop(gradients, in_axes, *operands))


@pytest.mark.parametrize(
    "in_axes", [(0, None, None, None, None), (None, None, None, 0, 0)], ids=str
)
def test_vmap_packed(in_axes):
    q, k, v, *_ = packed_operands(22, 30, 40, 2, 1, 8, 8)
    cu_q, cu_k = (
        jnp.array([[0, 3, 3, 15], [0, 9, 20, 28]]),
        jnp.array([[0, 9, 9, 20], [2, 9, 23, 37]]),
    )
    operands = [
        x if i > 2 and a == 0 else x[0] if i > 2 else jnp.stack([x, -x]) if a == 0 else x
        for i, (x, a) in enumerate(zip((q, k, v, cu_q, cu_k), in_axes, strict=True))
    ]
    actual = jax.jit(jax.vmap(packed_gradients, in_axes))(*operands)
    assert_trees_close(actual, loop(packed_gradients, in_axes, *operands))


def test_jacrev():
    q, k, v, *_ = dense_operands(23, 1, 2, 3, 2, 1, 8, 8)
    jacobian = jax.jit(jax.jacrev(lambda q: reference.flash_attention(q, k, v)))(q)
    _, vjp = jax.vjp(lambda q: reference.flash_attention(q, k, v), q)
    seed = jnp.zeros((1, 2, 2, 8)).at[0, 1, 1, 5].set(1.0)
    np.testing.assert_allclose(jacobian[0, 1, 1, 5], vjp(seed)[0], atol=1e-6)


@pytest.fixture(params=["auto", "explicit"])
def mesh(request, cpu_devices):
    types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[request.param]
    return jax.sharding.Mesh(cpu_devices[:, :2], ("data", "model"), axis_types=(types,) * 2)


@pytest.mark.parametrize("function", [loss, gradients], ids=["value", "gradients"])
def test_sharded_jit_needs_no_communication(mesh, function):
    q, k, v, *_ = dense_operands(24, *SHAPE)
    expected = function(q, k, v, USED)

    def per_item(q, k, v, used):
        if function is gradients:
            return gradients(q, k, v, used)
        return reference.flash_attention(q, k, v, causal=True, seqused_k=used, return_lse=True)

    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))) for x in (q, k, v)
        ]
        used = jax.device_put(USED, NamedSharding(mesh, P("data")))
        compiled = jax.jit(per_item).lower(*placed, used).compile()
        results = compiled(*placed, used)
    for operation in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert operation not in compiled.as_text()
    assert results[0].sharding.is_equivalent_to(placed[0].sharding, 4)
    if function is gradients:
        assert_trees_close(results, expected)


def test_shard_map(cpu_devices):
    """With check_vma; k and v are replicated over "data", so their gradients are sums."""
    mesh = jax.sharding.Mesh(cpu_devices[:, :2], ("data", "model"))
    q, k, v, *_ = dense_operands(25, *SHAPE)
    k, v = k[:2], v[:2]
    total = jax.shard_map(
        lambda *operands: jax.lax.psum(loss(*operands), ("data", "model")),
        mesh=mesh,
        in_specs=(P("data", None, "model"), *[P(None, None, "model")] * 2, P("data")),
        out_specs=P(),
        check_vma=True,
    )
    actual = jax.jit(jax.grad(total, (0, 1, 2)))(q, k, v, USED)
    halves = [gradients(q[i : i + 2], k, v, USED[i : i + 2]) for i in (0, 2)]
    assert_trees_close(actual[0], jnp.concatenate([h[0] for h in halves]))
    assert_trees_close(
        actual[1:], [a + b for a, b in zip(halves[0][1:], halves[1][1:], strict=True)]
    )


def test_shard_map_packed(cpu_devices):
    """Each device of "data" has sequences of its own in the same tokens."""
    mesh = jax.sharding.Mesh(cpu_devices[:, :2], ("data", "model"))
    q, k, v, *_ = packed_operands(26, 30, 40, 4, 2, 8, 8)
    cu_q, cu_k = (
        jnp.array([[0, 3, 3, 15], [0, 9, 20, 28]]),
        jnp.array([[0, 9, 9, 20], [0, 9, 23, 37]]),
    )
    total = jax.shard_map(
        lambda q, k, v, a, b: jax.lax.psum(packed_loss(q, k, v, a[0], b[0]), ("data", "model")),
        mesh=mesh,
        in_specs=(*[P(None, "model")] * 3, P("data"), P("data")),
        out_specs=P(),
        check_vma=True,
    )
    actual = jax.jit(jax.grad(total, (0, 1, 2)))(q, k, v, cu_q, cu_k)
    parts = [packed_gradients(q, k, v, a, b) for a, b in zip(cu_q, cu_k, strict=True)]
    assert_trees_close(actual, jax.tree.map(jnp.add, *parts))


def test_residuals_are_named():
    """With the two names saved, the forward pass is not run again."""
    q, k, v, *_ = dense_operands(27, *SHAPE)

    def loops(policy):
        function = jax.checkpoint(loss, policy=policy)
        return str(jax.make_jaxpr(jax.grad(function, (0, 1, 2)))(q, k, v)).count("while[")

    plain = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, k, v)).count("while[")
    names = ("flash_attention_out", "flash_attention_lse")
    save = jax.checkpoint_policies.save_only_these_names
    assert loops(save(*names)) == plain
    assert loops(None) == loops(save(names[0])) == plain + 1


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_export_with_symbolic_sizes(packed):
    b, m, n = jax.export.symbolic_shape("b, m, n")
    spec = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    if packed:
        q, k, v, *_ = packed_operands(28, 30, 40, 2, 1, 8, 8)
        rest = jnp.array([0, 3, 3, 15]), jnp.array([0, 9, 9, 20])
        specs = [spec((m, 2, 8)), spec((n, 1, 8)), spec((n, 1, 8))]
        specs += [jax.ShapeDtypeStruct((b + 1,), rest[0].dtype)] * 2
        function = packed_gradients
    else:
        q, k, v, *_ = dense_operands(28, *SHAPE)
        rest = (USED,)
        specs = [spec((b, m, 4, 8)), spec((b, n, 2, 8)), spec((b, n, 2, 8))]
        specs += [jax.ShapeDtypeStruct((b,), jnp.int32)]
        function = gradients
    exported = jax.export.export(function)(*specs)
    again = jax.export.deserialize(exported.serialize())
    assert_trees_close(again.call(q, k, v, *rest), function(q, k, v, *rest))


def test_x64():
    operands = dense_operands(29, 2, 6, 7, 2, 1, 8, 8)
    function = functools.partial(reference.flash_attention, softcap=2.0, return_lse=True)
    expected = with_gradients(function)(*operands)
    packed = packed_operands(29, 30, 40, 2, 1, 8, 8)[:3]
    cu_q, cu_k = np.array([0, 3, 3, 15]), np.array([0, 9, 9, 20])
    expected_packed = packed_gradients(*packed, cu_q, cu_k)
    with jax.enable_x64(True):
        actual = with_gradients(function)(*operands)
        assert {x.dtype for x in actual} == {np.dtype(np.float32)}
        actual_packed = packed_gradients(
            *packed, *(jnp.asarray(x, jnp.int64) for x in (cu_q, cu_k))
        )
    assert_trees_close(actual, expected)
    assert_trees_close(actual_packed, expected_packed)


def test_memory_is_linear_in_the_sequence_length():
    def temporaries(seqlen):
        spec = jax.ShapeDtypeStruct((1, seqlen, 1, 8), jnp.float32)
        compiled = gradients.lower(spec, spec, spec).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporaries(2048), temporaries(16384)
    assert long < 10 * short
