"""Routing of tokens to experts, and balance of experts by capacities, losses and biases."""

from __future__ import annotations

from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax import lax

from tilekern.authoring import describe, hide_frames, takes_python_numbers
from tilekern.distributed.axes import axis_size
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import is_float, is_integer, require

hide_frames(__file__)

type Gating = Literal["softmax", "sigmoid"]


@takes_python_numbers
def route(
    logits: jax.Array,
    *,
    experts_per_token: int,
    gating: Gating = "softmax",
    normalize: bool = True,
    bias: jax.Array | None = None,
    groups: int = 1,
    top_groups: int | None = None,
    scale: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """The experts of each token, by the largest logits, and the gates that multiply the experts' results.

    Mixtral and gpt-oss use the defaults, DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 2.1.2) uses
    `gating="sigmoid", bias=..., groups=8, top_groups=4, scale=2.5`.

    Args:
      logits: [T, E], a number for each token and expert, of a float dtype.
      experts_per_token: k. Larger logits come first, lower indices first among equal logits.
      gating: scores are the "softmax" over all experts, or the "sigmoid" of each logit.
      normalize: divide the k gates of a token by their sum. For "softmax" this is the softmax of the chosen logits.
      bias: [E] of a float dtype, added to the scores for the choice alone: gates and derivatives do not depend on the
        bias. See `balanced_bias`.
      groups: number of groups of E / groups neighbouring experts.
      top_groups: experts come only from this many groups, with the largest scores. The score of a group is the largest
        score of its experts, or with a bias the sum of the two largest. None: all groups.
      scale: a factor of all gates.

    Returns:
      Indices of experts int32[T, k], and gates [T, k] in float32 (float64 for float64).

    Raises:
      tilekern.errors.ArgumentError: an array or an option does not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.distributed import route
      >>> experts, gates = route(jnp.array([[0.0, 3.0, 3.0]]), experts_per_token=2)
      >>> experts.tolist(), gates.tolist()
      ([[1, 2]], [[0.5, 0.5]])
    """
    _check(logits, experts_per_token, gating, bias, groups, top_groups)
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    order = lax.stop_gradient(wide)
    if bias is not None:
        scores = jax.nn.softmax(order, axis=1) if gating == "softmax" else jax.nn.sigmoid(order)
        # Experts that logits of -inf rule out stay so.
        order = jnp.where(jnp.isneginf(order), order, scores + lax.stop_gradient(bias).astype(wide.dtype))
    if top_groups is not None and top_groups < groups:
        order = _within_groups(order, groups, top_groups, best=1 if bias is None else 2)
    experts = lax.top_k(order, experts_per_token)[1]
    chosen = jnp.take_along_axis(wide, experts, axis=1)
    if gating == "softmax":
        # The sum of the chosen gates is divided out by a softmax over the chosen logits alone.
        gates = jnp.exp(chosen - jax.nn.logsumexp(chosen if normalize else wide, axis=1, keepdims=True))
    else:
        gates = jax.nn.sigmoid(chosen)
        gates = gates / gates.sum(1, keepdims=True) if normalize else gates
    return experts, gates if scale == 1 else gates * scale


def _within_groups(order: jax.Array, groups: int, top_groups: int, *, best: int) -> jax.Array:
    """`order`, with -inf for experts outside of the `top_groups` groups with the largest sums of `best` experts."""
    tokens, experts = order.shape
    grouped = order.reshape(tokens, groups, experts // groups)
    sums = lax.top_k(grouped, min(best, experts // groups))[0].sum(2)
    in_top_groups = jax.nn.one_hot(lax.top_k(sums, top_groups)[1], groups, dtype=bool).any(1)
    return jnp.where(in_top_groups[:, :, None], grouped, -jnp.inf).reshape(tokens, experts)


@takes_python_numbers
def limit_capacity(
    experts: jax.Array, gates: jax.Array, *, num_experts: int, capacity: int
) -> tuple[jax.Array, jax.Array]:
    """Drop the rows beyond the first `capacity` of each expert: their expert is -1, their gate 0.

    First choices of all tokens come before second choices, earlier tokens before later tokens (Lepikhin et al., GShard,
    https://arxiv.org/abs/2006.16668, section 2.2). A token whose rows are all dropped has the result 0.

    Args:
      experts: integers [T, k], of `route`. Integers outside of 0, ..., num_experts - 1 stand for no expert.
      gates: [T, k] of a float dtype.
      num_experts: E.
      capacity: rows that an expert takes, at most; 0 drops all. Usual is ceil(f T k / E) with f from 1 to 2.

    Returns:
      experts and gates of the same shapes and dtypes, for `apply_experts`.

    Raises:
      tilekern.errors.ArgumentError: an array or an option does not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.distributed import limit_capacity
      >>> experts, gates = jnp.array([[0, 1], [1, 0], [0, 1]]), jnp.ones((3, 2))
      >>> limit_capacity(experts, gates, num_experts=2, capacity=2)[0].tolist()
      [[0, 1], [1, -1], [0, -1]]
    """
    _check_choice("limit_capacity", experts, gates)
    sizes: tuple[Any, Any] = (num_experts, capacity)
    if not all(isinstance(size, int) for size in sizes) or num_experts < 1 or capacity < 0:
        raise ArgumentError(
            "a capacity is a number of rows of each expert",
            expected="num_experts of at least 1 and capacity of at least 0",
            got=f"num_experts={num_experts!r}, capacity={capacity!r}",
            fix="give plain integers, such as capacity=math.ceil(1.25 * tokens * k / num_experts)",
        )
    ranks = experts.T.reshape(-1)  # first choices first
    order = jnp.argsort(ranks, stable=True)
    ordered = ranks[order]
    places = jnp.arange(ranks.size) - jnp.searchsorted(ordered, ordered)
    fits = jnp.zeros(ranks.shape, bool).at[order].set(places < capacity, unique_indices=True)
    inside = fits.reshape(experts.T.shape).T & (experts >= 0) & (experts < num_experts)
    return jnp.where(inside, experts, -1), jnp.where(inside, gates, 0)


def load_balancing_loss(logits: jax.Array, experts: jax.Array, *, axis_name: str | None = None) -> jax.Array:
    """E Σ_e f_e P_e: f_e is the share of rows that expert e gets, P_e its mean softmax over tokens.

    It is 1 for uniform routing, and at most E. Derivatives pass through P alone. Source: Fedus et al., Switch
    Transformers (https://arxiv.org/abs/2101.03961), section 2.2, with shares of all k rows of a token.

    Args:
      logits: [T, E] of a float dtype.
      experts: integers [T, k], of `route`.
      axis_name: a mesh axis that divides the tokens, inside of `jax.shard_map`; f and P are means over its devices.

    Returns:
      A scalar in float32 (float64 for float64); 0 if there are no tokens.

    Raises:
      tilekern.errors.ArgumentError: an array does not fit, or the axis is unknown.
    """
    _check_logits("load_balancing_loss", logits)
    _check_indices("load_balancing_loss", logits, experts)
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    number = logits.shape[1]
    shares = _counts(experts, number, axis_name, "load_balancing_loss").astype(wide.dtype)
    shares = shares / jnp.maximum(shares.sum(), 1)
    means = jax.nn.softmax(wide, axis=1).sum(0) / max(wide.shape[0], 1)
    if axis_name is not None:
        means = lax.pmean(means, axis_name)
    return number * jnp.vdot(shares, means, precision="highest")


def router_z_loss(logits: jax.Array, *, axis_name: str | None = None) -> jax.Array:
    """The mean over tokens of logsumexp(logits)², which keeps logits small.

    Source: Zoph et al., ST-MoE (https://arxiv.org/abs/2202.08906), equation 5.

    Args:
      logits: [T, E] of a float dtype.
      axis_name: a mesh axis that divides the tokens, inside of `jax.shard_map`.

    Returns:
      A scalar in float32 (float64 for float64); 0 if there are no tokens.

    Raises:
      tilekern.errors.ArgumentError: logits do not fit, or the axis is unknown.
    """
    _check_logits("router_z_loss", logits)
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    mean = jnp.square(jax.nn.logsumexp(wide, axis=1)).sum() / max(wide.shape[0], 1)
    if axis_name is None:
        return mean
    axis_size(axis_name, "router_z_loss")
    return lax.pmean(mean, axis_name)


@takes_python_numbers
def balanced_bias(
    bias: jax.Array, experts: jax.Array, *, rate: float = 1e-3, axis_name: str | None = None
) -> jax.Array:
    """The bias of `route` for the next step: `rate` more for experts with few rows, `rate` less for experts with many.

    Balance without a loss: Wang et al., https://arxiv.org/abs/2408.15664, algorithm 1.

    Args:
      bias: [E] of a float dtype.
      experts: integers [T, k], of `route` with this bias.
      rate: the step of the bias.
      axis_name: a mesh axis that divides the tokens, inside of `jax.shard_map`; rows of all its devices count.

    Returns:
      [E] of the dtype of bias: bias + rate · sign(mean of rows - rows of the expert).

    Raises:
      tilekern.errors.ArgumentError: an array does not fit, or the axis is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.distributed import balanced_bias
      >>> balanced_bias(jnp.zeros(2), jnp.array([[0], [0], [1]]), rate=0.5).tolist()
      [-0.5, 0.5]
    """
    require(
        is_float(bias) and bias.ndim == 1 and is_integer(experts) and experts.ndim == 2,
        "balanced_bias",
        expected="bias[E] of a float dtype and integers experts[T, k]",
        fix="reshape leading dims of experts into T",
        bias=bias,
        experts=experts,
    )
    counts = _counts(experts, bias.shape[0], axis_name, "balanced_bias")
    step = rate * jnp.sign(counts.mean() - counts)
    return bias + step.astype(bias.dtype)


def _counts(experts: jax.Array, number: int, axis_name: str | None, function: str) -> jax.Array:
    """int32[E], the rows of each expert. Indices outside of 0, ..., E - 1 do not count."""
    inside = (experts >= 0) & (experts < number)
    counts = jnp.bincount(jnp.where(inside, experts, number).reshape(-1), length=number + 1)[:number].astype(jnp.int32)
    if axis_name is None:
        return counts
    axis_size(axis_name, function)
    return cast(jax.Array, lax.psum(counts, axis_name))


# --- checks -----------------------------------------------------------------------------------------------------------


def _check(logits: Any, experts_per_token: Any, gating: Any, bias: Any, groups: Any, top_groups: Any) -> None:
    _check_logits("route", logits)
    number = logits.shape[1]
    if gating not in ("softmax", "sigmoid"):
        raise ArgumentError(
            "unknown gating",
            expected="'softmax' or 'sigmoid'",
            got=f"gating={gating!r}",
            fix="compute gates yourself, and call apply_experts",
        )
    if bias is not None and not (is_float(bias) and bias.shape == (number,)):
        raise ArgumentError(
            "a bias is a number for each expert",
            expected=f"bias[{number}] of a float dtype",
            got=f"bias = {describe(bias)}",
            fix="give one number for each column of logits",
        )
    counts = isinstance(groups, int) and (top_groups is None or isinstance(top_groups, int))
    if not counts or groups < 1 or number % groups or not 1 <= (groups if top_groups is None else top_groups) <= groups:
        raise ArgumentError(
            "groups divide the experts into equal parts, of which some are taken",
            expected=f"groups that divide {number}, dim 1 of logits, and top_groups from 1 to groups",
            got=f"groups={groups!r}, top_groups={top_groups!r}",
            fix="leave both out to choose from all experts",
        )
    most = number if top_groups is None else number // groups * top_groups
    if not isinstance(experts_per_token, int) or not 1 <= experts_per_token <= most:
        raise ArgumentError(
            "a token has at least one expert, and at most all",
            expected=f"experts_per_token from 1 to {most}, "
            + ("dim 1 of logits" if top_groups is None else f"the experts of {top_groups} groups"),
            got=f"experts_per_token={experts_per_token!r}",
            fix="choose fewer experts for a token, or give logits of more",
        )


def _check_logits(function: str, logits: Any) -> None:
    require(
        is_float(logits) and logits.ndim == 2,
        function,
        expected="logits[T, E] of a float dtype of at least 16 bits",
        fix="reshape leading dims into T",
        logits=logits,
    )


def _check_indices(function: str, logits: Any, experts: Any) -> None:
    require(
        is_integer(experts) and experts.ndim == 2 and experts.shape[0] == logits.shape[0],
        function,
        expected="logits[T, E] and integers experts[T, k]",
        fix="use the results of tilekern.distributed.route",
        logits=logits,
        experts=experts,
    )


def _check_choice(function: str, experts: Any, gates: Any) -> None:
    require(
        is_integer(experts) and is_float(gates) and experts.ndim == 2 and experts.shape == gates.shape,
        function,
        expected="integers experts[T, k] and gates[T, k] of a float dtype",
        fix="use the results of tilekern.distributed.route",
        experts=experts,
        gates=gates,
    )
