"""Optimizers as optax has them: pairs of `init` and `update`, whose updates are added to the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from tilekern.authoring import describe, hide_frames, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import as_real, is_float
from tilekern.training.adamw import AdamWState

hide_frames(__file__)

Schedule = Callable[[jax.Array], Any]


class GradientTransformation(NamedTuple):
    """A pair of functions like optax's, which optax and what is built on it take for one of their own.

    Attributes:
      init: `init(params)` is the state.
      update: `update(gradients, state, params)` is the pair of updates, to add to the weights, and the new state.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


@takes_python_numbers
def adamw(
    learning_rate: float | jax.Array | Schedule,
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.999,
    eps: float | jax.Array = 1e-8,
    eps_root: float | jax.Array = 0.0,
    mu_dtype: Any = None,
    weight_decay: float | jax.Array = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """AdamW with the arguments and results of `optax.adamw`, for `optax.chain` and the like.

    Moments and updates are computed in float32 (float64 for float64), and moments are kept in it, also for weights of
    bfloat16. `adamw_in_place` is faster and rounds stochastically: its step returns the weights. Both have the same
    state. Source: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101, algorithm 2.

    Args:
      learning_rate: a number, or a function of the count of the steps before.
      b1: share of the first moment that is kept, at least 0 and below 1.
      b2: the same for the second moment.
      eps: added to the root of the second moment.
      eps_root: added to the second moment, below the root.
      mu_dtype: dtype of the first moment; None for float32 (float64 for float64 weights).
      weight_decay: factor of the weights, times the learning rate.
      mask: bools in a tree like the weights, or a prefix of it, or a function from the weights to it: True where
        weights decay. None for all.
      nesterov: look ahead by one step.

    Returns:
      functions of pytrees of floats: `eqx.filter(model, eqx.is_inexact_array)`, say, or `nnx.state(model, nnx.Param)`.

    Raises:
      tilekern.errors.ArgumentError: a number is out of range, or a weight has no float dtype of at least 16 bits.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from tilekern.training import adamw
      >>> optimizer, weights = adamw(0.25, weight_decay=0.0), {"w": jnp.ones((4, 8))}
      >>> state = optimizer.init(weights)
      >>> updates, state = optimizer.update({"w": jnp.ones((4, 8))}, state, weights)
      >>> jax.tree.map(jnp.add, weights, updates)["w"].max()
      Array(0.75, dtype=float32)
    """
    numbers = {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root, "weight_decay": weight_decay}
    check_numbers("adamw", numbers)

    def init(params: Any) -> AdamWState:
        def zeros(weight: Any, dtype: Any = None) -> jax.Array:
            check_float("adamw", weight)
            return jnp.zeros_like(weight, dtype=dtype or jnp.promote_types(weight.dtype, jnp.float32))

        return AdamWState(
            jnp.int32(0), jax.tree.map(partial(zeros, dtype=mu_dtype), params), jax.tree.map(zeros, params)
        )

    def update(gradients: Any, state: AdamWState, params: Any = None) -> tuple[Any, AdamWState]:
        leaves, tree = cast(Any, jax.tree.flatten(gradients))
        lists: list[list[Any]] = [tree.flatten_up_to(x) for x in (state.first, state.second)]
        weights = weights_of("adamw", tree, params, weight_decay)
        decays = decay_flags(tree, mask, gradients if params is None else params)
        count = next_count(state.count)
        rate = rate_at(learning_rate, state.count)
        of_first, of_second = correction(b1, count), correction(b2, count)
        of_next = correction(b1, next_count(count))
        moved: list[tuple[jax.Array, ...]] = []
        for gradient, first, second, weight, decays_weight in zip(leaves, *lists, weights, decays, strict=True):
            check_float("adamw", gradient)
            wide = jnp.promote_types(second.dtype, jnp.float32)
            g = gradient.astype(wide)
            m = b1 * first.astype(wide) + (1 - b1) * g
            v = b2 * second.astype(wide) + (1 - b2) * g * g
            mean = of_next * b1 * m + of_first * (1 - b1) * g if nesterov else of_first * m
            step = mean / (jnp.sqrt(of_second * v + eps_root) + eps)
            step = step + weight_decay * weight.astype(wide) if decays_weight and weight is not None else step
            moved.append((as_update(-rate * step, gradient, weight), m.astype(first.dtype), v.astype(second.dtype)))
        updates, firsts, seconds = (tree.unflatten([part[n] for part in moved]) for n in range(3))
        return updates, AdamWState(count, firsts, seconds)

    return GradientTransformation(init, update)


# --- parts of transformations -----------------------------------------------------------------------------------------


def next_count(count: jax.Array) -> jax.Array:
    """The count plus 1; the largest int32 stays."""
    return jnp.where(count < jnp.iinfo(jnp.int32).max, count + 1, count)


def rate_at(learning_rate: Any, count: jax.Array) -> Any:
    """The learning rate of the step after `count` steps."""
    return learning_rate(count) if callable(learning_rate) else learning_rate


def correction(share: Any, count: jax.Array) -> Any:
    """1 / (1 - share^count), the factor that makes a moment of `count` steps unbiased, without cancellation."""
    if as_real(share) == 0:
        return 1.0
    logarithm = jnp.log(share) if as_real(share) is None else math.log(share)
    return -1 / jnp.expm1(count * logarithm)


def as_update(update: jax.Array, gradient: jax.Array, weight: jax.Array | None) -> jax.Array:
    """The update in the dtype to which gradient and weight promote."""
    return update.astype(gradient.dtype if weight is None else jnp.promote_types(gradient.dtype, weight.dtype))


def weights_of(function: str, tree: Any, params: Any, weight_decay: Any) -> list[Any]:
    """The leaves of the weights, or None for each; weights that decay must be given."""
    if params is not None:
        return tree.flatten_up_to(params)
    if as_real(weight_decay) == 0:
        return [None] * tree.num_leaves
    raise ArgumentError(
        f"{function} with weight decay needs the weights",
        expected="update(gradients, state, params)",
        got="params = None",
        fix="give params to update, or weight_decay=0",
    )


def decay_flags(tree: Any, mask: Any, params: Any) -> list[bool]:
    """A flag for each leaf: True where weights decay. A mask may be a prefix of the tree, and a function of it."""
    if mask is None:
        return [True] * tree.num_leaves

    def spread(flag: Any, part: Any) -> Any:
        def same(_: Any) -> Any:
            return flag

        return jax.tree.map(same, part)

    return tree.flatten_up_to(jax.tree.map(spread, mask(params) if callable(mask) else mask, params))


def check_numbers(function: str, numbers: dict[str, Any]) -> None:
    """Refuse negative numbers, and shares (b1, b2, beta) of 1 or more. Arrays without dims are not looked into."""
    for name, value in numbers.items():
        number = as_real(value)
        share = name in ("b1", "b2", "beta")
        if number is None and getattr(value, "shape", None) == () and jnp.issubdtype(value.dtype, jnp.number):
            continue
        if number is None or not 0 <= number < (1.0 if share else math.inf):
            raise ArgumentError(
                f"{name} of {function} is out of range",
                expected=f"a number of at least 0{' and below 1' if share else ''}",
                got=f"{name} = {describe(value)}",
                fix="leave it out for the usual one",
            )


def check_float(function: str, leaf: Any) -> None:
    """Refuse a weight or a gradient that is no array of floats."""
    if is_float(leaf):
        return
    raise ArgumentError(
        f"{function} steps weights of floats",
        expected="trees of arrays of float dtypes of at least 16 bits",
        got=f"a leaf {describe(leaf)}",
        fix="leave other arrays out of the tree: eqx.partition and nnx.split part a model",
    )
