"""What kernels and ops have in common: calls, static arguments, schedules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from tilekern import _jax, source
from tilekern.errors import ArgumentError
from tilekern.kernel.family import Definition, Schedule, check_argument
from tilekern.kernel.signature import LAUNCH, Signature, of_function, static_key
from tilekern.lower.target import Target, resolve

# How many argument types a kernel remembers its families for, before it starts anew.
_FAMILIES = 512


# The target that the calls inside of an op inherit from the op's call.
_asked: ContextVar[str | None] = ContextVar("tilekern_asked", default=None)


@contextmanager
def asking(target: str | None) -> Generator[None]:
    """Calls inside that ask for no target ask for this one."""
    token = _asked.set(target)
    try:
        yield
    finally:
        _asked.reset(token)


class Declared:
    """A function of arrays, declared by a decorator: call it inside or outside of `jax.jit`.

    Calls take the arrays and any keyword-only arguments; `target=` to lower for that target; and the launch options of
    GPUs, `num_warps=` and `num_stages=`.

    Attributes:
      signature: its parameters.
    """

    def __init__(self, out_type: Callable[..., Any], function: Callable[..., Any], donate: tuple[str, ...]) -> None:
        functools.update_wrapper(self, function)
        loc = source.of_function(function.__code__)
        with source.at(loc):
            self.signature: Signature = of_function(function)
            for name in donate:
                if name not in self.signature.arrays:
                    raise ArgumentError(
                        f"{self.signature.name} donates something that is no parameter",
                        expected=f"names among {', '.join(self.signature.arrays)}",
                        got=f"donate = {donate!r}",
                        fix="name positional parameters that are inputs",
                    )
        self._schedules: dict[str, Schedule] = {}
        self._definition = Definition(function, out_type, self.signature, donate, self._schedules, loc)
        self._calls: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._families: dict[tuple[Any, ...], Any] = {}
        self._reused = True

    def __repr__(self) -> str:
        return f"<tilekern {type(self).__name__.lower()} {self.signature.name}>"

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run it; see the class."""
        inherited = _asked.get()
        if inherited is not None:
            keywords.setdefault("target", inherited)
        try:
            call = self._calls[static_key(keywords)] if keywords else self._calls[()]
        except (KeyError, TypeError):
            args, keywords = self.signature.positional(args, keywords)
            call = self._prepare(keywords)
        return call(*args)

    def schedule(self, target: str) -> Callable[[Schedule], Schedule]:
        """Declare the blocks for all targets whose name starts with `target`; the longest such name decides.

        The decorated function gets the inputs as `jax.ShapeDtypeStruct`s, and by keyword those static arguments, and
        the name of the `target`, that it has parameters for. It returns a dict of blocks.
        """

        def register(schedule: Schedule) -> Schedule:
            self._schedules[target] = schedule
            return schedule

        return register

    # --- calls ---

    def _bind(self, family: Any, args: tuple[Any, ...]) -> Any:
        """Call a family on arguments of its types."""
        raise NotImplementedError

    def _make_family(
        self, args: tuple[Any, ...], statics: Mapping[str, Any], blocks: Mapping[str, int], target: Target | None
    ) -> tuple[Any, bool]:
        """The family for arguments of given types, and whether later calls may have it too."""
        raise NotImplementedError

    def _check(self, keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int], Target | None]:
        """Static arguments, blocks and target of a call."""
        target = keywords.get("target")
        given = {n: v for n, v in keywords.items() if n in (*self.signature.blocks, *LAUNCH) and v is not None}
        statics = self.signature.check_statics(keywords)
        blocks = self.signature.check_blocks(given, "the call")
        return statics, blocks, None if target is None else resolve(target)

    def _prepare(self, keywords: Mapping[str, Any]) -> Callable[..., Any]:
        """The function of the arrays for given static arguments: jitted, so that JAX dispatches repeated calls."""
        statics, blocks, target = self._check(keywords)
        key = static_key(keywords)
        if key in self._calls:
            return self._calls[key]

        def call(*args: Any) -> Any:
            family, kept = self._family(args, statics, blocks, target)
            if not kept:
                # The values of this call must not be found again by the next: call without any cache from now on.
                self._calls[key] = call
            return self._bind(family, args)

        call.__name__ = self.signature.name
        return self._calls.setdefault(key, jax.jit(call))

    def _family(
        self, args: tuple[Any, ...], statics: Mapping[str, Any], blocks: Mapping[str, int], target: Target | None
    ) -> tuple[Any, bool]:
        """The family for a call, remembered; and whether it is."""
        with_paths, tree = _jax.flatten_with_path(args)
        types = tuple(
            check_argument(self.signature.name, self.signature.leaf_name(path), leaf) for path, leaf in with_paths
        )
        if len(args) > len(self.signature.arrays):
            raise ArgumentError(
                f"{self.signature.name} takes fewer arrays",
                expected=f"the inputs among {', '.join(self.signature.arrays)}",
                got=f"{len(args)} positional arguments",
                fix="outputs are not passed; static arguments go by keyword",
            )
        key = (tree, types, static_key(statics), static_key(blocks), target, _jax.x64_enabled())
        known = self._families.get(key)
        if known is not None:
            return known, True
        family, kept = self._make_family(jax.tree.unflatten(tree, types), statics, blocks, target)
        # What has closed over a traced value once may do so again: it is traced anew for each call from then on.
        self._reused = self._reused and kept
        if self._reused:
            if len(self._families) >= _FAMILIES:
                self._families.clear()
            self._families[key] = family
        else:
            self._families.clear()
        return family, kept
