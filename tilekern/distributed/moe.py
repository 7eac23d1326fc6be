"""Mixtures of experts: tokens are sent to the devices that hold their experts, and results are sent back.

Shazeer et al., Outrageously Large Neural Networks (ICLR 2017); no token is dropped, as in Gale et al., MegaBlocks
(MLSys 2023). A "row" is a token for one of its experts: a token has as many rows as experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import jax
import jax.numpy as jnp

from tilekern.authoring import describe, hide_frames, takes_python_numbers
from tilekern.distributed.axes import axis_size
from tilekern.distributed.exchange import METHODS, Layout, Method, receive, send
from tilekern.distributed.routing import Gating, limit_capacity, route
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import is_float, is_integer, require
from tilekern.kernels.quantization import LARGEST, is_quantized, quantize
from tilekern.kernels.ragged_dot import fused_ragged_dot, ragged_dot
from tilekern.kernels.swiglu.reference import ACTIVATIONS

hide_frames(__file__)

Activation = str | Callable[[Any, Any], Any]


@takes_python_numbers
def moe(
    x: jax.Array,
    logits: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    biases: Sequence[jax.Array] | None = None,
    scales: Sequence[jax.Array | None] | None = None,
    quantize_rows: str | None = None,
    activation: Activation = "silu",
    experts_per_token: int,
    gating: Gating = "softmax",
    normalize: bool = True,
    bias: jax.Array | None = None,
    groups: int = 1,
    top_groups: int | None = None,
    scale: float = 1.0,
    capacity: int | None = None,
    axis_name: str | None = None,
    exchange: Method | None = None,
    target: str | None = None,
) -> jax.Array:
    """A mixture of experts: `route` chooses experts for each token, `apply_experts` applies them.

    Args:
      x: [T, H], the tokens of this device: float32, bfloat16, float16 or float64.
      logits: [T, E], a number for each token and expert, as a rule of the router: x @ w_router.
      w_gate: [E / n, H, F] of the dtype of x, or of 8 or 4 bits, as of `apply_experts`; the experts of this device
        among n; the first device has the first ones.
      w_up: [E / n, H, F].
      w_down: [E / n, F, H].
      biases: as of `apply_experts`.
      scales: as of `apply_experts`.
      quantize_rows: as of `apply_experts`.
      activation: as of `apply_experts`.
      experts_per_token: k, as of `route`.
      gating: as of `route`.
      normalize: as of `route`.
      bias: as of `route`.
      groups: as of `route`.
      top_groups: as of `route`.
      scale: as of `route`.
      capacity: rows that an expert takes from the tokens of each device, as of `limit_capacity`; None: all rows.
      axis_name: the mesh axis that divides tokens and experts; None if this device has all experts.
      exchange: as of `apply_experts`.
      target: lower for this target's blocks, e.g. "cpu:xla".

    Returns:
      out[T, H] in the dtype of x.

    Raises:
      tilekern.errors.ArgumentError: an array or an option does not fit, or the axis is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.distributed import moe
      >>> one, scales = jnp.ones((2, 1, 1)), jnp.array([1.0, 10.0]).reshape(2, 1, 1)
      >>> out = moe(jnp.ones((2, 1)), jnp.array([[9.0, 0.0], [0.0, 9.0]]), one, one, scales, experts_per_token=1)
      >>> out.ravel() / out[0]
      Array([ 1., 10.], dtype=float32)
    """
    _check("moe", x, w_gate, w_up, w_down, biases, scales)
    devices = 1 if axis_name is None else axis_size(axis_name, "moe")
    experts, gates = route(
        logits,
        experts_per_token=experts_per_token,
        gating=gating,
        normalize=normalize,
        bias=bias,
        groups=groups,
        top_groups=top_groups,
        scale=scale,
    )
    _check_logits(x, logits, w_gate.shape[0], devices, axis_name)
    if capacity is not None:
        experts, gates = limit_capacity(experts, gates, num_experts=logits.shape[1], capacity=capacity)
    options: Any = {"biases": biases, "scales": scales, "quantize_rows": quantize_rows, "activation": activation}
    options |= {"axis_name": axis_name, "exchange": exchange, "target": target}
    return apply_experts(x, experts, gates, w_gate, w_up, w_down, **options)


def apply_experts(
    x: jax.Array,
    experts: jax.Array,
    gates: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    biases: Sequence[jax.Array] | None = None,
    scales: Sequence[jax.Array | None] | None = None,
    quantize_rows: str | None = None,
    activation: Activation = "silu",
    axis_name: str | None = None,
    exchange: Method | None = None,
    target: str | None = None,
) -> jax.Array:
    """Σ_j gates[t, j] · (silu(x[t] @ w_gate[e]) * (x[t] @ w_up[e])) @ w_down[e] with e = experts[t, j].

    No token is dropped, however uneven the routing is. Rows are sorted by expert. One `fused_ragged_dot` multiplies
    rows by w_gate and w_up and applies the activation, and another product multiplies by w_down. With
    `axis_name`, inside of `jax.shard_map`, each of n devices has some tokens and E / n experts, and rows are sent to
    the devices that have their experts, and back. Derivatives by x, gates and matrices, of any order, in both modes.

    Each device has room for n T min(k, E / n) rows, as if all tokens of all devices chose its experts. Unused room
    costs memory, but no products.

    Args:
      x: [T, H], the tokens of this device: float32, bfloat16, float16 or float64.
      experts: integers [T, k] in 0, ..., E - 1, counted over all devices. A token's experts differ, unless one
        device has all experts. Other integers, such as -1, stand for no expert.
      gates: [T, k] of a float dtype.
      w_gate: [E / n, H, F] of the dtype of x, or of 8 or 4 bits; the experts of this device; the first device has the
        first ones.
      w_up: [E / n, H, F].
      w_down: [E / n, F, H].
      biases: b_gate[E / n, F], b_up[E / n, F] and b_down[E / n, H] of float dtypes, added to the three products.
      scales: of w_gate, w_up and w_down, as `rhs_scale` of `ragged_dot`, with a scale for each of the E / n experts:
        [E / n, 1, F] for columns. None for a matrix without. w_gate and w_up have scales of one shape.
      quantize_rows: "int8" or "float8_e4m3fn": the operands of both layers, x and the activated products, are rounded
        to this dtype, with a scale for each row and each block of the inner dim that the matrices' scales have. Both
        operands of a product are then of 8 bits. For serving: derivatives take rounded rows as constants.
      activation: of `swiglu`: "silu", "gelu", "gelu_tanh", "relu" or "sigmoid"; or a function of one number of gate and
        one of up, of jnp functions, biases added, such as the clipped one of gpt-oss. Define it once: calls with
        another function object compile again.
      axis_name: the mesh axis that divides tokens and experts; None if this device has all experts.
      exchange: "ragged" sends only rows, by `jax.lax.ragged_all_to_all`; "dense" sends all room for rows, by
        `jax.lax.all_to_all`. None: dense on CPUs, where XLA has no ragged exchange, and ragged elsewhere.
      target: lower for this target's blocks, e.g. "cpu:xla".

    Returns:
      out[T, H] in the dtype of x; summed over experts in float32 (float64 for float64).

    Raises:
      tilekern.errors.ArgumentError: an array or an option does not fit, or the axis is unknown.
    """
    _check("apply_experts", x, w_gate, w_up, w_down, biases, scales)
    _check_rows(quantize_rows)
    _check_activation(activation)
    _check_choice(x, experts, gates, exchange)
    devices = 1 if axis_name is None else axis_size(axis_name, "apply_experts")
    tokens, chosen = experts.shape
    here = w_gate.shape[0]
    flat = jnp.where((experts >= 0) & (experts < here * devices), experts, here * devices).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    rows = _rows(x, chosen)[order]
    counts = jnp.bincount(flat, length=here * devices).astype(jnp.int32)

    of_gate_scale, of_up_scale, of_down_scale = scales if scales is not None else (None, None, None)

    def operand(rows: jax.Array, scale: jax.Array | None) -> tuple[jax.Array, dict[str, Any]]:
        options = {"out_dtype": x.dtype, "target": target}
        if quantize_rows is None:
            return rows, options
        block = None if scale is None else rows.shape[1] // scale.shape[1]
        values, of_rows = quantize(rows, (1, block), dtype=quantize_rows)
        return values, options | {"lhs_scale": of_rows}

    def apply(rows: jax.Array, sizes: jax.Array) -> jax.Array:
        of_gate, of_up, of_down = ([b[:, None]] for b in biases) if biases is not None else ([], [], [])
        rows, options = operand(rows, of_gate_scale)
        options |= {"epilogue": _gated(activation, bool(of_gate)), "rhs_scale": (of_gate_scale, of_up_scale)}
        hidden = fused_ragged_dot(rows, (w_gate, w_up), sizes, *of_gate, *of_up, **options)
        hidden, options = operand(hidden, of_down_scale)
        options |= {"rhs_scale": of_down_scale}
        if not of_down:
            return ragged_dot(hidden, w_down, sizes, **options)
        return fused_ragged_dot(hidden, w_down, sizes, *of_down, epilogue=_plus, **options)

    if axis_name is None:
        results = apply(rows, counts)
    else:
        room = tokens * min(chosen, here)
        layout = Layout.gathered(axis_name, counts.reshape(devices, here), sent=tokens * chosen, room=room)
        results = receive(layout, apply(send(layout, rows, exchange), layout.sizes), exchange)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    return _combined(results[back].reshape(tokens, chosen, x.shape[1]), gates)


@cache
def _gated(activation: Activation, biased: bool) -> Callable[..., Any]:
    """The epilogue of the products of gate and up: one function object for all calls."""

    def gated(gate: Any, up: Any) -> Any:
        return activation(gate, up) if callable(activation) else ACTIVATIONS[activation](gate) * up

    def with_biases(gate: Any, up: Any, of_gate: Any, of_up: Any) -> Any:
        return gated(gate + of_gate, up + of_up)

    return with_biases if biased else gated


def _plus(product: Any, bias: Any) -> Any:
    return product + bias


def _rows(x: jax.Array, chosen: int) -> jax.Array:
    """[T chosen, H]: each token `chosen` times. Copies are made in float32, so that cotangents add up in float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    copies = jnp.broadcast_to(wide[:, None], (x.shape[0], chosen, x.shape[1]))
    return copies.reshape(-1, x.shape[1]).astype(x.dtype)


