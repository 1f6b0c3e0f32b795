"""JAX's transformations of every operation, alone and combined."""

import concurrent.futures
import functools
import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operations import (
    ALL,
    BATCH,
    EVERY,
    FIXED,
    GROUP,
    HEAD_DIM,
    HEADS,
    MAPPED_COPIES,
    MOST,
    OPERATIONS,
    ROWS,
    SOME,
    assert_equal,
    equations,
    gradient,
    scalar,
)

import jax_fa_epilogue as fa
from jax_fa_epilogue import _native, native


def only_equation(function, operation, *operands):
    """The single call of the operation's primitive; there is no loop around it."""
    every = list(equations(jax.make_jaxpr(function)(*operands).jaxpr))
    names = [equation.primitive.name for equation in every]
    assert not {"while", "scan"} & set(names)
    (equation,) = [e for e in every if e.primitive.name == operation.primitive]
    return equation


# ---- vmap ---------------------------------------------------------------------------------------


def subsets():
    for name, operation in OPERATIONS.items():
        indices = range(len(operation.shapes))
        sizes = range(1, len(indices) + 1)
        if name == "attention_partials":  # the primitive is that of attention
            sizes = (len(indices) - 1,)
        elif len(indices) > 5:
            sizes = (1, len(indices) - 1, len(indices))
        for size in sizes:
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


@MOST
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


@SOME
def test_vmap_over_one_copy(operation):
    operands = operation.operands(3, 1)
    in_axes = (0, *(None for _ in operands[1:]))
    actual = jax.vmap(operation.function, in_axes)(operands[0], *(x[0] for x in operands[1:]))
    assert_equal(
        jax.tree.map(lambda x: x[0], actual), operation.function(*(x[0] for x in operands))
    )


# ---- Derivatives --------------------------------------------------------------------------------


def reference_function(operation):
    return functools.partial(operation.function, module=fa.reference)


@EVERY
def test_gradient_is_that_of_the_reference(operation):
    operands = operation.operands()
    expected = gradient(operation, reference_function(operation))(*operands)
    actual = gradient(operation)(*operands)
    assert any(jnp.any(g != 0) for g in actual)
    assert_equal(actual, expected)


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "dense", "varlen"])
def test_descriptors_have_no_gradient(name):
    operation = OPERATIONS[name]
    operands = operation.operands()
    every = tuple(range(len(operands)))
    derivative = jax.grad(scalar(operation.function), every, allow_int=True)
    gradients = jax.eval_shape(derivative, *operands)
    for index in set(every) - set(operation.floats):
        assert gradients[index].dtype == jax.dtypes.float0


@MOST
@pytest.mark.parametrize("last_only", [False, True], ids=["all", "last"])
def test_vmap_of_gradient(operation, last_only):
    indices = range(len(operation.shapes))
    operands, in_axes = some_mapped(operation, indices[-1:] if last_only else indices)
    actual = jax.jit(jax.vmap(gradient(operation), in_axes))(*operands)
    assert_equal(actual, loop(gradient(operation), operands, in_axes))


@MOST
def test_gradient_of_vmap_sums_over_the_mapped_axis(operation):
    operands, in_axes = some_mapped(operation, (0,))
    mapped = jax.vmap(scalar(operation.function), in_axes)
    actual = jax.jit(jax.grad(lambda *x: mapped(*x).sum(), operation.floats))(*operands)
    each = loop(gradient(operation), operands, in_axes)
    assert_equal(actual, (each[0], *(g.sum(0) for g in each[1:])))


@pytest.mark.parametrize("implementation", ["xla", None])
@pytest.mark.parametrize("name", ["flash_attention", "flash_attention_partials"])
def test_gradient_through_lse_of_vmap_over_values_alone(name, implementation):
    """jax.custom_vjp counts a cotangent once per index where the result is not mapped."""
    more = {"num_splits": 2} if name == "flash_attention_partials" else {"return_lse": True}
    q, k, *v = (jax.random.normal(jax.random.key(i), (1, 5, 2, 8)) for i in range(5))

    def lse(q, k, v):
        return jnp.sin(getattr(fa, name)(q, k, v, **more, implementation=implementation)[1]).sum()

    mapped = jax.vmap(lse, (None, None, 0))
    actual = jax.jit(jax.grad(lambda q, k: mapped(q, k, jnp.stack(v)).sum(), (0, 1)))(q, k)
    each = jax.jit(jax.grad(lse, (0, 1)))(q, k, v[0])
    assert_equal(actual, tuple(len(v) * g for g in each))


