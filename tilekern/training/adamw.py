"""AdamW in place. Stochastic rounding keeps small steps of bfloat16 weights, without a float32 copy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from tilekern.authoring import describe, hide_frames, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.adamw_step import adamw_step
from tilekern.kernels.checks import as_real, is_float

hide_frames(__file__)


class AdamWState(NamedTuple):
    """The state of `adamw` and of `adamw_in_place`.

    Attributes:
      count: int32, the steps so far.
      first: the mean of gradients, for each weight.
      second: the mean of squared gradients, for each weight.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride] -- optax's name; no tuple's method is used
    first: Any
    second: Any


jax.export.register_namedtuple_serialization(AdamWState, serialized_name="tilekern.AdamWState")


class InPlaceOptimizer(NamedTuple):
    """A pair of functions. A step writes the new weights and state in place of the old ones.

    Attributes:
      init: `init(params)` is the state.
      step: `step(params, state, gradients)` is the pair of the new weights and the new state.
    """

    init: Callable[[Any], Any]
    step: Callable[..., tuple[Any, Any]]


@takes_python_numbers
def adamw_in_place(
    learning_rate: float | jax.Array | Callable[[jax.Array], Any],
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Callable[[Any], Any] | None = None,
    moments: Any = None,
    stochastic: bool = True,
    seed: int = 0,
    target: str | None = None,
) -> InPlaceOptimizer:
    """AdamW whose step reads and writes each array once, in place, and keeps no float32 copy of bfloat16 weights.

    A step is computed in float32 (float64 for float64). Weights and moments of bfloat16 and float16 are rounded
    stochastically, so that many small steps add up, on average, as in float32. The random bits depend only on the seed,
    the step, the weight and the element: devices that divide the weights compute the same.
    Sources: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101, algorithm 2; Zamirai et al. 2020,
    https://arxiv.org/abs/2010.06192.

    Give `donate_argnums` of the weights and the state to the `jax.jit` around the step: otherwise XLA copies them. Of
    arrays of one type JAX gives the memory of the first to the first result, so the jitted function takes weights
    before the state, and returns them in this order.
    Steps have no derivative, because they write in place.

    Args:
      learning_rate: a number, or a function of the count of the steps before.
      b1: share of the first moment that is kept, at least 0 and below 1.
      b2: the same for the second moment.
      eps: added to the root of the second moment, not negative.
      weight_decay: factor of the weights, times the learning rate.
      mask: of the weights, their tree with True where they decay, such as `lambda tree: jax.tree.map(lambda w: w.ndim >
        1, tree)`; None for all.
      moments: dtype of the moments; None for float32 (float64 for float64 weights).
      stochastic: False rounds to the nearest.
      seed: of the rounding.
      target: lower for this target's blocks, e.g. "cpu:xla".

    Returns:
      `init(params)` and `step(params, state, gradients, scale=None)`, whose `scale` is a factor of all gradients, such
      as the factor of clipping by norm.

    Raises:
      tilekern.errors.ArgumentError: a number is out of range, a weight has no float dtype of at least 16 bits, or
        gradients do not have the shapes of the weights.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from tilekern.training import adamw_in_place
      >>> optimizer, weights = adamw_in_place(0.25, weight_decay=0.0), {"w": jnp.ones((4, 8), jnp.bfloat16)}
      >>> state = optimizer.init(weights)
      >>> step = jax.jit(optimizer.step, donate_argnums=(0, 1))
      >>> weights, state = step(weights, state, {"w": jnp.ones((4, 8))})
      >>> print(weights["w"].dtype, weights["w"].max(), state.count)
      bfloat16 0.75 1
    """
    _check_numbers({"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay})
    moment_dtype = None if moments is None else _moment_dtype(moments)

    def init(params: Any) -> AdamWState:
        def zeros(weight: Any) -> jax.Array:
            _check_weight(weight)
            return jnp.zeros_like(weight, dtype=moment_dtype or jnp.promote_types(weight.dtype, jnp.float32))

        # Two separate trees, because each is donated.
        return AdamWState(jnp.int32(0), jax.tree.map(zeros, params), jax.tree.map(zeros, params))

    def step(params: Any, state: AdamWState, gradients: Any, scale: Any = None) -> tuple[Any, AdamWState]:
        weights, tree = cast(Any, jax.tree.flatten(params))
        decays = tree.unflatten([True] * len(weights)) if mask is None else mask(params)
        lists: list[list[Any]] = [tree.flatten_up_to(x) for x in (gradients, state.first, state.second, decays)]
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        factors = _factors(state.count + 1, 1.0 if scale is None else scale, rate, b1, b2)
        # One call for the keys of all weights: a call for each would be compiled for each.
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), state.count)
        keys = jax.random.key_data(jax.random.split(key, (len(weights), 3, 2)))
        stepped: list[tuple[jax.Array, ...]] = []
        for n, (weight, gradient, first, second, decay) in enumerate(zip(weights, *lists, strict=True)):
            _check_weight(weight, gradient)
            narrow = stochastic and min(x.dtype.itemsize for x in (weight, first, second)) < 4
            numbers = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay if decay else 0.0}
            arrays = weight, gradient, first, second
            stepped.append(_stepped(*arrays, factors, keys[n] if narrow else None, target, numbers))
        moved, first, second = (tree.unflatten([arrays[part] for arrays in stepped]) for part in range(3))
        return moved, AdamWState(state.count + 1, first, second)

    return InPlaceOptimizer(init, step)


