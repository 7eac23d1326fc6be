"""The operands of `sample_hidden`, checked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tilekern.authoring import hide_frames
from tilekern.kernels.checks import as_rows, is_float, refusal, require
from tilekern.kernels.quantized_array import QuantizedArray, check_quantized, is_quantized_array
from tilekern.kernels.ragged_dot.arguments import with_scales
from tilekern.kernels.sample import checks
from tilekern.kernels.sample.product import Form, Operands

hide_frames(__file__)


def operands_of(
    function: str,
    hidden: jax.Array,
    weight: jax.Array | QuantizedArray,
    bias: jax.Array | None,
    form: Form,
    devices: int = 1,
) -> Operands:
    """The operands of logits [*B, V], of which this device has V / devices tokens; hidden as [B, D].

    Raises:
      ArgumentError: shapes or dtypes do not fit, or a quantised weight has zero points.
    """
    weight = _without_zero_points(function, weight) if is_quantized_array(weight) else weight
    _check_operands(function, hidden, weight, bias, form, devices)
    operands = Operands(as_rows(hidden), weight, bias)
    return _scaled(operands, weight, form.transpose_weight) if isinstance(weight, QuantizedArray) else operands


def _check_operands(function: str, hidden: Any, weight: Any, bias: Any, form: Form, devices: int) -> None:
    """Raise an `ArgumentError` unless the operands give logits of a vocabulary that `sample` can take."""
    is_quantized = isinstance(weight, QuantizedArray)
    fits = is_float(hidden) and (is_quantized or (is_float(weight) and hidden.dtype == weight.dtype))
    fits = fits and hidden.ndim > 0 and weight.ndim == 2 and hidden.shape[-1] == weight.shape[form.transpose_weight]
    fits = fits and 0 < form.words(weight) * devices <= checks.WORDS
    optional = {} if bias is None else {"bias": bias}
    if fits and bias is not None:
        fits = is_float(bias) and bias.shape == (form.words(weight),)
    words = "V" if devices == 1 else f"V / {devices}"
    shape = f"[{words}, D]" if form.transpose_weight else f"[D, {words}]"
    require(
        fits,
        function,
        expected=f"hidden[*B, D] and weight{shape} of one float dtype of at least 16 bits, bias[{words}], V from 1 to "
        "2^19; or a QuantizedArray as weight",
        fix="cast with .astype; transpose_weight=True takes an embedding [V, D] as it is",
        hidden=hidden,
        weight=weight.values if is_quantized else weight,
        **optional,
    )


def _without_zero_points(function: str, weight: Any) -> QuantizedArray:
    """A quantised weight, of this or another library, whose scales fit.

    Raises:
      ArgumentError: the scales do not fit the values, or there are zero points.
    """
    array = QuantizedArray.of(weight)
    check_quantized(function, "weight", array)
    if array.zero_points is None:
        return array
    fix = "quantise it without zero_point=True, or call sample(quantized_matmul(hidden, weight), ...)"
    raise refusal(function, "weight", "a weight without zero points", array.zero_points, fix)


def _scaled(operands: Operands, weight: QuantizedArray, transpose_weight: bool) -> Operands:
    """The operands with a quantised weight; scales of short blocks of the inner dim are applied in memory."""
    hidden, scales = operands.hidden, weight.scales[None]
    _, values, _, scale = with_scales(hidden, weight.values[None], None, scales, transpose_weight)
    if scale is None:
        return operands._replace(weight=values[0])
    words = weight.shape[0 if transpose_weight else 1]
    of_tokens = scale if scale.shape[2] == 1 else jnp.repeat(scale, words // scale.shape[2], axis=2)
    return operands._replace(weight=values, scale=of_tokens)
