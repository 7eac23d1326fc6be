"""All caches of kernels and ops, with their contents and numbers of entries.

A cache that is full starts anew. `jax.clear_caches` empties all caches.
"""

from __future__ import annotations

from typing import Any

from tilekern._jax import Cache

_CALLS = 512
_FAMILIES = 512
_BATCHES = 64
_MEMBERS = 64
_WARNINGS = 512


class DeclaredCaches:
    """The caches of one kernel or op.

    Attributes:
      calls: the function of the arrays, by keyword arguments.
      families: the families, by argument types, static arguments, blocks, target and settings of JAX.
    """

    def __init__(self) -> None:
        self.calls = Cache[tuple[Any, ...], Any](_CALLS)
        self.families = Cache[tuple[Any, ...], Any](_FAMILIES)


class FamilyCaches:
    """The caches of one family.

    Attributes:
      members: the traced bodies, by blocks or by target.
      programs: the jitted program and its partitioning, by target.
      batched: the family under `jax.vmap`, by size and dims.
      derived: the families of its derivatives, by the operands that move, or that it is linear in.
      parts: the families of devices' parts, or why there is none, by the number of parts of each factor.
    """

    def __init__(self) -> None:
        self.members = Cache[Any, Any](_MEMBERS)
        self.programs = Cache[Any, Any](_MEMBERS)
        self.batched = Cache[Any, Any](_BATCHES)
        self.derived = Cache[Any, Any](_BATCHES)
        self.parts = Cache[Any, Any](_BATCHES)


gather_warnings = Cache[tuple[Any, ...], None](_WARNINGS)
"""Kernels and types of results for which a `GatherWarning` was given."""
