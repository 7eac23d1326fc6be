"""The prebuilt kernels that the fuzzer calls, each with its reference."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

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

# Their references return the logsumexp, too, which the functions return on request.
_WITH_LOGSUMEXP = ("cross_entropy", "flash_attention")


def kernel(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A prebuilt kernel and its reference."""
    module = importlib.import_module(f"tilekern.kernels.{name}")
    reference = module.reference
    return getattr(module, name), _first(reference) if name in _WITH_LOGSUMEXP else reference


def _first(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, but only the first of its results."""

    @functools.wraps(function)
    def first(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)[0]

    return first
