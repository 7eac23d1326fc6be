"""Linear attention, delta rules, scans and short convolutions, beside the formulas of `bench.formulas`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from bench import formulas
from bench.tpu_static.cases.case import Case
from bench.tpu_static.cases.measured import Arguments, Measured, types, with_gradient
from tilekern.kernels.causal_conv1d import causal_conv1d
from tilekern.kernels.causal_conv1d import reference as convolution
from tilekern.kernels.causal_conv1d.cases import CASES as CONVOLUTIONS
from tilekern.kernels.gated_delta_rule import gated_delta_rule
from tilekern.kernels.gated_delta_rule.cases import CASES as DELTA_RULES
from tilekern.kernels.linear_attention import ssd
from tilekern.kernels.linear_attention.cases import CASES as LINEAR_ATTENTIONS
from tilekern.kernels.rg_lru import rg_lru
from tilekern.kernels.rg_lru.cases import CASES as GATED_UNITS
from tilekern.kernels.selective_scan import selective_scan
from tilekern.kernels.selective_scan.cases import CASES as SELECTIVE_SCANS

Formulas = Mapping[str, Callable[..., Any]]


def _first(function: Callable[..., Any], **keywords: Any) -> Callable[..., Any]:
    """The first result of a function: outputs without the last state."""
    return lambda *arrays, **target: function(*arrays, **keywords, **target)[0]


def _both(
    name: str, kernel: Callable[..., Any], case: Any, peers: Formulas, pulled: tuple[int, ...], flops: int = 0
) -> tuple[Measured, Measured]:
    keywords = getattr(case, "keywords", {})
    arguments = types(lambda: case.arrays(jax.random.key(0), jnp.bfloat16))
    functions = {setting: _first(function, **keywords) for setting, function in peers.items()}
    forward = Measured(f"{name} {case.name}", _first(kernel, **keywords), arguments, functions, flops)
    return with_gradient(forward, pulled)


def _ssd(case: Any) -> tuple[Measured, Measured]:
    """Mamba-2; a token's state takes a product of its key and value, and one with its query."""

    def arguments() -> Arguments:
        of_keys, _, value, decays = types(lambda: case.arrays(jax.random.key(0), jnp.bfloat16))()
        of_heads = jax.ShapeDtypeStruct((case.heads,), jnp.float32)
        return value, decays, of_heads, of_keys, of_keys, of_heads

    flops = 4 * case.batch * case.tokens * case.heads * case.depth * case.width
    forward = Measured(f"ssd {case.name}", _first(ssd), arguments, {"xla": _first(formulas.ssd)}, flops)
    return _trained_alone(with_gradient(forward, (0, 1, 2, 3, 4, 5)))


def _delta_rule(case: Any, name: str) -> tuple[Measured, Measured]:
    """As linear attention, and a product of the state with the key."""
    flops = 6 * case.batch * case.tokens * case.heads * case.depth * case.width
    return _trained_alone(
        _both(name, gated_delta_rule, case, {"xla": formulas.gated_delta_rule}, (0, 1, 2, 3, 4), flops)
    )


def _trained_alone(cases: tuple[Measured, Measured]) -> tuple[Measured, Measured]:
    """XLA compiles the gradients of chunks for over 300 s."""
    return cases[0], replace(cases[1], alone=True)


CASES: tuple[Case, ...] = (
    *_ssd(LINEAR_ATTENTIONS[1]),
    *_delta_rule(DELTA_RULES[0], "gated_delta_rule"),
    *_delta_rule(DELTA_RULES[2], "gated_delta_rule"),
    *_both("rg_lru", rg_lru, GATED_UNITS[0], {"xla": formulas.rg_lru}, (0, 1, 2, 3)),
    *_both("selective_scan", selective_scan, SELECTIVE_SCANS[0], {"xla": formulas.selective_scan}, tuple(range(8))),
    *_both("causal_conv1d", causal_conv1d, CONVOLUTIONS[0], {"xla": convolution}, (0, 1, 2)),
)
SMALL: tuple[Case, ...] = (_ssd(replace(LINEAR_ATTENTIONS[1], name="small", tokens=1024, heads=8))[0],)
