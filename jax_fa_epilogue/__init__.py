"""FlashAttention for JAX on Hopper GPUs, and its epilogue as an operation of its own."""

from importlib.metadata import version as _version

from jax_fa_epilogue import reference
from jax_fa_epilogue.api import (
    combine,
    dot_product_attention,
    epilogue,
    flash_attention,
    flash_attention_partials,
    flash_attention_varlen,
    plan,
)
from jax_fa_epilogue.context_parallel import (
    decode_sharded,
    from_zigzag,
    ring_attention,
    to_zigzag,
)
from jax_fa_epilogue.plans import Plan

__version__ = _version("jax_fa_epilogue")

__all__ = [
    "Plan",
    "combine",
    "decode_sharded",
    "dot_product_attention",
    "epilogue",
    "flash_attention",
    "flash_attention_partials",
    "flash_attention_varlen",
    "from_zigzag",
    "plan",
    "reference",
    "ring_attention",
    "to_zigzag",
]
