"""Attention with the sequence spread over devices, against plain attention on one."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_operands import dense_operands, with_gradients
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from operations import assert_equal, equations

import jax_fa_epilogue as fa

BATCH, LOCAL, HEADS, HEADS_KV, DIM, DIM_V = 2, 6, 4, 2, 8, 16
DATA, SEQ = 2, 4
LENGTH = SEQ * LOCAL
SPEC, LSE_SPEC = P("data", "seq"), P("data", None, "seq")


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """It takes nearly all the time of these tests."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def mesh(cpu_devices):
    return jax.sharding.Mesh(cpu_devices.reshape(DATA, SEQ), ("data", "seq"))


@pytest.fixture
def small_mesh(cpu_devices):
    """A ring of two, which needs no loop."""
    return jax.sharding.Mesh(cpu_devices[:, :2], ("data", "seq"))


def spread(mesh, spec=(SPEC, SPEC, SPEC), out_specs=(SPEC, LSE_SPEC), axis_names=None, **keywords):
    """(q, k, v) -> (out, lse) of whole sequences, computed by `ring_attention` on a mesh."""
    axis_name = keywords.setdefault("axis_name", "seq")
    size = int(np.prod([mesh.shape[name] for name in np.atleast_1d(axis_name)]))
    ring = functools.partial(fa.ring_attention, return_lse=True, **keywords)
    more = {} if axis_names is None else {"axis_names": axis_names}
    mapped = jax.shard_map(ring, mesh=mesh, in_specs=spec, out_specs=out_specs, **more)
    if keywords.get("layout") != "zigzag":
        return mapped

    def arranged(*operands):
        out, lse = mapped(*(fa.to_zigzag(x, size) for x in operands))
        return fa.from_zigzag(out, size), fa.from_zigzag(lse, size, axis=2)

    return arranged


def plain(**keywords):
    return functools.partial(fa.flash_attention, return_lse=True, **keywords)


def operands(seed, length=LENGTH, heads=HEADS, heads_kv=HEADS_KV, dtype=jnp.float32):
    """q, k, v, dout, dlse."""
    arrays = dense_operands(seed, BATCH, length, length, heads, heads_kv, DIM, DIM_V, dtype)
    return jax.tree.map(np.asarray, arrays)


CAUSAL, ZIGZAG = {"causal": True}, {"causal": True, "layout": "zigzag"}
MASKS = pytest.mark.parametrize("mask", [{}, CAUSAL, ZIGZAG], ids=["full", "contiguous", "zigzag"])


@pytest.fixture(scope="module")
def programs(cpu_devices):
    """A causal ring with its gradient over 4 and over 8 devices, each with LOCAL tokens.

    Compiled, and its operands.
    """

    def compiled(size):
        mesh = jax.sharding.Mesh(cpu_devices.reshape(8)[:size], ("seq",))
        whole, lse = P(None, "seq"), P(None, None, "seq")
        ring = spread(mesh, (whole,) * 3, (whole, lse), **CAUSAL)
        sharding = jax.sharding.NamedSharding(mesh, whole)
        x = operands(10, size * LOCAL)
        placed = [jax.device_put(a, sharding) for a in x[:4]]
        placed.append(jax.device_put(x[4], jax.sharding.NamedSharding(mesh, lse)))
        return with_gradients(ring).lower(*placed).compile(), placed

    return {size: compiled(size) for size in (4, 8)}


# ---- The ring: results --------------------------------------------------------------------------


def test_ring_is_plain_attention(mesh):
    """Both results and all gradients, those through lse among them, on a mesh of two axes."""
    keywords = {"softcap": 3.0, "softmax_scale": 0.5}
    x = operands(1)
    actual = with_gradients(spread(mesh, **ZIGZAG, **keywords))(*x)
    assert_equal(actual, with_gradients(plain(causal=True, **keywords))(*x))


def test_ring_of_contiguous_blocks(programs):
    program, placed = programs[4]
    x = [np.asarray(a) for a in placed]
    assert_equal(program(*placed), with_gradients(plain(causal=True))(*x))


def test_ring_without_a_mask(small_mesh):
    """Also with another number of keys."""
    q, *_, dout, dlse = operands(6)
    _, k, v, *_ = operands(7, LENGTH + 10)
    x = q, k, v, dout, dlse
    assert_equal(with_gradients(spread(small_mesh))(*x), with_gradients(plain())(*x))


