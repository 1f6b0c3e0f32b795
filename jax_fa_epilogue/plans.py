"""Which kernel a call gets, and whether the call runs on it: facts of a call -> plan.

The planning itself is C++ (``cuda/host/plan*.cc``), pure functions that need no device. Here are
its arguments, the choice between kernel and reference, and the printable `Plan` of an attention
call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_fa_epilogue import _native, native, problem

_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}  # as in the kernel table

# The kernels' tanh has an absolute error of 1e-7, which the cap multiplies. The backward kernel
# recovers tanh from P and LSE, whose rounding is divided by the cap.
_MAX_SOFTCAP = 1024.0
_MIN_SOFTCAP_BACKWARD = 2.0**-8


def choose(
    name: str, implementation: str | None, plan: Callable[[], dict[str, Any]]
) -> tuple[str, dict[str, Any] | None]:
    """Choose between kernel and reference.

    Args:
      name: the public function, for errors.
      implementation: the user's choice, None or "cuda".
      plan: tells the kernel, or raises ``NotImplementedError`` where there is none.

    Returns:
      The primitives' parameter `implementation`, and the plan unless that is "xla".
    """
    reason, chosen = native.unsupported_here(), None
    if reason is None:
        try:
            chosen = plan()
            reason = _not_built(chosen)
        except NotImplementedError as error:
            reason = str(error)
    if reason is None:
        return "auto" if implementation is None else "cuda", chosen
    if implementation is None:
        return "xla", None
    raise NotImplementedError(
        f"jax_fa_epilogue.{name}: implementation='cuda' is not available: {reason}"
    )


def _not_built(plan: dict[str, Any]) -> str | None:
    if plan["built"]:
        return None
    parts = [plan[name] for name in ("preprocess", "main", "postprocess") if name in plan]
    missing = next((part for part in parts if not part["built"]), plan)
    return f"kernel {missing['kernel']} is not built"


def epilogue(facts: problem.EpilogueProblem) -> dict[str, Any]:
    """The plan of an ``epilogue`` call."""
    varlen = facts.has_cu_seqlens
    return _native.plan_epilogue(
        out_dtype=_DTYPES[facts.out_dtype.name],
        fp8_permuted_columns=facts.fp8_permuted_columns,
        **_sizes(
            batch=(1 if varlen else facts.batch) * (facts.num_splits or 1),
            heads_kv=facts.heads,
            sequences=facts.batch if varlen else 1,
            rows=facts.rows,
            head_dim=facts.head_dim,
            qhead_per_khead=facts.qhead_per_khead,
            total_q=facts.total_q if varlen else -1,
        ),
    )


def combine(facts: problem.CombineProblem) -> dict[str, Any]:
    """The plan of a ``combine`` call."""
    if facts.partial_dtype != np.float32:
        raise NotImplementedError(f"no kernel for partial results in {facts.partial_dtype}")
    return _native.plan_combine(
        out_dtype=_DTYPES[facts.out_dtype.name],
        **_sizes(
            batch=1 if facts.batch is None else facts.batch,
            heads=facts.heads,
            seqlen=facts.seqlen,
            head_dim=facts.head_dim,
            num_splits=facts.num_splits,
        ),
    )


def attention(facts: problem.AttentionProblem, *, partial: bool = False) -> dict[str, Any]:
    """The plan of an attention call's forward kernel.

    ``["num_splits"]`` is the number of parts of the key axis, chosen by the planner where the call
    leaves it open; more than one, or `partial`, and the kernel writes partial results.
    """
    if facts.dtype == np.float32:
        raise NotImplementedError("no attention kernel takes float32")
    if facts.softcap > _MAX_SOFTCAP:
        raise NotImplementedError(f"no attention kernel takes a softcap above {_MAX_SOFTCAP:g}")
    if not isinstance(facts.batch, int) and facts.varlen:
        raise NotImplementedError("no attention kernel for a symbolic number of sequences")
    if facts.varlen and not all(isinstance(n, int) for n in (facts.seqlen_q, facts.seqlen_k)):
        raise NotImplementedError("no attention kernel for a symbolic max_seqlen")
    num_splits = facts.num_splits or -1
    try:
        plan = _attention(facts, num_splits)
        # A single split needs no merging.
        return _attention(facts, 0) if plan["num_splits"] <= 1 and not partial else plan
    except NotImplementedError as error:
        raise _of_call(error, facts) from None


def _attention(facts: problem.AttentionProblem, num_splits: int) -> dict[str, Any]:
    """`num_splits`: 0 final results, 1 or more partial ones, -1 chosen by the planner."""
    varlen = facts.varlen
    return _native.plan_forward(
        dtype=_DTYPES[facts.dtype.name],
        window_left=facts.window_left,
        window_right=facts.window_right,
        has_cu_seqlens=varlen,
        has_seqused_q=facts.has_seqused_q,
        has_seqused_k=facts.has_seqused_k,
        pack_gqa=-1 if facts.pack_gqa is None else int(facts.pack_gqa),
        num_splits=num_splits,
        num_sms=native.num_multiprocessors(),
        **_sizes(
            batch=1 if varlen else facts.batch,
            heads_kv=facts.heads_kv,
            qhead_per_khead=facts.qhead_per_khead,
            sequences=facts.batch if varlen else 1,
            seqlen_q=facts.total_q if varlen else facts.seqlen_q,
            seqlen_k=facts.total_k if varlen else facts.seqlen_k,
            head_dim=facts.head_dim,
            head_dim_v=facts.head_dim_v,
            max_seqlen_q=facts.seqlen_q if varlen else -1,
            max_seqlen_k=facts.seqlen_k if varlen else -1,
        ),
    )


def backward(facts: problem.AttentionProblem) -> dict[str, Any]:
    """The plan of the kernels for an attention call's gradient."""
    if facts.dtype == np.float32:
        raise NotImplementedError("no backward kernel takes float32")
    if 0 < facts.softcap < _MIN_SOFTCAP_BACKWARD:
        raise NotImplementedError(
            f"no backward kernel takes a softcap below {_MIN_SOFTCAP_BACKWARD:g}"
        )
    varlen = facts.varlen
    sizes = {
        "seqlen_q": facts.total_q if varlen else facts.seqlen_q,
        "seqlen_k": facts.total_k if varlen else facts.seqlen_k,
        "sequences": facts.batch if varlen else 1,
        "qhead_per_khead": facts.qhead_per_khead,
    }
    if not all(isinstance(size, int) for size in sizes.values()):
        raise NotImplementedError(
            "no backward kernel for symbolic sizes other than batch and heads"
        )
    try:
        return _native.plan_backward(
            dtype=_DTYPES[facts.dtype.name],
            head_dim=facts.head_dim,
            head_dim_v=facts.head_dim_v,
            window_left=facts.window_left,
            window_right=facts.window_right,
            has_cu_seqlens=varlen,
            has_seqused_q=varlen or facts.has_seqused_q,
            has_seqused_k=varlen or facts.has_seqused_k,
            deterministic=facts.deterministic,
            num_sms=native.num_multiprocessors(),
            **sizes,
            **_sizes(batch=1 if varlen else facts.batch, heads_kv=facts.heads_kv),
        )
    except NotImplementedError as error:
        raise _of_call(error, facts) from None