def _combined(results: jax.Array, gates: jax.Array) -> jax.Array:
    """Σ_j gates[t, j] results[t, j]."""
    wide = jnp.promote_types(results.dtype, jnp.float32)
    return (results.astype(wide) * gates.astype(wide)[..., None]).sum(1).astype(results.dtype)


# --- checks -----------------------------------------------------------------------------------------------------------


def _check(function: str, x: Any, w_gate: Any, w_up: Any, w_down: Any, biases: Any, scales: Any) -> None:
    matrices = w_gate, w_up, w_down
    fits = is_float(x) and all(is_quantized(w) or (is_float(w) and w.dtype == x.dtype) for w in matrices)
    fits = fits and [a.ndim for a in (x, *matrices)] == [2, 3, 3, 3] and w_gate.dtype == w_up.dtype
    require(
        fits
        and w_gate.shape == w_up.shape
        and w_gate.shape[1] == x.shape[1]
        and w_down.shape == (w_gate.shape[0], w_gate.shape[2], w_gate.shape[1]),
        function,
        expected="x[T, H], w_gate[E, H, F], w_up[E, H, F] and w_down[E, F, H] of one float dtype of at least 16 bits, "
        f"or matrices of {', '.join(LARGEST)}",
        fix="reshape leading dims into T; cast with .astype",
        x=x,
        w_gate=w_gate,
        w_up=w_up,
        w_down=w_down,
    )
    if biases is not None:
        _check_biases(function, w_down, biases)
    if scales is not None and not (isinstance(scales, tuple | list) and len(cast(Sequence[Any], scales)) == 3):
        raise ArgumentError(
            f"the scales of {function} do not fit the experts",
            expected="three arrays, of w_gate, w_up and w_down, or None",
            got=f"scales = {describe(scales)}",
            fix="give None for a matrix without scales",
        )


