"""The functions of `jax.nn` and of frameworks that kernels compute here: change one import."""

from tilekern.nn.attention import dot_product_attention
from tilekern.nn.flax_attention import attention_fn

__all__ = ["attention_fn", "dot_product_attention"]
