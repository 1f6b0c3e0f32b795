"""Which implementation a call gets, why, and how ``plan`` tells it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import jax_fa_epilogue as fa
from jax_fa_epilogue import _native, native

BF16, F32 = jnp.bfloat16, jnp.float32


def is_built():
    """Whether the kernels of the calls below are."""
    if not _native.cuda_built:
        return False
    names = ("epilogue_bf16_128_plain", "forward_bf16_128_128_final")
    kernels = [k for k in _native.kernels() if k["name"].startswith(names)]
    return all(k["built"] for k in kernels)


def is_backward_built():
    """Whether the kernels of the gradients below are, too."""
    names = ("preprocess_bf16", "backward_bf16_128_128", "postprocess_bf16_128")
    kernels = [k for k in _native.kernels() if k["name"].startswith(names)]
    return is_built() and all(k["built"] for k in kernels)


needs_kernels = pytest.mark.skipif(not is_built(), reason="built without the CUDA kernels used")

needs_backward = pytest.mark.skipif(
    not is_backward_built(), reason="built without the backward's CUDA kernels used"
)


def struct(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def qkv(seqlen_q=256, seqlen_k=256, dim=128, dim_v=128, dtype=BF16, batch=2):
    """Return q, k, v of ``flash_attention``, 8 and 2 heads."""
    return (
        struct(batch, seqlen_q, 8, dim, dtype=dtype),
        struct(batch, seqlen_k, 2, dim, dtype=dtype),
        struct(batch, seqlen_k, 2, dim_v, dtype=dtype),
    )


def epilogue(acc, lse, implementation):
    return fa.epilogue(acc, lse=lse, implementation=implementation)


def varlen(q, k, v, implementation):
    offsets = jnp.array([0, 1]), jnp.array([0, 1])
    keywords = {"max_seqlen_q": 9, "max_seqlen_k": 9, "implementation": implementation}
    return fa.flash_attention_varlen(q[0], k[0], v[0], *offsets, **keywords)


ACC = (struct(4, 8, 256, 128, dtype=F32), struct(4, 8, 256, dtype=F32))
CALLS = {
    "epilogue": (epilogue, ACC),
    "flash_attention": (fa.flash_attention, qkv()),
    "flash_attention_varlen": (varlen, qkv()),
    "flash_attention_partials": (
        functools.partial(fa.flash_attention_partials, num_splits=2),
        qkv(),
    ),
    "dot_product_attention": (fa.dot_product_attention, qkv()),
}
EVERY = pytest.mark.parametrize("name", CALLS)


def call_of(name, implementation):
    """A new function: JAX remembers what it traced an old one to."""
    function = CALLS[name][0]
    return lambda *operands: function(*operands, implementation=implementation)


def lowered(function, operands):
    traced = jax.jit(function).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


class FakeModule:
    """Stands in for the compiled module."""

    def __init__(self, **members):
        self.__dict__.update(members)


# ---- Errors of implementation="cuda" ------------------------------------------------------------


@needs_kernels
@EVERY
def test_cuda_is_an_error_on_other_platforms(name):
    traced = jax.jit(call_of(name, "cuda")).trace(*CALLS[name][1])
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "@jax_fa_epilogue_" in text
    with pytest.raises(NotImplementedError, match=rf"jax_fa_epilogue\.{name}: .*platform cpu"):
        traced.lower(lowering_platforms=("cpu",))


@EVERY
def test_cuda_names_a_build_without_cuda(name, monkeypatch):
    monkeypatch.setattr(native, "_native", FakeModule(cuda_built=False))
    with pytest.raises(NotImplementedError, match=rf"\.{name}: .*'cuda' is not .*without CUDA"):
        jax.eval_shape(call_of(name, "cuda"), *CALLS[name][1])
    assert "custom_call" not in lowered(call_of(name, None), CALLS[name][1])


@needs_kernels
@EVERY
def test_cuda_names_a_kernel_that_is_not_built(name, monkeypatch):
    def plan(**_):
        return {"built": False, "kernel": "kernel_of_nothing", "num_splits": 2}

    fake = FakeModule(plan_epilogue=plan, plan_forward=plan)
    monkeypatch.setattr(fa.plans, "_native", fake)
    with pytest.raises(NotImplementedError, match=rf"\.{name}: .*kernel_of_nothing is not built"):
        jax.eval_shape(call_of(name, "cuda"), *CALLS[name][1])
    assert "custom_call" not in lowered(call_of(name, None), CALLS[name][1])


@needs_kernels
@pytest.mark.parametrize(
    ("operands", "keywords", "message"),
    [
        (qkv(dtype=F32), {}, "no attention kernel takes float32"),
        (qkv(seqlen_k=2**30 + 1), {}, r"30 bits \(bfloat16, head dimensions 128 and 128\)"),
        (qkv(), {"bias": struct(256, 256)}, "no kernel takes a bias or a mask"),
        (qkv(), {"mask": struct(256, 256, dtype=bool)}, "no kernel takes a bias or a mask"),
    ],
    ids=["float32", "length", "bias", "mask"],
)
def test_cuda_names_what_is_missing(operands, keywords, message):
    def attend(implementation):
        function = fa.dot_product_attention if keywords else fa.flash_attention
        return lambda operands, keywords: function(
            *operands, **keywords, implementation=implementation
        )

    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(attend("cuda"), operands, keywords)
    assert "custom_call" not in lowered(attend(None), (operands, keywords))


# ---- Gradients ----------------------------------------------------------------------------------

GRADIENTS = ["flash_attention", "flash_attention_varlen", "dot_product_attention"]


def gradient(name, implementation):
    function = call_of(name, implementation)
    return jax.grad(lambda *x: function(*x).astype(F32).sum(), (0, 1, 2))


@needs_backward
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_run_on_the_kernels(name):
    text = lowered(gradient(name, None), CALLS[name][1])
    assert (
        text.count(f"@{native.FORWARD_TARGET}(") == text.count(f"@{native.BACKWARD_TARGET}(") == 1
    )
    assert "custom_call" not in lowered(gradient(name, "xla"), CALLS[name][1])


@needs_backward
@pytest.mark.parametrize(
    ("softcap", "forward", "backward"),
    [(1024.0, True, True), (2.0**-8, True, True), (1025.0, False, False), (2.0**-9, True, False)],
)
def test_softcaps_that_the_kernels_do_not_resolve(softcap, forward, backward):
    attend = functools.partial(fa.flash_attention, softcap=softcap)
    text = lowered(jax.grad(lambda *x: attend(*x).astype(F32).sum()), qkv())
    assert (native.FORWARD_TARGET in text, native.BACKWARD_TARGET in text) == (forward, backward)
    plan = fa.plan(*qkv(), softcap=softcap)
    assert (plan.runs_on_kernel, plan.gradient_runs_on_kernel) == (forward, backward)


@needs_backward
def test_deterministic_reaches_the_handler():
    for deterministic in (False, True):
        attend = functools.partial(fa.flash_attention, deterministic=deterministic)
        pull = jax.grad(lambda *x, f=attend: f(*x).astype(F32).sum())
        assert f"deterministic = {int(deterministic)} : i32" in lowered(pull, qkv())


@needs_kernels
@pytest.mark.parametrize("part", ["preprocess", "main", "postprocess"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_backward_kernel_that_is_not_built(name, part, monkeypatch):
    """The forward kernel runs all the same; "cuda" names what is missing, when it is needed."""

    def plan_backward(**keywords):
        plan = _native.plan_backward(**keywords)
        parts = {p: plan[p] | {"built": p != part} for p in ("preprocess", "main", "postprocess")}
        return plan | parts | {"built": False}

    fake = FakeModule(plan_forward=_native.plan_forward, plan_backward=plan_backward)
    monkeypatch.setattr(fa.plans, "_native", fake)
    operation = "backward" if part == "main" else part
    message = rf"\.{name}: .*'cuda' is not .*gradient: kernel {operation}_bf16\w* is not built"
    jax.eval_shape(call_of(name, "cuda"), *CALLS[name][1])
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(gradient(name, "cuda"), *CALLS[name][1])
    text = lowered(gradient(name, None), CALLS[name][1])
    assert native.FORWARD_TARGET in text and native.BACKWARD_TARGET not in text


@needs_kernels
def test_gradients_without_a_row_in_the_table(monkeypatch):
    def plan_backward(**_):
        raise NotImplementedError("no backward kernel of the table covers this call")

    fake = FakeModule(plan_forward=_native.plan_forward, plan_backward=plan_backward)
    monkeypatch.setattr(fa.plans, "_native", fake)
    with pytest.raises(NotImplementedError, match=r"covers this call \(bfloat16, head dimensions"):
        jax.eval_shape(gradient("flash_attention", "cuda"), *qkv())
    plan = fa.plan(*qkv())
    assert plan.runs_on_kernel and not plan.gradient_runs_on_kernel
    assert plan.gradient_kernel is None and "covers this call" in plan.gradient_reason


# ---- Which device -------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "covered"),
    [
        ("NVIDIA H200", True),
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA GH200 480GB", True),
        ("NVIDIA H20", True),
        ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA B200", False),
        ("NVIDIA GB200", False),
    ],
)
def test_the_mesh_says_which_device_is_meant(kind, covered):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        reason = native.unsupported_here()
    assert (reason is None) == covered
    assert covered or kind in reason


@needs_kernels
@pytest.mark.parametrize(
    ("capability", "covered"), [("9.0", True), ("8.0", False), ("10.0", False)]
)
def test_the_local_device_decides_without_a_mesh(monkeypatch, capability, covered):
    devices = [FakeModule(compute_capability=capability)]
    monkeypatch.setattr(native.jax, "devices", lambda platform: devices)
    reason = native.unsupported_here()
    assert (reason is None) == covered
    assert covered or f"compute capability {capability}" in reason


def test_newer_ffi_headers_are_refused():
    native.check_ffi_api_version((0, 3), (0, 3))
    native.check_ffi_api_version((0, 3), (0, 4))
    for built, running in (((0, 4), (0, 3)), ((1, 0), (0, 4)), ((0, 3), (1, 0))):
        with pytest.raises(ImportError, match="Upgrade jax and jaxlib"):
            native.check_ffi_api_version(built, running)
    assert tuple(_native.ffi_api_version()) <= native.running_ffi_api_version()


# ---- plan ---------------------------------------------------------------------------------------


@needs_kernels
def test_plan_is_readable():
    plan = fa.plan(*qkv(seqlen_q=4096, seqlen_k=4096), causal=True)
    assert plan.runs_on_kernel and plan.reason is None
    assert (plan.block_m, plan.block_n, plan.pack_gqa, plan.num_splits) == (128, 128, False, 1)
    reason = plan.gradient_reason
    assert (reason is None) == plan.gradient_runs_on_kernel == is_backward_built()
    assert str(plan).splitlines() == [
        "runs on  the CUDA kernel",
        "kernel   forward_bf16_128_128_final_128_128_2 (built)",
        "tile     128 rows of one head x 128 keys",
        "splits   1",
        f"grid     {plan.grid} blocks for 512 tiles",
        "gradient "
        + (plan.gradient_kernel if is_backward_built() else f"the XLA reference: {reason}"),
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.grid = 1


def test_plan_says_why_the_reference_runs(monkeypatch):
    assert fa.plan(*qkv(), implementation="xla").reason == "implementation='xla'"
    plan = fa.plan(*qkv(dtype=F32))
    assert not plan.runs_on_kernel and plan.kernel is None
    assert "XLA reference" in str(plan)
    monkeypatch.setattr(native, "_native", FakeModule(cuda_built=False))
    plan = fa.plan(*qkv())
    assert "without CUDA" in plan.reason and plan.kernel.startswith("forward_bf16_128")


def test_plan_of_few_queries_splits_the_keys():
    queries, keys = qkv(1, 65536, batch=1), qkv(4096, 4096, batch=4)
    assert fa.plan(*queries).num_splits > 1 and fa.plan(*queries).pack_gqa
    assert fa.plan(*keys).num_splits == 1
    assert fa.plan(*queries, num_splits=3).num_splits == 3
    assert "partial" in fa.plan(*queries, num_splits=3).kernel
    assert "final" in fa.plan(*queries, num_splits=1).kernel


def test_plan_of_packed_sequences():
    q, k, v = (struct(*x.shape[1:]) for x in qkv())
    offsets = struct(5, dtype=jnp.int32)
    longest = {"max_seqlen_q": 100, "max_seqlen_k": 200}
    plan = fa.plan(q, k, v, offsets, offsets, **longest)
    assert plan.kernel.startswith("forward_bf16_128_128")
    with pytest.raises(ValueError, match="max_seqlen_k is missing"):
        fa.plan(q, k, v, offsets, offsets, max_seqlen_q=100)


def test_plan_raises_what_the_call_raises():
    with pytest.raises(ValueError, match="q has head dimension 12"):
        fa.plan(*qkv(dim=12))
    with pytest.raises(TypeError, match="causal is int"):
        fa.plan(*qkv(), causal=1)
