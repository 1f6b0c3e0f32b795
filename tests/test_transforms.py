"""JAX's transformations of ``epilogue`` and ``combine``, alone and combined."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa_epilogue as fa
from jax_fa_epilogue import _native, native

# All sizes of axes are different, so that one can be replaced by its value.
BATCH, HEADS, ROWS, HEAD_DIM, GROUP, SPLITS, TOTAL_Q = 6, 4, 10, 16, 2, 3, 29


@dataclasses.dataclass(frozen=True)
class Operation:
    """A call with all operands positional, and how to make and to shard them."""

    name: str  # of the public function
    function: Callable  # (*operands) -> (out, lse)
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]  # operands over ("data", "model")
    result_specs: tuple[P, P]

    def operands(self, seed: int = 0, copies: int | None = None) -> tuple[jax.Array, ...]:
        """Random operands; `copies` gives each of them a leading axis."""
        rng = np.random.default_rng(seed)
        leading = () if copies is None else (copies,)
        # Packed sequences, each no longer than acc has rows for it; the last row may be unused.
        longest = ROWS // GROUP
        lengths = rng.integers(0, 1 + min(longest, TOTAL_Q // BATCH), (*leading, BATCH))
        start = np.zeros((*leading, 1), int)
        used = lengths if "cu_seqlens" in self.kinds else longest
        descriptors = {
            "cu_seqlens": np.concatenate([start, np.cumsum(lengths, axis=-1)], axis=-1),
            "seqused": np.maximum(used - rng.integers(0, 2, lengths.shape), 0),
        }
        operands = []
        for kind, shape in zip(self.kinds, self.shapes, strict=True):
            values = rng.standard_normal((*leading, *shape))
            operands.append(
                jnp.asarray(descriptors[kind], jnp.int32)
                if kind in descriptors
                else jnp.asarray(np.exp(values) if kind == "row_sum" else values, jnp.float32)
            )
        return tuple(operands)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Keyword of each operand; "" for the first one."""
        return self.function.keywords["kinds"]

    @property
    def floats(self) -> tuple[int, ...]:
        """Indices of the floating operands."""
        return tuple(i for i, k in enumerate(self.kinds) if k not in ("cu_seqlens", "seqused"))


def call_epilogue(acc, *rest, kinds, **keywords):
    return fa.epilogue(acc, **dict(zip(kinds[1:], rest, strict=True)), **keywords)


def call_combine(*operands, kinds, **keywords):
    return fa.combine(*operands, **keywords)


def _epilogue(kinds, shapes, specs, result_specs, **keywords):
    function = functools.partial(call_epilogue, kinds=("", *kinds), **keywords)
    return Operation("epilogue", function, shapes, specs, result_specs)


ACC, STATISTIC = (BATCH, HEADS, ROWS, HEAD_DIM), (BATCH, HEADS, ROWS)
HEAD_SPEC = P("data", "model")
OPERATIONS = {
    "dense": _epilogue(
        ("lse", "seqused"),
        (ACC, STATISTIC, (BATCH,)),
        (HEAD_SPEC, HEAD_SPEC, P("data")),
        (P("data", None, "model"), HEAD_SPEC),
        qhead_per_khead=GROUP,
        out_dtype=jnp.float32,
    ),
    "varlen": _epilogue(
        ("row_max", "row_sum", "cu_seqlens", "seqused"),
        (ACC, STATISTIC, STATISTIC, (BATCH + 1,), (BATCH,)),
        (P(None, "model"), P(None, "model"), P(None, "model"), P(), P()),
        (P(None, "model"), P("model")),
        qhead_per_khead=GROUP,
        total_q=TOTAL_Q,
        out_dtype=jnp.float32,
    ),
    "splits": _epilogue(
        ("row_max", "row_sum"),
        ((SPLITS, *ACC), (SPLITS, *STATISTIC), (SPLITS, *STATISTIC)),
        (P(None, "data", "model"),) * 3,
        (P(None, "data", None, "model"), P(None, "data", "model")),
        out_dtype=jnp.float32,
    ),
    "combine": Operation(
        "combine",
        functools.partial(call_combine, kinds=("", "lse_partial")),
        ((SPLITS, BATCH, ROWS, HEADS, HEAD_DIM), (SPLITS, BATCH, HEADS, ROWS)),
        (P(None, "data", None, "model"), P(None, "data", "model")),
        (P("data", None, "model"), HEAD_SPEC),
    ),
}
EVERY = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
MAPPED_COPIES = 3