def _factors(count: jax.Array, scale: Any, rate: Any, b1: float, b2: float) -> jax.Array:
    """[scale, rate, 1 / (1 - b1^count), 1 / (1 - b2^count)] as float32[4], or as float64[4] for a float64 operand.

    The last two numbers correct the moments, and are computed without cancellation.
    """
    corrections = [1.0 if b == 0 else -1 / jnp.expm1(count * math.log(b)) for b in (b1, b2)]
    dtype = jnp.promote_types(jnp.result_type(scale, rate), jnp.float32)
    return jnp.stack([jnp.asarray(x, dtype) for x in (scale, rate, *corrections)])


def _stepped(
    weight: jax.Array,
    gradient: jax.Array,
    first: jax.Array,
    second: jax.Array,
    factors: jax.Array,
    keys: jax.Array | None,
    target: str | None,
    numbers: dict[str, float],
) -> tuple[jax.Array, ...]:
    """(weight, first, second) after a step. Vectors become matrices of one row; leading dims and sharding stay."""
    if weight.size == 0:
        return weight, first, second
    shape = weight.shape if weight.ndim > 1 else (1, weight.size)
    arrays = (x.reshape(shape) for x in (weight, gradient, first, second))
    factors = factors.astype(jnp.promote_types(weight.dtype, jnp.float32))
    coordinates = () if keys is None else tuple(jnp.arange(n, dtype=jnp.uint32) for n in shape)
    results = adamw_step(*arrays, factors, keys, coordinates, target=target, **numbers)
    return tuple(x.reshape(weight.shape) for x in results)


def _moment_dtype(dtype: Any) -> Any:
    try:
        if jnp.issubdtype(jnp.dtype(dtype), jnp.floating) and jnp.dtype(dtype).itemsize > 1:
            return jnp.dtype(dtype)
    except TypeError:
        pass
    raise ArgumentError(
        "adamw_in_place keeps moments of floats",
        expected="a float dtype of at least 16 bits, or None",
        got=f"moments = {describe(dtype)}",
        fix="leave it out for float32",
    )


def _check_numbers(numbers: dict[str, Any]) -> None:
    for name, value in numbers.items():
        number = as_real(value)
        largest = 1.0 if name in ("b1", "b2") else math.inf
        if number is None or not 0 <= number < largest:
            raise ArgumentError(
                f"{name} of adamw_in_place is out of range",
                expected=f"a number of at least 0{' and below 1' if largest == 1 else ''}",
                got=f"{name} = {describe(value)}",
                fix="leave it out for the usual one",
            )


def _check_weight(weight: Any, gradient: Any = None) -> None:
    fits = is_float(weight) and (gradient is None or (is_float(gradient) and gradient.shape == weight.shape))
    if not fits:
        raise ArgumentError(
            "adamw_in_place steps weights of floats",
            expected="weights of float dtypes of at least 16 bits, and gradients of floats of their shapes",
            got=f"weight = {describe(weight)}" + ("" if gradient is None else f", gradient = {describe(gradient)}"),
            fix="leave other arrays out of the tree: eqx.partition and nnx.split part a model",
        )
