"""Static keyword arguments: each function checks one kind and returns it as plain Python.

``TypeError`` is a wrong kind of argument, ``ValueError`` a value that is not allowed; both name the
argument.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import numpy as np

# A bound that reaches this far is none: positions are int32, and a larger bound would wrap around.
_UNBOUNDED = 2**30


def flag(name: str, value: Any) -> bool:
    """Return a static bool; anything else is a ``TypeError``."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {type(value).__name__}; expected a static bool")
    return bool(value)


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return a static int from `low` to `high`."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is {type(value).__name__}; expected a static int")
    if value < low or (high is not None and value > high):
        raise ValueError(
            f"{name}={value}; allowed are {low} or more" + (f", up to {high}" if high else "")
        )
    return int(value)


def size(name: str, value: Any) -> Any:
    """Return a size: a static int or a symbolic dimension."""
    return value if jax.export.is_symbolic_dim(value) else integer(name, value, 0)


def number(name: str, value: Any) -> float:
    """Return a static float that float32 can hold."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} is {type(value).__name__}; expected a static float")
    if not abs(value) <= float(np.finfo(np.float32).max):
        raise ValueError(f"{name}={value}; allowed are finite float32 numbers")
    return float(value)


def softmax_scale(name: str, value: Any, head_dim: int) -> float:
    """Return the factor on q.k; None is the usual one."""
    return 1.0 / math.sqrt(head_dim) if value is None else number(name, value)


def softcap(value: Any) -> float:
    """Return the cap of the logits, 0 for none."""
    softcap = number("softcap", value)
    if softcap != 0 and softcap < float(np.finfo(np.float32).tiny):
        raise ValueError(
            f"softcap={softcap}; allowed are 0 (none) and positive normal float32 numbers"
        )
    return softcap


def window(name: str, value: Any, left_reach: Any, right_reach: Any, low: int) -> tuple[int, int]:
    """Return (left, right), with -1 for a bound that excludes no key because it is >= its reach."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(
            f"{name} is {type(value).__name__}; expected a tuple (left, right) of static ints"
        )
    if len(value) != 2:
        raise ValueError(f"{name}={value} has {len(value)} entries; expected (left, right)")
    sides = []
    for side, bound, reach in zip(("left", "right"), value, (left_reach, right_reach), strict=True):
        bound = integer(f"{name} ({side})", bound, low)
        covers = bound >= _UNBOUNDED or (isinstance(reach, int) and bound >= reach)
        sides.append(-1 if covers else bound)
    return sides[0], sides[1]
