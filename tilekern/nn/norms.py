"""Normalisation with the arguments of the layers of Flax."""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import ArrayLike

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.kernels.checks import is_float, require
from tilekern.kernels.group_norm.api import group_norm as group_norm_of_kernel
from tilekern.kernels.layer_norm.api import layer_norm as layer_norm_of_kernel
from tilekern.kernels.rms_norm.api import rms_norm as rms_norm_of_kernel
from tilekern.nn.promotion import promoted

hide_frames(__file__)


@takes_python_numbers
def rms_norm(x: ArrayLike, scale: ArrayLike | None = None, *, epsilon: float = 1e-6, dtype: Any = None) -> jax.Array:
    """x / √(mean x² + epsilon) * scale over the last axis, as `flax.nnx.RMSNorm`, computed in float32 at least.

    Args:
      x: [*B, C].
      scale: [C]; None for ones.
      epsilon: added to the mean square.
      dtype: of the computation and the result; None: what x and scale promote to.

    Returns:
      [*B, C].

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.nn import rms_norm
      >>> rms_norm(jnp.array([[3.0, -3.0]]), jnp.array([1.0, 2.0])).round(4)
      Array([[ 1., -2.]], dtype=float32)
    """
    array, factor = promoted((x, scale), dtype)
    _check("rms_norm", array, factor)
    return rms_norm_of_kernel(array, factor, eps=epsilon)


@takes_python_numbers
def layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    epsilon: float = 1e-6,
    dtype: Any = None,
) -> jax.Array:
    """(x - mean) / √(var + epsilon) * scale + bias over the last axis, as `flax.nnx.LayerNorm`, in float32 at least.

    The variance is the mean of (x - mean)², as with `use_fast_variance=False`: Flax' default, the mean of x² less the
    square of the mean, loses digits where the mean is large.

    Args:
      x: [*B, C].
      scale: [C]; None for ones.
      bias: [C]; None for zeros.
      epsilon: added to the variance.
      dtype: of the computation and the result; None: what x, scale and bias promote to.

    Returns:
      [*B, C].

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.nn import layer_norm
      >>> layer_norm(jnp.array([[1.0, 3.0]]), None, jnp.array([0.0, 5.0]), epsilon=0.0)
      Array([[-1.,  6.]], dtype=float32)
    """
    array, *vectors = promoted((x, scale, bias), dtype)
    _check("layer_norm", array, *vectors)
    return layer_norm_of_kernel(array, *vectors, eps=epsilon)


@takes_python_numbers
def group_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    num_groups: int | None = 32,
    group_size: int | None = None,
    epsilon: float = 1e-6,
    dtype: Any = None,
) -> jax.Array:
    """(x - mean) / √(var + epsilon) * scale + bias with the mean and var of each sample's groups of channels.

    As `flax.nnx.GroupNorm`, with the variance of `layer_norm`; computed in float32 at least.

    Args:
      x: [B, *S, C].
      scale: [C]; None for ones.
      bias: [C]; None for zeros.
      num_groups: of channels; None where `group_size` is given.
      group_size: channels of a group.
      epsilon: added to the variance.
      dtype: of the computation and the result; None: what x, scale and bias promote to.

    Returns:
      [B, *S, C].

    Raises:
      tilekern.errors.ArgumentError: shapes, dtypes or groups do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.nn import group_norm
      >>> group_norm(jnp.array([[[1.0, 3.0, 0.0, 8.0]]]), num_groups=2, epsilon=0.0)
      Array([[[-1.,  1., -1.,  1.]]], dtype=float32)
    """
    array, *vectors = promoted((x, scale, bias), dtype)
    _check("group_norm", array, *vectors)
    return group_norm_of_kernel(array, *vectors, num_groups=num_groups, group_size=group_size, eps=epsilon)


def _check(function: str, x: Any, *vectors: Any) -> None:
    fits = is_float(x) and x.ndim > 0 and all(v is None or v.shape == x.shape[-1:] for v in vectors)
    expected = "x[*B, C], scale[C]" + (" and bias[C]" if len(vectors) > 1 else "")
    require(
        fits,
        function,
        expected=f"{expected} (or None), which promote to a float dtype of at least 16 bits",
        fix="the last axis is normalised: move it there",
        x=x,
        **dict(zip(("scale", "bias"), vectors, strict=False)),
    )
