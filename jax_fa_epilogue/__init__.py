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
)

__version__ = _version("jax_fa_epilogue")

__all__ = [
    "combine",
    "dot_product_attention",
    "epilogue",
    "flash_attention",
    "flash_attention_partials",
    "flash_attention_varlen",
    "reference",
]