def _of_call(error: NotImplementedError, facts: problem.AttentionProblem) -> NotImplementedError:
    """The planner's error with what it is about."""
    call = f"{facts.dtype}, head dimensions {facts.head_dim} and {facts.head_dim_v}"
    return NotImplementedError(f"{error} ({call})")


def merging(facts: problem.AttentionProblem, num_splits: int) -> problem.CombineProblem:
    """The ``combine`` call that merges the partial results of an attention call."""
    return problem.CombineProblem(
        num_splits=num_splits,
        batch=None if facts.varlen else facts.batch,
        seqlen=facts.total_q if facts.varlen else facts.seqlen_q,
        heads=facts.heads,
        head_dim=facts.head_dim_v,
        out_dtype=facts.dtype,
        partial_dtype=np.dtype(np.float32),
    )


@dataclasses.dataclass(frozen=True)
class Launch:
    """What is chosen for an attention call that the primitives run."""

    caller: str  # the public function
    implementation: str  # of forward_p
    merge_implementation: str  # of combine_p, if there is something to merge
    num_splits: int  # 0: the kernel writes final results
    workspace_size: int  # of forward_p


def launch(
    name: str,
    implementation: str | None,
    facts: problem.AttentionProblem,
    *,
    partial: bool = False,
) -> Launch | None:
    """Choose for an attention call; None where the reference runs. `partial` as in `attention`."""
    chosen, plan = choose(name, implementation, lambda: attention(facts, partial=partial))
    if plan is None:
        return None
    num_splits = plan["num_splits"] if partial or plan["num_splits"] > 1 else 0
    merge = chosen
    if num_splits and not partial:
        merge, _ = choose(name, implementation, lambda: combine(merging(facts, num_splits)))
    return Launch(name, chosen, merge, num_splits, plan["workspace_size"])