def _check_rows(quantize_rows: Any) -> None:
    if quantize_rows not in (None, "int8", "float8_e4m3fn"):
        raise ArgumentError(
            "apply_experts does not round rows to this dtype",
            expected='None, "int8" or "float8_e4m3fn"',
            got=f"quantize_rows = {describe(quantize_rows)}",
            fix="leave it out: rows keep their dtype",
        )


def _check_biases(function: str, w_down: Any, biases: Any) -> None:
    experts, inner, hidden = w_down.shape
    shapes = [(experts, inner), (experts, inner), (experts, hidden)]
    arrays = list(cast(Sequence[Any], biases)) if isinstance(biases, tuple | list) else None
    if arrays and len(arrays) == 3 and all(is_float(b) and b.shape == s for b, s in zip(arrays, shapes, strict=True)):
        return
    raise ArgumentError(
        f"the biases of {function} do not fit the experts",
        expected="floats " + ", ".join(f"b_{n}{list(s)}" for n, s in zip(("gate", "up", "down"), shapes, strict=True)),
        got=f"biases = {describe(biases) if arrays is None else ', '.join(map(describe, arrays))}",
        fix="give zeros for one that is missing, or leave out all of them",
    )


def _check_activation(activation: Any) -> None:
    if not callable(activation) and activation not in ACTIVATIONS:
        raise ArgumentError(
            "apply_experts has no such activation",
            expected=f"one of {', '.join(map(repr, ACTIVATIONS))}, or a function of a number of gate and one of up",
            got=f"activation = {activation!r}",
            fix="give a function, e.g. lambda gate, up: gate * up, defined once",
        )