@SOME
def test_jacrev(operation):
    operands = operation.operands()

    def corner(x):
        out, lse = operation.function(x, *operands[1:])
        return jnp.concatenate([out.ravel()[:3], jnp.maximum(lse.ravel()[:2], -1e3)])

    row = jax.jit(jax.grad(lambda x, i: corner(x)[i]))
    rows = [row(operands[0], i) for i in range(5)]
    assert_equal(jax.jit(jax.jacrev(corner))(operands[0]), jnp.stack(rows))


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "attention" not in name])
def test_second_derivative(name):
    operation = OPERATIONS[name]
    operands = operation.operands()
    direction = operation.operands(4)[0]

    def slope(function):
        def along(x):
            return jnp.vdot(jax.grad(scalar(function))(x, *operands[1:]), direction)

        return jax.jit(jax.grad(along))(operands[0])

    assert_equal(slope(operation.function), slope(reference_function(operation)))


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "attention" in name])
def test_second_derivative_of_attention_names_the_function(name):
    operation = OPERATIONS[name]
    first, *rest = operation.operands()

    def slope(x):
        return jax.grad(scalar(operation.function))(x, *rest).astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match=rf"\.{operation.name} has no second derivative"):
        jax.eval_shape(jax.grad(slope), first)


@ALL
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_forward_mode_names_the_function(operation, transform):
    operands = operation.operands()

    def along(x):
        return operation.function(x, *operands[1:])

    derivative = transform(lambda x: jax.jvp(along, (x,), (x,)))
    with pytest.raises(NotImplementedError, match=rf"jax_fa_epilogue\.{operation.name} .*jax\.jvp"):
        derivative(operands[0])


# ---- Other transformations ----------------------------------------------------------------------


def export(function, platforms, *operands):
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(target)
        for target in (
            native.FORWARD_TARGET,
            native.BACKWARD_TARGET,
            native.EPILOGUE_TARGET,
            native.COMBINE_TARGET,
        )
    ]
    exported = jax.export.export(jax.jit(function), platforms=platforms, disabled_checks=checks)(
        *operands
    )
    return exported, jax.export.deserialize(exported.serialize(vjp_order=1))


def is_built(operation):
    """Whether the kernel of the operation is."""
    if operation.name == "epilogue":
        return _native.plan_epilogue("f32", 1, 1, 1, 1, HEAD_DIM)["built"]
    if operation.name == "combine":
        return _native.plan_combine("f32", 1, 1, 1, HEAD_DIM, 1)["built"]
    operands = dict(zip(operation.kinds, operation.operands(), strict=True))
    static = {k: v for k, v in operation.function.keywords.items() if k not in FIXED}
    return fa.plan(**operands, **static).built


@EVERY
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_export(operation, symbolic):
    """Also for CUDA, also on a machine without it, also with a size that is not known yet."""
    operands = arguments = operation.operands()
    if symbolic:
        # The number of packed sequences is static; there the number of heads is not known yet.
        (size,) = jax.export.symbolic_shape("n")
        sizes = {HEADS: size, HEADS * GROUP: size * GROUP} if operation.packed else {BATCH: size}
        arguments = [
            jax.ShapeDtypeStruct([sizes.get(n, n) for n in x.shape], x.dtype) for x in operands
        ]
    exported, reloaded = export(operation.function, ["cpu", "cuda"], *arguments)
    has_kernel = is_built(operation) and native.unsupported_here() is None
    assert (f"@{operation.primitive}_v1" in exported.mlir_module()) == has_kernel
    assert_equal(reloaded.call(*operands), operation.function(*operands))
    assert_equal(gradient(operation, reloaded.call)(*operands), gradient(operation)(*operands))


RELOAD = """
import sys
import jax, numpy as np
import jax_fa_epilogue
exported = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
operands = [np.load(path) for path in sys.argv[2:]]
results, vjp = jax.vjp(exported.call, *operands)
np.savez(sys.argv[1] + ".npz", *results, *vjp(results))
"""


def test_export_reloaded_in_a_fresh_process(tmp_path):
    """After importing the package, which registers the handlers; with the gradient."""
    operation = OPERATIONS["combine"]
    operands = operation.operands()
    exported, _ = export(operation.function, ["cpu", "cuda"], *operands)
    file = tmp_path / "exported"
    file.write_bytes(exported.serialize(vjp_order=1))
    paths = [tmp_path / f"{i}.npy" for i in range(len(operands))]
    for path, x in zip(paths, operands, strict=True):
        np.save(path, x)
    command = [sys.executable, "-P", "-c", RELOAD, file, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results, vjp = jax.vjp(operation.function, *operands)
    again = np.load(f"{file}.npz")
    assert_equal([again[name] for name in again.files], (*results, *vjp(results)))


@SOME
def test_checkpoint(operation):
    operands = operation.operands()
    checkpointed = jax.checkpoint(operation.function)
    assert_equal(gradient(operation, checkpointed)(*operands), gradient(operation)(*operands))


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "attention_splits"])
def test_saved_by_name_the_kernel_runs_once(name):
    """R27: with the documented names 1 forward kernel, without any 2."""
    operation = OPERATIONS[name]
    operands = operation.operands()
    policy = jax.checkpoint_policies.save_only_these_names(
        "flash_attention_out", "flash_attention_lse"
    )
    for keywords, count in (({"policy": policy}, 1), ({}, 2)):
        function = scalar(jax.checkpoint(operation.function, **keywords))
        derivative = jax.jit(jax.grad(function, operation.floats))
        jaxpr = jax.make_jaxpr(derivative)(*operands).jaxpr
        names = [equation.primitive.name for equation in equations(jaxpr)]
        assert names.count(operation.primitive) == count


