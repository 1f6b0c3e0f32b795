"""Manual mesh axes: inside ``jax.shard_map``, an array varies over some of them, or over none."""

from __future__ import annotations

from typing import TypeVar

import jax

_Tree = TypeVar("_Tree")


def match_varying(operands: _Tree) -> _Tree:
    """Let all arrays of a tree vary over the same axes, as a primitive and a loop's state need it.

    The transpose of this cast sums the gradients of operands that were replicated over devices.
    """
    leaves, structure = jax.tree.flatten(operands)
    varying = [jax.typeof(x).manual_axis_type.varying for x in leaves]
    axes = frozenset().union(*varying)
    leaves = [
        jax.lax.pcast(x, tuple(axes - own), to="varying") if axes - own else x
        for x, own in zip(leaves, varying, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)