def test_ring_in_16_bits(mesh):
    """Where kernels can be lowered to, this goes through their primitives."""
    x = operands(2, dtype=jnp.bfloat16)
    actual = with_gradients(spread(mesh, **ZIGZAG))(*x)
    assert_equal(actual, with_gradients(plain(causal=True))(*x), 4e-2)


def test_ring_over_both_axes_of_a_mesh(mesh):
    q, k, v, *_ = operands(3, 8 * LOCAL)
    both, lse = P(None, ("data", "seq")), P(None, None, ("data", "seq"))
    ring = spread(mesh, (both,) * 3, (both, lse), axis_name=("data", "seq"), **ZIGZAG)
    assert_equal(jax.jit(ring)(q, k, v), plain(causal=True)(q, k, v))


def test_ring_of_one_device_is_the_plain_call(cpu_devices):
    mesh = jax.sharding.Mesh(cpu_devices.reshape(8, 1)[:2], ("data", "seq"))

    def local(function):
        return jax.shard_map(function, mesh=mesh, in_specs=(SPEC,) * 3, out_specs=(SPEC, LSE_SPEC))

    def ring(*operands):
        return fa.ring_attention(*operands, axis_name="seq", return_lse=True, **ZIGZAG)

    x = operands(5)
    actual = with_gradients(local(ring))
    assert not collectives(actual.lower(*x).compile().as_text())
    assert_equal(actual(*x), with_gradients(local(plain(causal=True)))(*x), 0)


def test_ring_with_replicated_keys_and_sharded_query_heads(small_mesh):
    """Multi-query attention; the gradients of k and v are sums over "data"."""
    keys, queries = P(None, "seq"), P(None, "seq", "data")
    specs = (queries, keys, keys), (queries, P(None, "data", "seq"))
    x = operands(8, heads_kv=1)
    actual = with_gradients(spread(small_mesh, *specs))(*x)
    assert_equal(actual, with_gradients(plain())(*x))


# ---- The ring: program --------------------------------------------------------------------------


