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
from jax_fa_epilogue.plans import Plan

__version__ = _version("jax_fa_epilogue")

__all__ = [
    "Plan",
    "combine",
    "dot_product_attention",
    "epilogue",
    "flash_attention",
    "flash_attention_partials",
    "flash_attention_varlen",
    "plan",
    "reference",
]
