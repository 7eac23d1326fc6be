"""The devices of this machine, as JAX sees them."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import jax
from jax._src import hardware_utils, xla_bridge


def default_platform() -> str:
    """The platform of the device that JAX computes on unless a program says otherwise: "cpu", "cuda", "rocm", "tpu"."""
    device: Any = cast(Any, jax.config).jax_default_device
    platform = device if isinstance(device, str) else jax.default_backend() if device is None else device.platform
    return xla_bridge.canonicalize_platform(platform)


def _devices(platform: str) -> list[Any]:
    """The devices of a platform; none if JAX has no such platform here."""
    try:
        return cast(list[Any], jax.devices(platform))
    except RuntimeError:
        return []


def compute_capability() -> int | None:
    """10 * major + minor of this machine's NVIDIA GPU (the least, if they differ), None if JAX sees none."""
    return min(compute_capabilities(), default=None)


def compute_capabilities() -> set[int]:
    """10 * major + minor of each of this machine's NVIDIA GPUs that JAX sees."""
    return {round(10 * float(d.compute_capability)) for d in _devices("cuda")}


def amd_architecture() -> str | None:
    """The architecture of this machine's AMD GPU, such as "gfx942"; None if JAX sees none."""
    # XLA's name may have features behind a colon, "gfx942:sramecc+:xnack-".
    return next((str(d.compute_capability).partition(":")[0] for d in _devices("rocm")), None)


def device_kind(platform: str) -> str:
    """The kind of this machine's first device of a platform in JAX's words, "NVIDIA H100 80GB HBM3"; "" for none."""
    if platform == "tpu":
        return tpu_kind() or ""
    return next((str(d.device_kind) for d in _devices(platform)), "")


def tpu_kind() -> str | None:
    """The kind of this machine's TPU in JAX's words, such as "TPU v5 lite"; None if JAX sees none."""
    # Without chips, libtpu would complain at length.
    return next((str(d.device_kind) for d in _devices("tpu")), None) if has_tpu_chips() else None


@cache  # it reads a file of each PCI device
def has_tpu_chips() -> bool:
    """True if TPU chips are attached to this machine, though JAX may not use them. It loads no driver."""
    return bool(hardware_utils.num_available_tpu_chips_and_device_id()[0])