def assert_equal(actual, expected, tolerance=1e-5):
    """Compare trees, NaN and infinities included."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape and a.dtype == e.dtype
        a, e = (np.asarray(x.astype(jnp.float32)) for x in (a, e))
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance)


def scalar(function):
    """A loss through both results that knows -inf."""

    def loss(*operands):
        return sum(jnp.sum(jnp.sin(jnp.where(x > -1e30, x, 0))) for x in function(*operands))

    return loss


def gradient(operation, function=None):
    """Compiled gradient for all floating operands, of the operation or of `function` instead."""
    return jax.jit(jax.grad(scalar(function or operation.function), operation.floats))


def equations(jaxpr):
    """All equations of a jaxpr, those of inner ones included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def only_equation(function, operation, *operands):
    """The single call of the operation's primitive; there is no loop around it."""
    every = list(equations(jax.make_jaxpr(function)(*operands).jaxpr))
    names = [equation.primitive.name for equation in every]
    assert not {"while", "scan"} & set(names)
    (equation,) = [e for e in every if e.primitive.name == f"jax_fa_epilogue_{operation.name}"]
    return equation


# ---- vmap ---------------------------------------------------------------------------------------


def subsets():
    for name, operation in OPERATIONS.items():
        indices = range(len(operation.shapes))
        for size in range(1, len(indices) + 1):
            for mapped in itertools.combinations(indices, size):
                yield pytest.param(operation, mapped, id=f"{name}-{''.join(map(str, mapped))}")


def some_mapped(operation, mapped):
    """Operands with an axis in front where mapped, and in_axes."""
    copies = operation.operands(1, MAPPED_COPIES)
    in_axes = [0 if i in mapped else None for i in range(len(copies))]
    return [x if i in mapped else x[0] for i, x in enumerate(copies)], in_axes


