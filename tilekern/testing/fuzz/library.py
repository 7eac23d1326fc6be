"""The prebuilt kernels that the fuzzer calls, each with its reference."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tilekern.ir.types import F32, I32
from tilekern.testing.layouts import Layout, Trial
from tilekern.testing.space import Space, space
from tilekern.testing.values import Numbers

KERNELS = (
    "rms_norm",
    "softmax",
    "layer_norm",
    "group_norm",
    "swiglu",
    "rope",
    "matmul",
    "cross_entropy",
    "ragged_dot",
    "flash_attention",
    "linear_attention",
    "gated_delta_rule",
    "causal_conv1d",
    "distillation",
    "rg_lru",
    "selective_scan",
)

# The dims of the kernels' arrays for packed sequences, without the arrays that number the segments.
_PACKED: Mapping[str, str] = {
    "linear_attention": "btnk btnk btnv btn",
    "gated_delta_rule": "btnk btnk btnv btn btn",
    "causal_conv1d": "btc cw",
    "rg_lru": "btc btc btc c",
    "selective_scan": "btc btc ck btk btk",
}
_SIZES = {"b": 2, "t": 24, "n": 1, "k": 4, "v": 3, "c": 5, "w": 4}
_SUFFIX = " of packed sequences"
# Numbers of segments are so many, so that neighbours often have the same, and each comes again behind another one.
_SEGMENTS = 3
# A token of another sequence is multiplied by 0, which makes NaN of infinity.
_FINITE: tuple[Numbers, ...] = ("normal", "equal rows", "zeros", "tiny")
MODES: Mapping[str, tuple[str, ...]] = {"library": KERNELS, f"library{_SUFFIX}": tuple(n + _SUFFIX for n in _PACKED)}
"""For each mode the names of the functions that it calls in turn."""


def drawn(name: str) -> tuple[Callable[..., Any], Callable[..., Any], Space]:
    """A prebuilt kernel, its reference, and the calls of it."""
    base = name.removesuffix(_SUFFIX)
    module = importlib.import_module(f"tilekern.kernels.{base}")
    function, reference = getattr(module, base), module.reference
    if base == name:
        return function, reference, space(function, reference)
    names = [*_PACKED[base].split(), "bt"]
    packed, numbers = (_packed(function), _packed(reference)), tuple(_SIZES)
    dims = tuple(tuple(map(numbers.index, some)) for some in names)
    dtypes = (*(F32 for _ in names[1:]), I32)
    layout = Layout(jax.tree.structure((0,) * len(names)), dtypes, dims, tuple(_SIZES.values()))
    return *packed, Space([layout], {}, (), (8, 64), Trial(packed), long=False, numbers=_FINITE)


def _packed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with segment ids as its last positional argument: any integers, taken modulo `_SEGMENTS`."""

    def packed(*arrays: Any, **keywords: Any) -> Any:
        return function(*arrays[:-1], segment_ids=arrays[-1] % _SEGMENTS, **keywords)

    packed.__name__ = f"{function.__name__}_of_packed_sequences"
    return packed
