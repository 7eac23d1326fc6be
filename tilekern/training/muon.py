"""Muon: momentum made orthogonal by Newton-Schulz steps, whose products of symmetric matrices are halved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from tilekern.authoring import describe, hide_frames, is_traced, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import as_real, is_float, require
from tilekern.kernels.matmul import fused_matmul, symmetric_matmul
from tilekern.training.transformations import (
    GradientTransformation,
    Schedule,
    adamw,
    as_update,
    check_float,
    check_numbers,
    correction,
    decay_flags,
    next_count,
    rate_at,
    weights_of,
)

hide_frames(__file__)

# Jordan et al. 2024: singular values from 0 to 1 tend to 0.7 to 1.2, small values in few steps.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@takes_python_numbers
def newton_schulz(
    x: jax.Array,
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] | Sequence[tuple[float, float, float]] = COEFFICIENTS,
    eps: float | jax.Array = 0.0,
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
      eps: added to the norm.
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
    y = (y / jnp.maximum(norm + eps, 1e-37)).astype(dtype)
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
    """The state of `muon`.

    Attributes:
      count: int32, the steps so far.
      mu: the momentum of each matrix, a mean of gradients; None in the place of other weights.
      partner: the state of the partner, for the tree with None in the place of matrices.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride] -- optax's name; no tuple's method is used
    mu: Any
    partner: Any


jax.export.register_namedtuple_serialization(MuonState, serialized_name="tilekern.MuonState")


