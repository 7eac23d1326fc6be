"""Backends: the record of a backend, and the list of all records, to which another package may add.

Example:
  >>> import tilekern as tk
  >>> print(*tk.backends.BACKENDS)
  xla llvm triton mosaic
"""

from __future__ import annotations

from tilekern.errors import ArgumentError, checked
from tilekern.kernel.dispatch import serve_platform
from tilekern.lower import target
from tilekern.lower.backend import Backend, CompiledProgram, Device, FuzzMode, Lowering, Target
from tilekern.lower.resources import Resources
from tilekern.lower.target import BACKENDS, TARGETS

__all__ = [
    "BACKENDS",
    "TARGETS",
    "Backend",
    "CompiledProgram",
    "Device",
    "FuzzMode",
    "Lowering",
    "Resources",
    "Target",
    "register",
    "unregister",
]


@checked
def register(backend: Backend) -> None:
    """Add a backend: calls may name its targets, and checks, tables, commands and the fuzzer have it.

    A call that names no target gets it on platforms that no earlier backend serves, if its `detect` says so. Kernels
    that were lowered before keep their programs.

    Args:
      backend: its record.

    Raises:
      ArgumentError: a name is taken, the targets do not fit the backend, or JAX has no such platform.
    """
    target.check(backend)
    for platform in dict.fromkeys(t.platform for t in backend.targets):
        try:
            serve_platform(platform)
        except NotImplementedError as error:  # JAX lists the platforms
            raise ArgumentError(
                f"the backend {backend.name!r} is for a platform that JAX does not have",
                expected="platforms of JAX, or of a plugin that JAX has found",
                got=f"platform = {platform!r}: {error}",
                fix="name the platform as JAX does; for one of a plugin, call jax.devices() before",
            ) from error
    target.add(backend)


@checked
def unregister(name: str) -> None:
    """Remove a backend that `register` added.

    Args:
      name: the name of the backend.

    Raises:
      ArgumentError: no such backend was registered.
    """
    target.remove(name)
