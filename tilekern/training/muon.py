"""Muon: momentum made orthogonal by Newton-Schulz steps, whose products of symmetric matrices are halved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from tilekern.authoring import describe, hide_frames, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.api import as_real, is_float, require
from tilekern.kernels.matmul import fused_matmul, symmetric_matmul

hide_frames(__file__)

# Jordan et al. 2024: singular values from 0 to 1 tend to 0.7 to 1.2, small values in few steps.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@takes_python_numbers
def newton_schulz(
    x: jax.Array,
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] | Sequence[tuple[float, float, float]] = COEFFICIENTS,
    dtype: Any = jnp.bfloat16,
    target: str | None = None,
) -> jax.Array:
    """Nearly orthogonal matrices: U Vᵀ of x = U S Vᵀ, but for singular values from about 0.7 to 1.2 instead of 1.

    x over its Frobenius norm goes through odd polynomials, a X + (b A + c A²) X with A = X Xᵀ of the shorter side. A
    and A² are symmetric, so that half of their elements are computed. Source: Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon/.

    Args:
      x: [*B, M, N] of any float dtype of at least 16 bits.
      steps: the number of polynomials.
      coefficients: (a, b, c) of all steps, or a triple for each.
      dtype: of products; sums within are float32.
      target: lower for this target's blocks, e.g. "cpu:xla".

    Returns:
      [*B, M, N] in the dtype of x. A matrix of zeros stays zero.

    Raises:
      tilekern.errors.ArgumentError: x is no matrix of floats, or the steps and coefficients do not fit.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from tilekern.training import newton_schulz
      >>> x = jax.random.normal(jax.random.key(0), (8, 16))
      >>> values = jnp.linalg.svd(newton_schulz(x), compute_uv=False)
      >>> bool((values > 0.6).all() and (values < 1.3).all())
      True
    """
    require(
        is_float(x) and x.ndim >= 2,
        "newton_schulz",
        expected="x[*B, M, N] of a float dtype of at least 16 bits",
        fix="reshape other weights into matrices, or use another optimizer for them",
        x=x,
    )
    triples = _triples(steps, coefficients)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    flip = x.shape[-2] > x.shape[-1]
    y = (x.mT if flip else x).astype(wide)
    norm = jnp.sqrt(jnp.sum(y * y, axis=(-2, -1), keepdims=True))
    y = (y / jnp.maximum(norm, 1e-37)).astype(dtype)
    for a, b, c in triples:
        gram = symmetric_matmul(y, target=target)
        mixed = symmetric_matmul(gram, gram, scale=c, scale_added=b, target=target)
        y = _added(mixed, y, a, target)
    return (y.mT if flip else y).astype(x.dtype)


def _triples(steps: Any, coefficients: Any) -> list[tuple[float, float, float]]:
    try:
        several: list[Any] = list(coefficients)
        if all(as_real(number) is not None for number in several):
            several = [tuple(several)] * steps
        fits = len(several) == steps and all(len(c) == 3 and None not in map(as_real, c) for c in several)
    except TypeError:
        several, fits = [], False
    if fits:
        return [cast(Any, tuple(map(float, c))) for c in several]
    raise ArgumentError(
        "the steps and coefficients of newton_schulz do not fit",
        expected="steps, an int of at least 0, and three numbers, or three for each step",
        got=f"steps = {describe(steps)}, coefficients = {describe(coefficients)}",
        fix="leave both out for the usual five steps",
    )


def _plus_scaled(product: jax.Array, y: jax.Array, a: jax.Array) -> jax.Array:
    return product + a * y


def _added(mixed: jax.Array, y: jax.Array, a: float, target: str | None) -> jax.Array:
    """[*B, M, N]: mixed[*B, M, M] @ y[*B, M, N] + a y."""

    def of_matrices(mixed: jax.Array, y: jax.Array) -> jax.Array:
        return fused_matmul(mixed, y, y, jnp.float32(a), epilogue=_plus_scaled, target=target)

    for _ in range(y.ndim - 2):
        of_matrices = jax.vmap(of_matrices)
    return of_matrices(mixed, y)


class MuonState(NamedTuple):
    """The state of `muon`: the momentum of each weight, in float32."""

    momentum: Any


class Optimizer(NamedTuple):
    """A pair of functions like optax's GradientTransformation, for `optax.chain`.

    Attributes:
      init: `init(params)` is the state.
      update: `update(gradients, state, params)` is the pair of updates, to add to the weights, and the new state.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


@takes_python_numbers
def muon(
    learning_rate: float,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.0,
    steps: int = 5,
    target: str | None = None,
) -> Optimizer:
    """Muon, for the matrices of a model; give embeddings, heads, norms and biases to another optimizer.

    The momentum of each weight is made orthogonal by `newton_schulz`, and multiplied by 0.2 sqrt(max(M, N)), so that
    updates are as large as AdamW's and its learning rate and weight decay serve (Liu et al. 2025,
    https://arxiv.org/abs/2502.16982, section 2.2).

    Args:
      learning_rate: factor of updates.
      momentum: factor of the gradients before, from 0 to 1.
      nesterov: look ahead by one step.
      weight_decay: factor of the weights, times the learning rate.
      steps: of `newton_schulz`.
      target: lower for this target's blocks.

    Returns:
      functions of pytrees of weights [*B, M, N]; `optax.chain(optax.clip_by_global_norm(1.0), muon(0.01))` takes them.

    Raises:
      tilekern.errors.ArgumentError: a weight is no matrix.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from tilekern.training import muon
      >>> optimizer, weights = muon(0.02), {"w": jnp.ones((4, 8))}
      >>> state = optimizer.init(weights)
      >>> updates, state = optimizer.update({"w": jnp.eye(4, 8)}, state, weights)
      >>> jax.tree.map(jnp.add, weights, updates)["w"].shape
      (4, 8)
    """

    def init(params: Any) -> MuonState:
        def zeros(weight: jax.Array) -> jax.Array:
            return jnp.zeros(weight.shape, jnp.promote_types(weight.dtype, jnp.float32))

        return MuonState(jax.tree.map(zeros, params))

    def update(gradients: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        if weight_decay and params is None:
            raise ArgumentError(
                "muon with weight decay needs the weights",
                expected="update(gradients, state, params)",
                got="params = None",
                fix="give params to update, or leave weight_decay out",
            )

        def grown(m: jax.Array, gradient: jax.Array) -> jax.Array:
            return momentum * m + gradient.astype(m.dtype)

        momenta = jax.tree.map(grown, state.momentum, gradients)

        def step(gradient: jax.Array, m: jax.Array, weight: jax.Array | None = None) -> jax.Array:
            ahead = gradient.astype(m.dtype) + momentum * m if nesterov else m
            direction = newton_schulz(ahead, steps=steps, target=target) * (0.2 * max(m.shape[-2:]) ** 0.5)
            if weight_decay and weight is not None:
                direction = direction + weight_decay * weight.astype(direction.dtype)
            return (-learning_rate * direction).astype(gradient.dtype)

        weights = () if params is None else (params,)
        return jax.tree.map(step, gradients, momenta, *weights), MuonState(momenta)

    return Optimizer(init, update)