@takes_python_numbers
def muon(
    learning_rate: float | jax.Array | Schedule,
    ns_coeffs: tuple[float, float, float] | Sequence[tuple[float, float, float]] = COEFFICIENTS,
    ns_steps: int | None = None,
    beta: float | jax.Array = 0.95,
    eps: float | jax.Array = 1e-8,
    weight_decay: float | jax.Array = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    consistent_rms: float | jax.Array | None = None,
    partner: Any = None,
    matrices: Callable[[Any], Any] | None = None,
    dtype: Any = None,
    target: str | None = None,
) -> GradientTransformation:
    """Muon for the matrices of a model, and a partner for its other weights, as `optax.contrib.muon`.

    The momentum of a matrix is made orthogonal by `newton_schulz`, and multiplied by sqrt(max(1, N / M)), or by
    `consistent_rms` sqrt(max(M, N)). With 0.2 updates are as large as AdamW's (Liu et al. 2025,
    https://arxiv.org/abs/2502.16982, section 2.2). Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.

    Args:
      learning_rate: factor of updates, or a function of the count of the steps before.
      ns_coeffs: `coefficients` of `newton_schulz`, for all steps, or for each.
      ns_steps: `steps` of `newton_schulz`; None for one of each triple of coefficients, or for 5.
      beta: share of the momentum that is kept, at least 0 and below 1.
      eps: added to the norm of a momentum.
      weight_decay: factor of the matrices, times the learning rate.
      weight_decay_mask: bools in a tree like the weights, or a prefix of it, or a function from the weights to it: True
        where matrices decay. None for all.
      mu_dtype: dtype of the momentum; None for float32 (float64 for float64 weights).
      nesterov: look ahead by one step.
      consistent_rms: 0.2 for updates as large as AdamW's.
      partner: a transformation, ours or of optax, that steps all weights but the matrices. It gets trees with None in
        the place of matrices. None: `adamw(learning_rate, eps=eps, weight_decay=0, nesterov=nesterov)`.
      matrices: a function from the weights to a tree of bools: True for a matrix, or a stack of matrices [*B, M, N].
        None: weights with two dims. It can leave embeddings and heads to the partner.
      dtype: of products of `newton_schulz`, None for bfloat16. optax multiplies in the dtype of the weights.
      target: lower for this target's blocks.

    Returns:
      functions of pytrees of floats; `optax.chain(optax.clip_by_global_norm(1.0), muon(0.01))` takes them.

    Raises:
      tilekern.errors.ArgumentError: a number is out of range, or `matrices` names a vector.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from tilekern.training import adamw, muon
      >>> weights = {"w": jnp.ones((4, 8)), "b": jnp.ones(8)}
      >>> optimizer = muon(0.02, partner=adamw(0.001))
      >>> state = optimizer.init(weights)
      >>> updates, state = optimizer.update({"w": jnp.eye(4, 8), "b": jnp.ones(8)}, state, weights)
      >>> jax.tree.map(jnp.add, weights, updates)["w"].shape
      (4, 8)
    """
    check_numbers("muon", {"beta": beta, "eps": eps, "weight_decay": weight_decay})
    steps = _steps(ns_steps, ns_coeffs)
    _triples(steps, ns_coeffs)
    if partner is None:
        partner = adamw(learning_rate, eps=eps, mu_dtype=mu_dtype, weight_decay=0.0, nesterov=nesterov)

    def init(params: Any) -> MuonState:
        leaves, tree, flags = _matrices(params, matrices)
        zeros = [_momentum(x, mu_dtype) if flag else None for x, flag in zip(leaves, flags, strict=True)]
        return MuonState(jnp.int32(0), tree.unflatten(zeros), partner.init(_without_matrices(tree, leaves, flags)))

    def update(gradients: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        leaves, tree, flags = _matrices(gradients, matrices)
        weights = weights_of("muon", tree, params, weight_decay)
        decays = decay_flags(tree, weight_decay_mask, gradients if params is None else params)
        count, rate = next_count(state.count), rate_at(learning_rate, state.count)
        ahead, now = correction(beta, next_count(count)), correction(beta, count)
        partner_updates, partner_state = partner.update(
            _without_matrices(tree, leaves, flags),
            state.partner,
            None if params is None else _without_matrices(tree, weights, flags),
        )
        updates, momenta = tree.flatten_up_to(partner_updates), tree.flatten_up_to(state.mu)
        for n, (gradient, weight) in enumerate(zip(leaves, weights, strict=True)):
            if not flags[n]:
                continue
            wide = jnp.promote_types(momenta[n].dtype, jnp.float32)
            g = gradient.astype(wide)
            m = beta * momenta[n].astype(wide) + (1 - beta) * g
            mean = ahead * beta * m + now * (1 - beta) * g if nesterov else now * m
            step = newton_schulz(mean, steps=steps, coefficients=ns_coeffs, eps=eps, dtype=products, target=target)
            step = step * _scale(gradient.shape, consistent_rms)
            step = step + weight_decay * weight.astype(wide) if decays[n] and weight is not None else step
            updates[n], momenta[n] = as_update(-rate * step, gradient, weight), m.astype(momenta[n].dtype)
        return tree.unflatten(updates), MuonState(count, tree.unflatten(momenta), partner_state)

    products = jnp.bfloat16 if dtype is None else dtype
    return GradientTransformation(init, update)


def _steps(steps: Any, coefficients: Any) -> Any:
    """The number of polynomials: `steps`, or the number of triples in `coefficients`, or 5."""
    if is_traced(steps) or isinstance(steps, jax.Array):
        raise ArgumentError(
            "the ns_steps of muon are known when the step is traced",
            expected="a static int, or None",
            got=f"ns_steps = {describe(steps)}",
            fix="optax.inject_hyperparams(muon, static_args='ns_steps') leaves it static",
        )
    if steps is not None:
        return steps
    triples = list(cast(Any, coefficients)) if isinstance(coefficients, tuple | list) else []
    return len(triples) if triples and isinstance(triples[0], tuple | list) else 5


def _matrices(params: Any, matrices: Callable[[Any], Any] | None) -> tuple[list[Any], Any, list[bool]]:
    """(leaves of `params`, their tree, a flag for each leaf: True for a matrix)."""
    leaves, tree = cast(Any, jax.tree.flatten(params))
    by_dims = [getattr(x, "ndim", 0) == 2 for x in leaves]
    flags: list[bool] = by_dims if matrices is None else list(map(bool, tree.flatten_up_to(matrices(params))))
    for leaf, flag in zip(leaves, flags, strict=True):
        if not flag:
            continue
        check_float("muon", leaf)
        if leaf.ndim < 2:
            raise ArgumentError(
                "muon steps matrices",
                expected="a weight [*B, M, N] where matrices(params) is True",
                got=f"a weight {describe(leaf)}",
                fix="leave it to the partner",
            )
    return leaves, tree, flags


def _without_matrices(tree: Any, leaves: Sequence[Any], flags: Sequence[bool]) -> Any:
    """The leaves as a tree, with None in the place of each leaf whose flag is True: what the partner steps."""
    return tree.unflatten([None if flag else x for x, flag in zip(leaves, flags, strict=True)])


def _momentum(weight: Any, dtype: Any) -> jax.Array:
    return jnp.zeros_like(weight, dtype=dtype or jnp.promote_types(weight.dtype, jnp.float32))


def _scale(shape: tuple[int, ...], consistent_rms: Any) -> Any:
    """The factor of an orthogonal update [*B, M, N]: consistent_rms √max(M, N), or √max(1, N / M) without it."""
    rows, columns = shape[-2:]
    if consistent_rms is not None:
        return consistent_rms * max(rows, columns) ** 0.5
    return max(1.0, columns / max(rows, 1)) ** 0.5
