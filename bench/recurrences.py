"""Linear recurrences on the native backend, forward and with gradient, against scans and chunks in `jnp`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from bench.llvm.peak import host
from bench.result import Result
from bench.timing import by_round, clock, take_turns
from tilekern.kernels import causal_conv1d, gated_delta_rule, linear_attention, rg_lru, selective_scan
from tilekern.kernels.causal_conv1d.cases import CASES as CONVOLUTIONS
from tilekern.kernels.gated_delta_rule.cases import CASES as DELTA_RULES
from tilekern.kernels.linear_attention.cases import CASES
from tilekern.kernels.rg_lru.cases import CASES as GATED_UNITS
from tilekern.kernels.selective_scan.cases import CASES as SELECTIVE_SCANS

DTYPES = ("float32", "bfloat16")
# Of chunks or sums in `jnp`, and of scans.
LIMIT, SCAN_LIMIT = 1.0, 0.3
_CHUNK, _ROUNDS = 64, 3
_SIZES = ("tokens", "heads", "channels", "depth", "width")
_DELTA_TOKENS = 1024  # the gradient of the scan keeps the state of each token: 26 GB for 4096 of them


def measure() -> Iterator[Result]:
    """All results of this file."""
    for dtype in DTYPES:
        peers = {"scan": linear_attention.reference, "chunks": _in_chunks}
        yield from _compare(linear_attention.linear_attention, CASES[1], dtype, peers)
        for delta_rule in (DELTA_RULES[0], DELTA_RULES[2]):
            case = replace(delta_rule, tokens=_DELTA_TOKENS)
            yield from _compare(gated_delta_rule.gated_delta_rule, case, dtype, {"scan": gated_delta_rule.reference})
        scans = {"scan": rg_lru.reference, "associative scan": _by_doubling}
        yield from _compare(rg_lru.rg_lru, GATED_UNITS[0], dtype, scans)
        scans = {"scan": selective_scan.reference, "associative scan": _selective_by_doubling}
        yield from _compare(selective_scan.selective_scan, SELECTIVE_SCANS[0], dtype, scans)
        yield from _compare(
            causal_conv1d.causal_conv1d, CONVOLUTIONS[0], dtype, {"shifted sums": causal_conv1d.reference}
        )


def _compare(kernel: Callable[..., Any], case: Any, dtype: str, peers: dict[str, Any]) -> Iterator[Result]:
    target = "cpu:xla" if host() is None else "cpu:llvm"
    arrays = case.arrays(jax.random.key(0), dtype)
    shape = "×".join(str(getattr(case, size)) for size in _SIZES if hasattr(case, size))
    keywords = getattr(case, "keywords", {})
    for way, call in (("", _forward), (" and its gradient", _with_gradient)):
        functions = {who: partial(f, **keywords) for who, f in peers.items()}
        functions["ours"] = partial(kernel, target=target, **keywords)
        clocks = {name: clock(call(function, arrays)) for name, function in functions.items()}
        times = take_turns(clocks, rounds=_ROUNDS)
        for peer in peers:
            ours, theirs = (statistics.median(times[who]) * 1e3 for who in ("ours", peer))
            name = f"{kernel.__name__}{way} {shape} {dtype}, {target}, to {peer}"
            limit = SCAN_LIMIT if "scan" in peer else LIMIT
            yield Result(name, "ms", ours, limit, "ratio", theirs, by_round(times["ours"], times[peer]))


def _forward(function: Callable[..., Any], arrays: Any) -> Callable[[], Any]:
    run = jax.jit(lambda *a: function(*a)[0])
    return lambda: run(*arrays)


def _with_gradient(function: Callable[..., Any], arrays: Any) -> Callable[[], Any]:
    def both(*arrays: Any) -> Any:
        out, pull = cast(Any, jax.vjp(lambda *a: function(*a)[0], *arrays))
        return out, pull(jnp.ones_like(out))

    run = cast(Callable[..., Any], jax.jit(both))
    return lambda: run(*arrays)


def _in_chunks(query: jax.Array, key: jax.Array, value: jax.Array, log_decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The chunk form in `jnp`: products of all chunks at once, and a scan over their states."""
    batch, _, heads, width = value.shape
    depth, wide = query.shape[3], jnp.float32
    q, k = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (query, key))
    q, k, v, decays = (x.reshape(batch, -1, _CHUNK, *x.shape[2:]) for x in (q, k, value, log_decay))
    sums = jnp.cumsum(decays, axis=2)
    past = jnp.tril(jnp.ones((_CHUNK, _CHUNK), bool))[:, :, None]
    weights = jnp.exp(jnp.where(past, sums[:, :, :, None] - sums[:, :, None], -jnp.inf))
    scores = jnp.einsum("bnihk,bnjhk->bnijh", q, k, preferred_element_type=wide) * weights
    inner = jnp.einsum("bnijh,bnjhv->bnihv", scores.astype(v.dtype), v, preferred_element_type=wide)
    kept = (k * jnp.exp(sums[:, :, -1:] - sums)[..., None]).astype(v.dtype)
    added = jnp.einsum("bnjhk,bnjhv->bnhkv", kept, v, preferred_element_type=wide)

    def step(state: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
        total, new = chunk
        return state * jnp.exp(total)[..., None, None] + new, state

    start = jnp.zeros((batch, heads, depth, width), wide)
    last, states = jax.lax.scan(step, start, (jnp.moveaxis(sums[:, :, -1], 1, 0), jnp.moveaxis(added, 1, 0)))
    before = jnp.einsum("bnihk,nbhkv->bnihv", q, states.astype(q.dtype), preferred_element_type=wide)
    out = inner + before * jnp.exp(sums)[..., None]
    return out.reshape(value.shape).astype(value.dtype), last


def _by_doubling(
    x: jax.Array, input_gate: jax.Array, recurrence_gate: jax.Array, a_param: jax.Array, *, scale_first: bool
) -> tuple[jax.Array, jax.Array]:
    """`rg_lru` by `lax.associative_scan`."""
    wide = jnp.float32
    log_a = -8 * jax.nn.softplus(a_param) * jax.nn.sigmoid(recurrence_gate.astype(wide))
    added = jnp.sqrt(-jnp.expm1(2 * log_a)) * jax.nn.sigmoid(input_gate.astype(wide)) * x.astype(wide)
    out = _doubled(jnp.exp(log_a), added)
    return out.astype(x.dtype), out[:, -1]


def _selective_by_doubling(
    x: jax.Array,
    delta: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array,
    z: jax.Array,
    delta_bias: jax.Array,
    *,
    delta_softplus: bool,
) -> tuple[jax.Array, jax.Array]:
    """`selective_scan` by `lax.associative_scan`."""
    assert delta_softplus
    x, delta, b, c, z = (array.astype(jnp.float32) for array in (x, delta, b, c, z))
    steps = jax.nn.softplus(delta + delta_bias)
    states = _doubled(jnp.exp(steps[..., None] * a), (steps * x)[..., None] * b[:, :, None, :])
    out = jnp.einsum("btcn,btn->btc", states, c) + d * x
    return out * jax.nn.silu(z), states[:, -1]


def _doubled(factors: jax.Array, terms: jax.Array) -> jax.Array:
    """h_t = factors_t h_{t-1} + terms_t along the second dim."""

    def after(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return jax.lax.associative_scan(after, (factors, terms), axis=1)[1]
