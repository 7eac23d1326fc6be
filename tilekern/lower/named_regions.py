"""Regions of a kernel as scopes of JAX, for backends that emit JAX: names in HLO, in Mosaic's programs, in profiles."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import jax

from tilekern.ir.core import Op


class NamedRegions:
    """Puts the operations that are emitted for each op under scopes with the names of its regions.

    A fold is emitted in its own regions, its body inside of the fold's scopes: only the body's regions are added.
    """

    def __init__(self) -> None:
        self._open: tuple[str, ...] = ()

    @contextmanager
    def around(self, op: Op) -> Generator[None]:
        """Context for the emission of one op."""
        path = tuple(op.loc.region.split("/")) if op.loc.region else self._open
        if path == self._open:
            yield
            return
        outer = self._open
        inner = path[len(outer) :] if path[: len(outer)] == outer else path
        self._open = path
        try:
            with ExitStack() as scopes:
                for name in inner:
                    scopes.enter_context(jax.named_scope(name))
                yield
        finally:
            self._open = outer
