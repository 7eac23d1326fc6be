"""The functions of `jax.nn` that kernels compute here: change one import."""

from tilekern.nn.attention import dot_product_attention

__all__ = ["dot_product_attention"]