def loop(function, operands, in_axes):
    results = [
        function(*(x if axis is None else x[i] for x, axis in zip(operands, in_axes, strict=True)))
        for i in range(MAPPED_COPIES)
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


@pytest.mark.parametrize(("operation", "mapped"), list(subsets()))
def test_vmap_of_every_subset(operation, mapped):
    operands, in_axes = some_mapped(operation, mapped)
    vmapped = jax.vmap(operation.function, in_axes)
    actual = jax.jit(vmapped)(*operands)
    assert_equal(actual, loop(jax.jit(operation.function), operands, in_axes))

    equation = only_equation(vmapped, operation, *operands)
    for index, variable in enumerate(equation.invars):
        assert variable.aval.shape[0] == (MAPPED_COPIES if index in mapped else 1)
    assert all(variable.aval.shape[0] == MAPPED_COPIES for variable in equation.outvars)


@EVERY
def test_vmap_nested_at_any_axis(operation):
    """The outer map takes all operands at their last axis, the inner one the first operand only."""
    first, *rest = operation.operands(2, MAPPED_COPIES)
    first = jnp.stack([first, 2 * first])
    inner = jax.vmap(operation.function, (0, *(None for _ in rest)), out_axes=-1)
    outer = jax.vmap(inner, (2, *(-1 for _ in rest)), out_axes=1)
    operands = (jnp.moveaxis(first, 1, 2), *(jnp.moveaxis(x, 0, -1) for x in rest))
    actual = jax.jit(outer)(*operands)
    expected = [
        [operation.function(first[j, i], *(x[i] for x in rest)) for j in range(2)]
        for i in range(MAPPED_COPIES)
    ]
    for index, result in enumerate(actual):
        stacked = jnp.stack([jnp.stack([r[index] for r in row], -1) for row in expected], 1)
        assert_equal(result, stacked)
    equation = only_equation(outer, operation, *operands)
    assert equation.invars[0].aval.shape[:2] == (MAPPED_COPIES, 2)
    assert all(v.aval.shape[:2] == (MAPPED_COPIES, 1) for v in equation.invars[1:])


def test_vmap_over_splits_is_the_split_axis():
    operation = OPERATIONS["splits"]
    operands = operation.operands()
    assert_equal(jax.vmap(operation.function)(*operands), operation.function(*operands), 0)


@EVERY
def test_vmap_over_one_copy(operation):
    operands = operation.operands(3, 1)
    in_axes = (0, *(None for _ in operands[1:]))
    actual = jax.vmap(operation.function, in_axes)(operands[0], *(x[0] for x in operands[1:]))
    assert_equal(
        jax.tree.map(lambda x: x[0], actual), operation.function(*(x[0] for x in operands))
    )


# ---- Derivatives --------------------------------------------------------------------------------


def reference_function(operation):
    keywords = {k: v for k, v in operation.function.keywords.items() if k != "kinds"}
    if operation.name == "combine":
        return functools.partial(fa.reference.combine, **keywords)
    kinds = operation.kinds[1:]

    def function(acc, *rest):
        return fa.reference.epilogue(acc, **dict(zip(kinds, rest, strict=True)), **keywords)

    return function


@EVERY
def test_gradient_is_that_of_the_reference(operation):
    operands = operation.operands()
    expected = gradient(operation, reference_function(operation))(*operands)
    actual = gradient(operation)(*operands)
    assert any(jnp.any(g != 0) for g in actual)
    assert_equal(actual, expected)


@pytest.mark.parametrize("name", ["dense", "varlen"])
def test_descriptors_have_no_gradient(name):
    operation = OPERATIONS[name]
    operands = operation.operands()
    every = tuple(range(len(operands)))
    derivative = jax.grad(scalar(operation.function), every, allow_int=True)
    gradients = jax.eval_shape(derivative, *operands)
    for index in set(every) - set(operation.floats):
        assert gradients[index].dtype == jax.dtypes.float0


@EVERY
@pytest.mark.parametrize("last_only", [False, True], ids=["all", "last"])
def test_vmap_of_gradient(operation, last_only):
    indices = range(len(operation.shapes))
    operands, in_axes = some_mapped(operation, indices[-1:] if last_only else indices)
    actual = jax.jit(jax.vmap(gradient(operation), in_axes))(*operands)
    assert_equal(actual, loop(gradient(operation), operands, in_axes))


@EVERY
def test_gradient_of_vmap_sums_over_the_mapped_axis(operation):
    operands, in_axes = some_mapped(operation, (0,))
    mapped = jax.vmap(scalar(operation.function), in_axes)
    actual = jax.jit(jax.grad(lambda *x: mapped(*x).sum(), operation.floats))(*operands)
    each = loop(gradient(operation), operands, in_axes)
    assert_equal(actual, (each[0], *(g.sum(0) for g in each[1:])))


@EVERY
def test_jacrev(operation):
    operands = operation.operands()

    def corner(x):
        out, lse = operation.function(x, *operands[1:])
        return jnp.concatenate([out.ravel()[:3], jnp.maximum(lse.ravel()[:2], -1e3)])

    row = jax.jit(jax.grad(lambda x, i: corner(x)[i]))
    rows = [row(operands[0], i) for i in range(5)]
    assert_equal(jax.jit(jax.jacrev(corner))(operands[0]), jnp.stack(rows))


@EVERY
def test_second_derivative(operation):
    operands = operation.operands()
    direction = operation.operands(4)[0]

    def slope(function):
        def along(x):
            return jnp.vdot(jax.grad(scalar(function))(x, *operands[1:]), direction)

        return jax.jit(jax.grad(along))(operands[0])

    assert_equal(slope(operation.function), slope(reference_function(operation)))


@EVERY
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_forward_mode_names_the_function(operation, transform):
    operands = operation.operands()

    def along(x):
        return operation.function(x, *operands[1:])

    derivative = transform(lambda x: jax.jvp(along, (x,), (x,)))
    with pytest.raises(NotImplementedError, match=rf"jax_fa_epilogue\.{operation.name} .*jax\.jvp"):
        derivative(operands[0])


# ---- Several devices ----------------------------------------------------------------------------


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


@EVERY
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


@EVERY
def test_shard_map_knows_that_results_vary(operation, mesh):
    operands = on_host(operation.operands())
    mapped = jax.shard_map(
        operation.function, mesh=mesh, in_specs=operation.specs, out_specs=(P(), P())
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(mapped)(*operands)


@EVERY
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


# ---- Other transformations ----------------------------------------------------------------------


def export(function, platforms, *operands):
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(target)
        for target in (native.EPILOGUE_TARGET, native.COMBINE_TARGET)
    ]
    exported = jax.export.export(jax.jit(function), platforms=platforms, disabled_checks=checks)(
        *operands
    )
    return exported, jax.export.deserialize(exported.serialize(vjp_order=1))


@EVERY
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_export(operation, symbolic):
    """Also for CUDA, also on a machine without it, also with a size that is not known yet."""
    operands = arguments = operation.operands()
    if symbolic:
        # The number of packed sequences is static; there the number of heads is not known yet.
        replaced = HEADS if "cu_seqlens" in operation.kinds else BATCH
        (size,) = jax.export.symbolic_shape("n")
        arguments = [
            jax.ShapeDtypeStruct([size if n == replaced else n for n in x.shape], x.dtype)
            for x in operands
        ]
    exported, reloaded = export(operation.function, ["cpu", "cuda"], *arguments)
    target, plan = {
        "epilogue": (native.EPILOGUE_TARGET, _native.plan_epilogue("f32", 1, 1, 1, 1, HEAD_DIM)),
        "combine": (native.COMBINE_TARGET, _native.plan_combine("f32", 1, 1, 1, HEAD_DIM, 1)),
    }[operation.name]
    has_kernel = plan["built"] and native.unsupported_here() is None
    assert (target in exported.mlir_module()) == has_kernel
    assert_equal(reloaded.call(*operands), operation.function(*operands))
    assert_equal(gradient(operation, reloaded.call)(*operands), gradient(operation)(*operands))


@EVERY
def test_checkpoint(operation):
    operands = operation.operands()
    checkpointed = jax.checkpoint(operation.function)
    assert_equal(gradient(operation, checkpointed)(*operands), gradient(operation)(*operands))


@EVERY
def test_scan(operation):
    """A rematerialised loop over calls, differentiated."""
    operands = operation.operands(7, MAPPED_COPIES)

    def total(*operands):
        def step(carry, slices):
            return carry + jax.checkpoint(scalar(operation.function))(*slices), None

        return jax.lax.scan(step, jnp.float32(0), operands)[0]

    actual = jax.jit(jax.grad(total, operation.floats))(*operands)
    assert_equal(actual, loop(gradient(operation), operands, [0] * len(operands)))


@EVERY
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donation(operation):
    expected = operation.function(*operation.operands())
    donating = jax.jit(operation.function, donate_argnums=operation.floats)
    assert_equal(donating(*operation.operands()), expected)


@EVERY
def test_x64(operation):
    expected = operation.function(*operation.operands())
    operands = operation.operands()
    with jax.enable_x64(True):
        operands = [
            x if i in operation.floats else jnp.asarray(x, jnp.int64)
            for i, x in enumerate(operands)
        ]
        results = jax.jit(operation.function)(*operands)
        gradients = gradient(operation)(*operands)
        jax.jit(operation.function).trace(*operands).lower(lowering_platforms=("cuda",))
    assert {x.dtype for x in (*results, *gradients)} == {jnp.dtype(jnp.float32)}
    assert_equal(results, expected)


@EVERY
@pytest.mark.parametrize("size", [BATCH, HEADS, ROWS], ids=["batch", "heads", "rows"])
def test_empty_axes(operation, size):
    empty = {size: 0} | ({BATCH + 1: 1} if size == BATCH else {})
    operands = [
        jnp.zeros([empty.get(n, n) for n in x.shape], x.dtype) for x in operation.operands()
    ]
    results = jax.jit(operation.function)(*operands)
    full = operation.function(*operation.operands())
    replaced = empty | {HEADS * GROUP: 0 if size == HEADS else HEADS * GROUP}
    replaced[ROWS // GROUP] = 0 if size == ROWS else ROWS // GROUP
    for result, like in zip(results, full, strict=True):
        assert result.shape == tuple(replaced.get(n, n) for n in like.shape)
    out, lse = results
    if out.size:  # packed tokens that belong to no sequence
        assert jnp.all(out == 0) and jnp.all(lse == -jnp.inf)
    gradients = gradient(operation)(*operands)
    assert [g.shape for g in gradients] == [operands[i].shape for i in operation.floats]
