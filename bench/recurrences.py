"""Linear recurrences on the native backend, forward and with gradient, against scans and chunks in `jnp`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from bench import formulas
from bench.llvm.peak import host
from bench.result import Result
from bench.timing import by_round, clock, take_turns
from tilekern.kernels import causal_conv1d, gated_delta_rule, linear_attention, rg_lru, selective_scan
from tilekern.kernels.causal_conv1d import reference as causal_conv1d_reference
from tilekern.kernels.causal_conv1d.cases import CASES as CONVOLUTIONS
from tilekern.kernels.gated_delta_rule import reference as gated_delta_rule_reference
from tilekern.kernels.gated_delta_rule.cases import CASES as DELTA_RULES
from tilekern.kernels.linear_attention import reference as linear_attention_reference
from tilekern.kernels.linear_attention.cases import CASES
from tilekern.kernels.rg_lru import reference as rg_lru_reference
from tilekern.kernels.rg_lru.cases import CASES as GATED_UNITS
from tilekern.kernels.selective_scan import reference as selective_scan_reference
from tilekern.kernels.selective_scan.cases import CASES as SELECTIVE_SCANS

DTYPES = ("float32", "bfloat16")
# The time relative to chunks or sums in `jnp`, and to scans.
LIMIT, SCAN_LIMIT = 1.0, 0.3
_ROUNDS = 3
_SIZES = ("tokens", "heads", "channels", "depth", "width")
_DELTA_TOKENS = 1024  # the gradient of the scan keeps the state of each token: 26 GB for 4096 tokens


def measure() -> Iterator[Result]:
    """All results of this file."""
    for dtype in DTYPES:
        peers = {"scan": linear_attention_reference, "chunks": formulas.linear_attention}
        yield from _compare(linear_attention, CASES[1], dtype, peers)
        for delta_rule in (DELTA_RULES[0], DELTA_RULES[2]):
            case = replace(delta_rule, tokens=_DELTA_TOKENS)
            yield from _compare(gated_delta_rule, case, dtype, {"scan": gated_delta_rule_reference})
        scans = {"scan": rg_lru_reference, "associative scan": formulas.rg_lru}
        yield from _compare(rg_lru, GATED_UNITS[0], dtype, scans)
        scans = {"scan": selective_scan_reference, "associative scan": formulas.selective_scan}
        yield from _compare(selective_scan, SELECTIVE_SCANS[0], dtype, scans)
        yield from _compare(causal_conv1d, CONVOLUTIONS[0], dtype, {"shifted sums": causal_conv1d_reference})


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
    def first(*arrays: Any) -> Any:
        return function(*arrays)[0]

    run = cast(Callable[..., Any], jax.jit(first))
    return lambda: run(*arrays)


def _with_gradient(function: Callable[..., Any], arrays: Any) -> Callable[[], Any]:
    def with_gradient(*arrays: Any) -> Any:
        out, pull = cast(Any, jax.vjp(lambda *a: function(*a)[0], *arrays))
        return out, pull(jnp.ones_like(out))

    run = cast(Callable[..., Any], jax.jit(with_gradient))
    return lambda: run(*arrays)
