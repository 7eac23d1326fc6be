"""The functions of `jax.nn`, `jax.lax` and of frameworks that kernels compute here: change one import."""

from tilekern.distributed.moe import moe
from tilekern.kernels.cross_entropy import cross_entropy
from tilekern.kernels.rope import rope
from tilekern.kernels.swiglu import swiglu
from tilekern.nn.attention import dot_product_attention
from tilekern.nn.flax_attention import attention_fn
from tilekern.nn.norms import group_norm, layer_norm, rms_norm
from tilekern.nn.products import ragged_dot, scaled_matmul
from tilekern.nn.softmaxes import log_softmax, softmax

__all__ = [
    "attention_fn",
    "cross_entropy",
    "dot_product_attention",
    "group_norm",
    "layer_norm",
    "log_softmax",
    "moe",
    "ragged_dot",
    "rms_norm",
    "rope",
    "scaled_matmul",
    "softmax",
    "swiglu",
]
