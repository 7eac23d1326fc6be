"""The targets of the Mosaic backend, and this machine's TPU among them."""

from __future__ import annotations

from dataclasses import replace

from tilekern import _machine
from tilekern.lower.backend import Target

BACKEND_NAME = "mosaic"

# JAX's names of TPUs, as in its `tpu_info`.
_MODELS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "7x",
}

TARGETS = {
    model: Target(f"tpu:{model}", "tpu", BACKEND_NAME, fallback="unnamed") for model in dict.fromkeys(_MODELS.values())
}
"""Targets by model."""


def detect(platform: str, exporting: bool) -> Target | None:
    """The target for this machine's TPU: code for all four models if it has none; None for other models."""
    if platform != "tpu":
        return None
    kind = None if exporting else _machine.tpu_kind()
    if kind is None:
        return replace(TARGETS["v5e"], portable=True)
    return TARGETS[_MODELS[kind]] if kind in _MODELS else None


def is_here(target: Target) -> bool:
    """True if calls on this machine's TPU have the code of a target."""
    kind = _machine.tpu_kind()
    return kind in _MODELS and TARGETS[_MODELS[kind]].name == target.name
