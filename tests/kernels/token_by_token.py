"""Recurrences of packed sequences, token by token, and their problems: none of it calls the library's definitions.

A definition takes the arrays of a problem and bool[B, T], True where a sequence begins: there the state becomes zeros.
It computes in the dtype of its arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilekern.kernels import causal_conv1d, gated_delta_rule, linear_attention, rg_lru, selective_scan
from tilekern.kernels.gated_delta_rule.channels import delta_rule_by_channel
from tilekern.kernels.gated_delta_rule.kernel import gated_delta_rule_forward
from tilekern.kernels.linear_attention import ssd

BATCH = 2


def starts_of(ids: Any) -> Any:
    """bool[B, T]: True for each token but the first whose number is not that of its predecessor."""
    found = np.zeros(ids.shape, bool)
    for b, row in enumerate(ids.tolist()):
        for t in range(1, len(row)):
            found[b, t] = row[t] != row[t - 1]
    return found


def _by_token(step: Callable[..., Any], state: Any, starts: Any, *of_tokens: Any) -> tuple[Any, Any]:
    """Outputs [B, T, ...] and the last state; `step` takes the state and one token of each array [B, T, ...]."""

    def one(state: Any, token: Any) -> Any:
        begins, *values = token
        begins = begins.reshape(-1, *[1] * (state.ndim - 1))
        return step(jnp.where(begins, jnp.zeros_like(state), state), *values)

    last, out = jax.lax.scan(one, state, [jnp.moveaxis(jnp.asarray(x), 1, 0) for x in (starts, *of_tokens)])
    return jnp.moveaxis(out, 0, 1), last


def _of_heads(x: Any, heads: int) -> Any:
    return jnp.repeat(x, heads // x.shape[2], axis=2)


_einsum = partial(jnp.einsum, precision="highest")


def _linear(starts: Any, query: Any, key: Any, value: Any, log_decay: Any, state: Any) -> Any:
    def step(state: Any, q: Any, k: Any, v: Any, log_decay: Any) -> Any:
        state = jnp.exp(log_decay)[..., None, None] * state + k[..., :, None] * v[..., None, :]
        return state, _einsum("bhkv,bhk->bhv", state, q)

    query, key = (_of_heads(x, value.shape[2]) for x in (query, key))
    return _by_token(step, state, starts, query, key, value, log_decay)


def _delta(starts: Any, query: Any, key: Any, value: Any, beta: Any, log_decay: Any, state: Any) -> Any:
    def step(state: Any, q: Any, k: Any, v: Any, beta: Any, log_decay: Any) -> Any:
        state = jnp.exp(log_decay)[..., None] * state
        missing = beta[..., None] * (v - _einsum("bhkv,bhk->bhv", state, k))
        state = state + k[..., :, None] * missing[..., None, :]
        return state, _einsum("bhkv,bhk->bhv", state, q)

    query, key = (_of_heads(x, value.shape[2]) for x in (query, key))
    log_decay = log_decay if log_decay.ndim == 4 else log_decay[..., None]
    return _by_token(step, state, starts, query, key, value, beta, log_decay)


def _ssd(starts: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, state: Any) -> Any:
    out, last = _linear(starts, c, b, x * dt[..., None], dt * a, state)
    return out + d[:, None] * x, last


def _conv(starts: Any, x: Any, weight: Any, bias: Any, state: Any) -> Any:
    def step(recent: Any, x: Any) -> Any:
        window = jnp.concatenate([recent, x[:, None]], axis=1)
        return window[:, 1:], (window * weight).sum(axis=1) + bias

    return _by_token(step, state, starts, x)


def _gated(starts: Any, x: Any, input_gate: Any, recurrence_gate: Any, a_param: Any, state: Any) -> Any:
    def step(state: Any, x: Any, input_gate: Any, recurrence_gate: Any) -> Any:
        log_a = -8 * jax.nn.softplus(a_param) * jax.nn.sigmoid(recurrence_gate)
        state = jnp.exp(log_a) * state + jnp.sqrt(-jnp.expm1(2 * log_a)) * jax.nn.sigmoid(input_gate) * x
        return state, state

    return _by_token(step, state, starts, x, input_gate, recurrence_gate)


def _selective(starts: Any, x: Any, delta: Any, a: Any, b: Any, c: Any, state: Any) -> Any:
    def step(state: Any, x: Any, delta: Any, b: Any, c: Any) -> Any:
        state = jnp.exp(delta[..., None] * a) * state + (delta * x)[..., None] * b[:, None]
        return state, (state * c[:, None]).sum(axis=-1)

    return _by_token(step, state, starts, x, delta, b, c)


@dataclass(frozen=True)
class Recurrence:
    """A function of packed sequences, and what it must be.

    Attributes:
      function: of the arrays of a problem, with `segment_ids` and `block_t`; its results are the output and a state.
      definition: of bool[B, T] and these arrays.
      shapes: of the arrays for a number of tokens T; a name says what numbers an array has.
    """

    function: Callable[..., Any]
    definition: Callable[..., Any]
    shapes: Callable[[int], dict[str, tuple[int, ...]]]

    def problem(self, tokens: int, seed: int = 0) -> list[Any]:
        """Random arrays in float32."""
        random = np.random.default_rng(seed)
        return [_numbers(random, name, shape).astype(np.float32) for name, shape in self.shapes(tokens).items()]


def _numbers(random: np.random.Generator, name: str, shape: Sequence[int]) -> Any:
    if name in ("log_decay", "a"):
        return -0.3 * random.exponential(size=shape)
    if name in ("beta", "delta"):
        return random.uniform(0, 1, shape)
    numbers = random.standard_normal(shape)
    return numbers / np.linalg.norm(numbers, axis=-1, keepdims=True) if name == "key" else numbers


def _of_heads_and(*names: str, by_channel: bool = False) -> Callable[[int], dict[str, tuple[int, ...]]]:
    def shapes(tokens: int) -> dict[str, tuple[int, ...]]:
        few, many = (BATCH, tokens, 2, 4), (BATCH, tokens, 4)
        decays = {"log_decay": (*many, 4) if by_channel else many}
        others = dict.fromkeys(names, many) | decays
        return {"query": few, "key": few, "value": (*many, 3), **others, "state": (BATCH, 4, 4, 3)}

    return shapes


def _of_ssd(tokens: int) -> dict[str, tuple[int, ...]]:
    few, many = (BATCH, tokens, 2, 4), (BATCH, tokens, 4)
    return {"x": (*many, 3), "delta": many, "a": (4,), "b": few, "c": few, "d": (4,), "state": (BATCH, 4, 4, 3)}


def _of_conv(tokens: int) -> dict[str, tuple[int, ...]]:
    return {"x": (BATCH, tokens, 5), "weight": (4, 5), "bias": (5,), "state": (BATCH, 3, 5)}


def _of_gated(tokens: int) -> dict[str, tuple[int, ...]]:
    of_tokens = BATCH, tokens, 5
    return {"x": of_tokens, "input": of_tokens, "recurrence": of_tokens, "a_param": (5,), "state": (BATCH, 5)}


def _of_selective(tokens: int) -> dict[str, tuple[int, ...]]:
    of_tokens, of_states = (BATCH, tokens, 5), (BATCH, tokens, 3)
    return {"x": of_tokens, "delta": of_tokens, "a": (5, 3), "b": of_states, "c": of_states, "state": (BATCH, 5, 3)}


def _selective_scan(x: Any, delta: Any, a: Any, b: Any, c: Any, state: Any, **keywords: Any) -> Any:
    return selective_scan(x, delta, a, b, c, initial_state=state, **keywords)


def _several_heads(kernel: Callable[..., Any], *arrays: Any, segment_ids: Any, **blocks: Any) -> Any:
    return kernel(*arrays, segment_ids, heads=4, block_v=3, **blocks)


_DELTA = _of_heads_and("beta")
_BY_CHANNEL = _of_heads_and("beta", by_channel=True)

RECURRENCES = {
    "linear_attention": Recurrence(linear_attention, _linear, _of_heads_and()),
    "ssd": Recurrence(ssd, _ssd, _of_ssd),
    "gated_delta_rule": Recurrence(gated_delta_rule, _delta, _DELTA),
    "delta_rule_by_channel": Recurrence(gated_delta_rule, _delta, _BY_CHANNEL),
    "delta_rule_of_heads": Recurrence(partial(_several_heads, gated_delta_rule_forward), _delta, _DELTA),
    "delta_rule_of_heads_by_channel": Recurrence(partial(_several_heads, delta_rule_by_channel), _delta, _BY_CHANNEL),
    "causal_conv1d": Recurrence(causal_conv1d, _conv, _of_conv),
    "rg_lru": Recurrence(rg_lru, _gated, _of_gated),
    "selective_scan": Recurrence(_selective_scan, _selective, _of_selective),
}
