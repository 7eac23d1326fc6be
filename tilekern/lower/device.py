"""The public record of the machine that a target names, for schedules."""

from __future__ import annotations

from tilekern.errors import checked
from tilekern.lower.backend import Device, Target
from tilekern.lower.target import backend_of, resolve


def device_of(target: Target) -> Device:
    """The record of a target."""
    return backend_of(target).device(target)


@checked
def device(target: str) -> Device:
    """The record of the machine that a target names.

    Args:
      target: "cpu", "cpu:xla", "cpu:llvm", "cuda:sm_90", "tpu:v5e" or another target.

    Raises:
      tilekern.errors.TargetError: there is no such target.
    """
    return device_of(resolve(target))