def _check_logits(x: Any, logits: Any, here: int, devices: int, axis_name: str | None) -> None:
    experts = logits.shape[1]
    if logits.shape[0] != x.shape[0] or experts != here * devices:
        whole = axis_name is None
        over = f" times {devices} devices of mesh axis {axis_name!r}" if not whole else ""
        divide = f"let in_specs divide dim 0 of w_gate, w_up and w_down by {axis_name!r}"
        padded = -(-experts // devices) * devices
        pad = f"pad them to {padded} experts, with logits of -inf" if padded != experts else divide
        raise ArgumentError(
            "moe needs a logit for each token and expert",
            expected=f"logits[{x.shape[0]}, {here * devices}]: {here} experts, dim 0 of w_gate,{over or ' in all'}",
            got=f"logits = {describe(logits)}",
            fix="give as many logits as w_gate has experts" if whole else pad,
        )


def _check_choice(x: Any, experts: Any, gates: Any, exchange: Any) -> None:
    fits = is_integer(experts) and is_float(gates) and experts.ndim == 2 and experts.shape == gates.shape
    require(
        fits and experts.shape[0] == x.shape[0],
        "apply_experts",
        expected="x[T, H], integers experts[T, k] and gates[T, k] of a float dtype",
        fix="use the results of tilekern.distributed.route",
        x=x,
        experts=experts,
        gates=gates,
    )
    if exchange is not None and exchange not in METHODS:
        raise ArgumentError(
            "unknown exchange of apply_experts",
            expected=f"None or one of {', '.join(map(repr, METHODS))}",
            got=f"exchange={exchange!r}",
            fix="leave it out: the platform decides",
        )