@MOST
def test_scan(operation):
    """A rematerialised loop over calls, differentiated."""
    operands = operation.operands(7, MAPPED_COPIES)

    def total(*operands):
        def step(carry, slices):
            return carry + jax.checkpoint(scalar(operation.function))(*slices), None

        return jax.lax.scan(step, jnp.float32(0), operands)[0]

    actual = jax.jit(jax.grad(total, operation.floats))(*operands)
    assert_equal(actual, loop(gradient(operation), operands, [0] * len(operands)))


@SOME
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donation(operation):
    expected = operation.function(*operation.operands())
    donating = jax.jit(operation.function, donate_argnums=operation.floats)
    assert_equal(donating(*operation.operands()), expected)


@SOME
def test_eager_traced_and_abstract_calls_agree(operation):
    operands = operation.operands()
    results = operation.function(*operands)
    assert_equal(jax.jit(operation.function)(*operands), results)
    shapes = [(x.shape, x.dtype) for x in jax.eval_shape(operation.function, *operands)]
    assert shapes == [(x.shape, x.dtype) for x in results]


def test_static_argnames():
    q, k, v, _ = OPERATIONS["attention"].operands()
    names = ("causal", "window_size", "softcap", "softmax_scale", "num_splits", "return_lse")
    compiled = jax.jit(fa.flash_attention, static_argnames=names)
    for keywords in ({"window_size": (2, 1), "softcap": 3.0}, {"causal": True, "return_lse": True}):
        assert_equal(compiled(q, k, v, **keywords), fa.flash_attention(q, k, v, **keywords))


@pytest.mark.parametrize("name", ["dense", "combine", "attention"])
def test_weak_types(name):
    """Arrays made of Python numbers: float32 like others."""
    operation = OPERATIONS[name]
    operands = [
        jnp.broadcast_to(0.5, x.shape) if i in operation.floats else x
        for i, x in enumerate(operation.operands())
    ]
    strong = [jax.lax.convert_element_type(x, x.dtype) for x in operands]
    assert jax.typeof(operands[0]).weak_type and not jax.typeof(strong[0]).weak_type
    results = operation.function(*operands)
    assert not any(x.weak_type for x in results)
    assert_equal(results, operation.function(*strong), 0)
    if name == "dense":
        assert_equal(gradient(operation)(*operands), gradient(operation)(*strong), 0)


def test_int64_descriptors_without_x64():
    operation = OPERATIONS["attention_varlen"]
    operands = operation.operands()
    wide = [x if i in operation.floats else np.asarray(x, np.int64) for i, x in enumerate(operands)]
    assert_equal(operation.function(*wide), operation.function(*operands), 0)


@pytest.mark.parametrize("name", ["attention", "dense"])
def test_debug_nans(name):
    """Rows that see no key are no reason to stop, forward or backward."""
    operation = OPERATIONS[name]
    *operands, used = operation.operands()
    operands.append(used.at[0].set(0))
    out, lse = operation.function(*operands)
    assert jnp.all(lse[0] == -jnp.inf)
    with jax.debug_nans(True):
        assert_equal(operation.function(*operands), (out, lse))
        jax.block_until_ready(gradient(operation)(*operands))


def test_threads():
    """Several threads trace, compile and run at once."""
    names = ["attention", "dense", "combine", "attention"]
    operations = [OPERATIONS[name] for name in names]
    operands = [operation.operands(seed) for seed, operation in enumerate(operations)]

    def run(index):
        return jax.jit(lambda *x: operations[index].function(*x))(*operands[index])

    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        results = list(pool.map(run, range(len(names))))
    for operation, x, result in zip(operations, operands, results, strict=True):
        assert_equal(result, operation.function(*x))


@MOST
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
    assert [x.dtype for x in results] == [x.dtype for x in expected]
    assert {x.dtype for x in gradients} == {jnp.dtype(operation.dtype)}
    assert_equal(results, expected)


@MOST
@pytest.mark.parametrize("size", [BATCH, HEADS, ROWS], ids=["batch", "heads", "rows"])
def test_empty_axes(operation, size):
    empty = {size: 0} | ({BATCH + 1: 1} if size == BATCH else {})
    if size == HEADS:
        empty[HEADS * GROUP] = 0
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
    # Packed tokens that belong to no sequence; in packed attention no axis has ROWS.
    if out.size and not (operation.name.startswith("flash_attention") and size == ROWS):
        assert jnp.all(out == 0) and jnp.all(lse == -jnp.inf)
    gradients = gradient(operation)(*operands)
    assert [g.shape for g in gradients] == [operands[i].shape for i in operation.floats]