def collectives(text):
    names = (
        "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    )
    return set(re.findall(rf" ({names})(?:-start)?\(", text))


def test_ring_communicates_by_permutes_only(programs):
    for program, _ in programs.values():
        assert collectives(program.as_text()) == {"collective-permute"}


def test_memory_does_not_grow_with_the_ring(programs):
    small, large = (programs[size][0].memory_analysis() for size in (4, 8))
    assert large.temp_size_in_bytes <= 1.05 * small.temp_size_in_bytes
    # A device's own share.
    assert large.argument_size_in_bytes == small.argument_size_in_bytes


@MASKS
def test_residuals_are_the_local_operands_and_results(mask, mesh):
    q, k, v, dout, dlse = operands(11)
    kept = []

    def gradients(q, k, v, dout, dlse):
        ring = functools.partial(fa.ring_attention, axis_name="seq", return_lse=True, **mask)
        _, vjp = jax.vjp(ring, q, k, v)
        kept.extend(x.shape for x in jax.tree.leaves(vjp) if x.ndim > 1)
        return vjp((dout, dlse))

    mapped = jax.shard_map(
        gradients, mesh=mesh, in_specs=(*[SPEC] * 4, LSE_SPEC), out_specs=(SPEC,) * 3
    )
    jax.eval_shape(mapped, q, k, v, dout, dlse)
    local = [(BATCH // DATA, x.shape[1] // SEQ, *x.shape[2:]) for x in (q, k, v, dout)]
    assert sorted(kept) == sorted([*local, (BATCH // DATA, HEADS, LOCAL)])


def calls(function, *operands):
    """Names of the permutes and of the calls of attention, in the program's order."""
    every = equations(jax.make_jaxpr(function)(*operands).jaxpr)
    names = [equation.params.get("name", equation.primitive.name) for equation in every]
    return [name for name in names if name in ("ppermute", "attend")]


def test_transfer_is_issued_before_the_kernel(mesh):
    """So that XLA can run both at once: first step, loop, last step."""
    q, k, v, *_ = operands(12)
    step = ["ppermute", "ppermute", "attend"]
    assert calls(spread(mesh, **CAUSAL), q, k, v) == [*step, *step, "attend"]


def test_saved_by_name_the_ring_runs_once(mesh):
    q, k, v, *_ = operands(13)
    save = jax.checkpoint_policies.save_only_these_names
    policy = save("flash_attention_out", "flash_attention_lse")

    def permutes(function):
        def loss(*operands):
            out, lse = function(*operands)
            return jnp.sum(out) + jnp.sum(lse)

        return calls(jax.grad(loss, (0, 1, 2)), q, k, v).count("ppermute")

    ring = spread(mesh, **ZIGZAG)
    forward = calls(ring, q, k, v).count("ppermute")
    once = permutes(ring)
    assert once > forward
    assert permutes(jax.checkpoint(ring, policy=policy)) == once
    assert permutes(jax.checkpoint(ring)) == once + forward


# ---- The ring: other transformations ------------------------------------------------------------


def test_ring_leaves_the_other_axis_to_the_partitioner(mesh):
    """Manual over "seq" only."""
    q, k, v, *_ = operands(14)
    whole, lse = P(None, "seq"), P(None, None, "seq")
    ring = spread(mesh, (whole,) * 3, (whole, lse), axis_names={"seq"}, **CAUSAL)
    assert_equal(jax.jit(ring)(q, k, v), plain(causal=True)(q, k, v))


def test_ring_in_explicit_mode(cpu_devices):
    mesh = jax.sharding.Mesh(
        cpu_devices.reshape(DATA, SEQ), ("data", "seq"), axis_types=(AxisType.Explicit,) * 2
    )
    q, k, v, dout, dlse = operands(15)
    expected = plain(causal=True)(q, k, v)
    with jax.set_mesh(mesh):
        ring = spread(mesh, **CAUSAL)
        placed = [jax.device_put(x, SPEC) for x in (q, k, v)]
        actual = jax.jit(ring)(*placed)
        dout, dlse = jax.device_put(dout, SPEC), jax.device_put(dlse, LSE_SPEC)
        gradients = jax.eval_shape(with_gradients(ring), *placed, dout, dlse)[2:]
    for x in (actual[0], *gradients):
        assert jax.typeof(x).sharding.spec == P("data", "seq", None, None)
    assert_equal(jax.tree.map(np.asarray, actual), expected)


def test_vmap_of_ring(mesh):
    """Over the queries only."""
    q, k, v, *_ = operands(16)
    q = np.stack([q, -q, 2 * q])
    specs = (P(None, "data", "seq"), SPEC, SPEC)

    def mapped(q, k, v):
        ring = functools.partial(fa.ring_attention, axis_name="seq", causal=True, return_lse=True)
        return jax.vmap(ring, (0, None, None))(q, k, v)

    out_specs = (P(None, "data", "seq"), P(None, *LSE_SPEC))
    actual = jax.jit(jax.shard_map(mapped, mesh=mesh, in_specs=specs, out_specs=out_specs))(q, k, v)
    expected = [plain(causal=True)(x, k, v) for x in q]
    assert_equal(actual, jax.tree.map(lambda *x: jnp.stack(x), *expected))


def test_ring_under_vmap_with_an_axis_name():
    """All blocks on one device: no mesh at all."""
    q, k, v, *_ = operands(17)
    blocks = [x.reshape(BATCH, SEQ, LOCAL, *x.shape[2:]) for x in (q, k, v)]
    ring = functools.partial(fa.ring_attention, axis_name="blocks", causal=True)
    actual = jax.jit(jax.vmap(ring, 1, 1, axis_name="blocks"))(*blocks)
    assert_equal(actual.reshape(*q.shape[:3], DIM_V), fa.flash_attention(q, k, v, causal=True))


def test_ring_with_x64(mesh):
    x = operands(18)
    function = with_gradients(spread(mesh, **ZIGZAG))
    expected = jax.eval_shape(function, *x)
    with jax.enable_x64(True):
        assert jax.eval_shape(function, *x) == expected


def test_ring_knows_that_results_vary(mesh):
    q, k, v, *_ = operands(19)
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(spread(mesh, out_specs=(P("data"), P("data"))), q, k, v)


def test_forward_mode_names_ring_attention(mesh):
    q, k, v, *_ = operands(20)
    with pytest.raises(NotImplementedError, match=r"jax_fa_epilogue\.ring_attention .*jax\.jvp"):
        jax.jvp(lambda q: spread(mesh)(q, k, v)[0], (q,), (q,))


def test_second_derivative_names_ring_attention(mesh):
    q, k, v, *_ = operands(24)

    def slope(q):
        return jnp.sum(jax.grad(lambda q: jnp.sum(jnp.sin(spread(mesh)(q, k, v)[0])))(q))

    with pytest.raises(NotImplementedError, match=r"\.ring_attention has no second derivative"):
        jax.eval_shape(jax.grad(slope), q)


@pytest.mark.parametrize(
    ("keywords", "length_k", "message"),
    [
        ({"layout": "striped"}, LENGTH, "layout='striped'; allowed are"),
        (CAUSAL, 2 * LENGTH, "causal=True with 6 queries and 12 keys on a device"),
        (ZIGZAG, None, "layout='zigzag' with 5 tokens on a device"),
        ({"implementation": "fast"}, LENGTH, "implementation='fast'; allowed are"),
    ],
    ids=["layout", "lengths", "odd", "implementation"],
)
def test_wrong_calls_of_ring_attention(keywords, length_k, message, mesh):
    q, *_ = operands(21, LENGTH if length_k else SEQ * 5)
    _, k, v, *_ = operands(21, length_k or SEQ * 5)
    with pytest.raises(ValueError, match=re.escape(message)):
        mapped = jax.shard_map(
            functools.partial(fa.ring_attention, axis_name="seq", **keywords),
            mesh=mesh,
            in_specs=(SPEC,) * 3,
            out_specs=SPEC,
        )
        jax.eval_shape(mapped, q, k, v)


@pytest.mark.parametrize("names", [("seq", "seq"), ()])
@pytest.mark.parametrize("function", ["ring_attention", "decode_sharded"])
def test_names_of_axes_are_different(function, names):
    q, k, v, *_ = operands(22)
    more = {"lengths": np.array([1, 2])} if function == "decode_sharded" else {}
    with pytest.raises(ValueError, match=r"axis_name=.*; expected different names, at least one"):
        getattr(fa, function)(q, k, v, axis_name=names, **more)


def test_no_sequences(small_mesh):
    """Of empty arrays, too, it is known over which axes they vary."""
    q, k, v, *_ = (x[:0] for x in operands(23))
    out, lse = jax.jit(spread(small_mesh, **CAUSAL))(q, k, v)
    assert out.shape == (*q.shape[:3], v.shape[3]) and lse.size == 0
    gradients = jax.grad(lambda *x: spread(small_mesh, **CAUSAL)(*x)[0].sum(), (0, 1, 2))(q, k, v)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("function", ["ring_attention", "decode_sharded"])
def test_outside_shard_map_there_is_no_axis(function):
    q, k, v, *_ = operands(22)
    more = {"lengths": np.array([1, 2])} if function == "decode_sharded" else {}
    with pytest.raises(ValueError, match="axis_name='seq' is no axis of the mesh here"):
        getattr(fa, function)(q, k, v, axis_name="seq", **more)


@pytest.mark.parametrize("function", ["ring_attention", "decode_sharded"])
def test_kernels_of_float32_do_not_exist(function, mesh):
    q, k, v, *_ = operands(23)
    name = "ring_attention" if function == "ring_attention" else "flash_attention"

    def call(q, k, v):
        more = {"lengths": jnp.full(q.shape[:1], 3)} if function == "decode_sharded" else {}
        return getattr(fa, function)(q, k, v, axis_name="seq", implementation="cuda", **more)

    mapped = jax.shard_map(call, mesh=mesh, in_specs=(SPEC,) * 3, out_specs=SPEC)
    with pytest.raises(NotImplementedError, match=rf"\.{name}: implementation='cuda' is not"):
        jax.eval_shape(mapped, q, k, v)


# ---- The zigzag layout --------------------------------------------------------------------------


def test_zigzag_order():
    x = np.arange(12)
    arranged = fa.to_zigzag(x, 3, axis=0)
    assert arranged.tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    assert fa.from_zigzag(arranged, 3, axis=0).tolist() == x.tolist()


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_zigzag_along_any_axis(axis):
    x = np.random.default_rng(0).standard_normal((8, 16, 24))
    arranged = fa.to_zigzag(x, 4, axis)
    moved = np.moveaxis(x, axis, 0)
    chunks = np.split(moved, 8)
    expected = np.concatenate([chunks[i] for i in (0, 7, 1, 6, 2, 5, 3, 4)])
    np.testing.assert_array_equal(np.moveaxis(np.asarray(arranged), axis, 0), np.float32(expected))
    np.testing.assert_array_equal(fa.from_zigzag(arranged, 4, axis), np.float32(x))


def test_wrong_calls_of_zigzag():
    with pytest.raises(ValueError, match="x has 12 tokens along axis 0; num_shards=4 needs a mult"):
        fa.to_zigzag(np.zeros(12), 4, axis=0)
    with pytest.raises(ValueError, match="num_shards=0; allowed are 1 or more"):
        fa.from_zigzag(np.zeros(12), 0, axis=0)
    with pytest.raises(TypeError, match="num_shards is float; expected a static int"):
        fa.to_zigzag(np.zeros(12), 2.0, axis=0)
    with pytest.raises(ValueError, match="axis=1; allowed are"):
        fa.to_zigzag(np.zeros(12), 2)
    with pytest.raises(TypeError, match="axis is float; expected a static int"):
        fa.to_zigzag(np.zeros(12), 2, axis=0.0)


# ---- A sharded cache ----------------------------------------------------------------------------

ITEMS, CAPACITY = 6, SEQ * 5
LENGTHS = np.array([CAPACITY, 1, 7, 0, 10, 13], np.int32)


def cache(seed, seqlen_q, dtype=jnp.float32):
    """q, k, v, dout, dlse; what the cache holds past a sequence's length is NaN."""
    sizes = seqlen_q, CAPACITY, HEADS, HEADS_KV, DIM, DIM_V
    q, k, v, *cotangents = dense_operands(seed, ITEMS, *sizes, dtype)
    inside = (np.arange(CAPACITY) < LENGTHS[:, None])[..., None, None]
    return jax.tree.map(
        np.asarray, (q, *(jnp.where(inside, x, jnp.nan) for x in (k, v)), *cotangents)
    )


def decode(mesh, **keywords):
    def local(q, k, v, lengths):
        return fa.decode_sharded(
            q, k, v, axis_name="seq", lengths=lengths, return_lse=True, **keywords
        )

    everywhere = P("data")
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(everywhere, SPEC, SPEC, everywhere),
        out_specs=(everywhere, everywhere),
    )


def decode_plainly(causal=True, **keywords):
    def whole(q, k, v, lengths):
        return plain(causal=causal, **keywords)(q, k, v, seqused_k=lengths)

    return whole


@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_decode_sharded_is_decoding(seqlen_q, mesh):
    """Both results, the same on all devices of "seq" (out_specs), and the gradients."""
    x = *cache(31, seqlen_q), LENGTHS
    actual = with_gradients(decode(mesh, softcap=3.0))(*x)
    assert_equal(actual, with_gradients(decode_plainly(softcap=3.0))(*x))


def test_decode_sharded_without_a_mask(mesh):
    q, k, v, *_ = cache(36, 3)
    actual = jax.jit(decode(mesh, causal=False))(q, k, v, LENGTHS)
    assert_equal(actual, decode_plainly(causal=False)(q, k, v, LENGTHS))


def test_decode_sharded_in_16_bits_and_splits(mesh):
    q, k, v, *_ = cache(32, 2, jnp.bfloat16)
    actual = jax.jit(decode(mesh, num_splits=2))(q, k, v, LENGTHS)
    assert_equal(actual, decode_plainly()(q, k, v, LENGTHS))


def test_decode_sharded_with_lengths_that_lie(mesh):
    """Longer than the cache, or negative: clamped, as everywhere."""
    q, k, v, *_ = operands(33, CAPACITY)
    q, wrong, meant = q[:, :1], np.array([CAPACITY + 9, -5]), np.array([CAPACITY, 0])
    decoding = jax.jit(decode(mesh))
    assert_equal(decoding(q, k, v, wrong), decoding(q, k, v, meant))
    with jax.enable_x64(True):
        assert_equal(
            jax.jit(decode(mesh))(q, k, v, wrong + 2**40), decoding(q, k, v, meant * 0 + CAPACITY)
        )


@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_decode_sharded_leaves_the_cache_where_it_is(seqlen_q, mesh):
    q, k, v, *_ = cache(34, seqlen_q)
    text = jax.jit(decode(mesh)).lower(q, k, v, LENGTHS).compile().as_text()
    assert collectives(text) == {"all-reduce"}


def test_wrong_calls_of_decode_sharded(mesh):
    q, k, v, *_ = cache(35, 1)
    with pytest.raises(ValueError, match=r"lengths has shape \(2,\); expected \(3,\)"):
        jax.eval_shape(decode(mesh), q, k, v, LENGTHS[:4])
    with pytest.raises(TypeError, match="lengths has dtype float32; expected int32 or int64"):
        jax.eval_shape(decode(mesh), q, k, v, LENGTHS.astype(np.float32))
    with pytest.raises(TypeError, match="causal is int; expected a static bool"):
        jax.eval_shape(decode(mesh, causal=1), q, k, v, LENGTHS)