@dataclasses.dataclass(frozen=True)
class BackwardLaunch:
    """What is chosen for the gradient of an attention call: parameters of backward_p.

    The sizes are those of the workspaces, in elements per batch index and key/value head.
    """

    caller: str
    implementation: str
    dq_accum_size: int
    statistics_size: int
    semaphore_size: int


def launch_backward(forward: Launch, facts: problem.AttentionProblem) -> BackwardLaunch | None:
    """Choose for the gradient of a call that runs on the forward kernel; None: the reference.

    The device was looked at for the forward pass.
    """
    try:
        plan = backward(facts)
        reason = _not_built(plan)
    except NotImplementedError as error:
        reason = str(error)
    if reason is None:
        sizes = ("dq_accum_size", "statistics_size", "semaphore_size")
        return BackwardLaunch(
            forward.caller, forward.implementation, **{name: plan[name] for name in sizes}
        )
    if forward.implementation == "cuda":
        raise NotImplementedError(
            f"jax_fa_epilogue.{forward.caller}: implementation='cuda' is not available for the "
            f"gradient: {reason}"
        )
    return None


def _sizes(**sizes: Any) -> dict[str, int]:
    """Sizes for the plan; it chooses the kernel independently of those that may be symbolic."""
    return {name: size if isinstance(size, int) else 1 for name, size in sizes.items()}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How an attention call runs; ``print`` it.

    Attributes:
      runs_on_kernel: whether ``implementation=None`` takes the CUDA kernel; otherwise the XLA
        reference runs.
      reason: why it does not; None if it does.
      kernel: name of the kernel, a row of ``cuda/kernels.def``; None where no row covers the call,
        and then all that follow are None.
      built: whether this installation contains the kernel.
      block_m: rows of a tile: queries, times the query heads of a key/value head if packed.
      block_n: keys of a tile.
      pack_gqa: whether the query heads of a key/value head share a tile.
      num_splits: parts of the key axis; more than 1 are merged by the kernel of ``combine``.
      num_tiles: tiles that the launch works through.
      grid: thread blocks that are launched.
      gradient_runs_on_kernel: whether the gradient does as well, where it is asked for.
      gradient_reason: why it does not; None if it does.
      gradient_kernel: name of its main kernel; None where no row covers the call.
    """

    runs_on_kernel: bool
    reason: str | None
    kernel: str | None = None
    built: bool | None = None
    block_m: int | None = None
    block_n: int | None = None
    pack_gqa: bool | None = None
    num_splits: int | None = None
    num_tiles: int | None = None
    grid: int | None = None
    gradient_runs_on_kernel: bool = False
    gradient_reason: str | None = None
    gradient_kernel: str | None = None

    def __str__(self) -> str:
        """A line for each part of the plan."""
        runs = "the CUDA kernel" if self.runs_on_kernel else f"the XLA reference: {self.reason}"
        lines = {"runs on": runs}
        if self.kernel is not None:
            heads = "with packed heads" if self.pack_gqa else "of one head"
            lines |= {
                "kernel": f"{self.kernel} ({'built' if self.built else 'not built'})",
                "tile": f"{self.block_m} rows {heads} x {self.block_n} keys",
                "splits": str(self.num_splits),
                "grid": f"{self.grid} blocks for {self.num_tiles} tiles",
                "gradient": self.gradient_kernel
                if self.gradient_runs_on_kernel
                else f"the XLA reference: {self.gradient_reason}",
            }
        return "\n".join(f"{name:<8} {value}" for name, value in lines.items())


def describe(facts: problem.AttentionProblem, implementation: str | None) -> Plan:
    """The printable plan of an attention call."""
    reason = "implementation='xla'" if implementation == "xla" else native.unsupported_here()
    try:
        plan = attention(facts)
    except NotImplementedError as error:
        reason = reason or str(error)
        return Plan(False, reason, gradient_reason=reason)
    reason = reason or _not_built(plan)
    shown = {f.name for f in dataclasses.fields(Plan)} & set(plan)
    details = {name: plan[name] for name in shown} | {"num_splits": max(plan["num_splits"], 1)}
    gradient_reason = reason
    try:
        gradient = backward(facts)
        details["gradient_kernel"] = gradient["kernel"]
        gradient_reason = reason or _not_built(gradient)
    except NotImplementedError as error:
        gradient_reason = reason or str(error)
    return Plan(
        reason is None,
        reason,
        gradient_runs_on_kernel=gradient_reason is None,
        gradient_reason=gradient_reason,
        **details,
    )
