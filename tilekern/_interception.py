"""JAX's own functions for bodies of kernels, while a library has functions of its own in their place.

Libraries that quantise a model by interception replace functions of JAX while the model is traced, by setting an
attribute (`jax.lax.dot_general = ...`) or the `__code__` of a function. A kernel of the model is traced once, and
serves calls outside of the interception, too. So its body is traced as without the interception.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from operator import itemgetter
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, cast

import jax

# The functions of arrays are in these modules, and in their submodules.
_MODULES = (
    *("jax.lax", "jax.nn", "jax.numpy", "jax.random", "jax.scipy", "jax._src.core", "jax._src.custom_derivatives"),
    *("jax._src.lax", "jax._src.nn", "jax._src.numpy", "jax._src.random", "jax._src.scipy"),
)


@contextmanager
def own_functions() -> Generator[None]:
    """A context in which this thread calls JAX's functions as they were when this package was imported.

    Other threads keep the replacements. JAX's caches keep traces inside and outside apart, because a jitted function of
    JAX may have been traced with a replacement.
    """
    if _thread.depth:
        yield
        return
    with _lock:
        _installed.enter()
    _thread.depth += 1
    try:
        with _context("tilekern"):
            yield
    finally:
        _thread.depth -= 1
        with _lock:
            _installed.leave()


class _Thread(threading.local):
    """Counts how many times a thread is inside of `own_functions`."""

    depth = 0


_thread, _lock = _Thread(), threading.Lock()
_context: Any = cast(Any, jax).make_user_context(None)


class _Choice:
    """A function that is JAX's own inside of `own_functions`, and its replacement elsewhere."""

    def __init__(self, own: Any, replacement: Any) -> None:
        self._own, self._replacement = own, replacement

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._chosen()(*args, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chosen(), name)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def _chosen(self) -> Any:
        return self._own if _thread.depth else self._replacement


class _Change(NamedTuple):
    """An attribute of a module, a class or a function: its value, and the value that chooses by thread."""

    holder: Any
    name: str
    before: Any
    choosing: Any


class _Attributes:
    """The functions that a module or a class has as attributes, by name: one function at least."""

    def __init__(self, holder: Any, own: dict[str, Any]) -> None:
        self._holder, self._own = holder, own
        # The first name twice: of one name `itemgetter` would return no tuple.
        self._current, first = itemgetter(next(iter(own)), *own), next(iter(own.values()))
        self._unchanged = (first, *own.values())

    def changes(self) -> Iterator[_Change]:
        """The changes that make replaced functions choose by thread."""
        namespace = cast(dict[str, Any], vars(self._holder))
        # A tuple first compares identities. Each trace of a body comes here, so the usual case has no loop in Python.
        try:
            if self._current(namespace) == self._unchanged:
                return
        except KeyError:  # an attribute was deleted
            pass
        for name, own in self._own.items():
            now = namespace.get(name)
            if now is not None and now is not own and not isinstance(now, _Choice):
                yield _Change(self._holder, name, now, _Choice(own, now))


class _Codes:
    """The code of functions.

    A function that closes over variables is left out: its code must close over as many variables as before.
    """

    def __init__(self, functions: list[FunctionType]) -> None:
        self._functions = [function for function in functions if not function.__closure__]
        self._own = [function.__code__ for function in self._functions]
        self._unchanged = gc.get_referents(*self._functions)

    def changes(self) -> Iterator[_Change]:
        """The changes that make functions with replaced code choose by thread."""
        # Reading `__code__` is an audit event, and `filelock`, which JAX imports if it is installed, hears every event
        # in Python. So all objects to which functions refer are compared first, their code included.
        referents = gc.get_referents(*self._functions)
        with suppress(Exception):  # an array among new defaults has no truth value
            if referents == self._unchanged:
                return
        current = [function.__code__ for function in self._functions]
        if current == self._own:
            self._unchanged = referents
            return
        for function, own, now in zip(self._functions, self._own, current, strict=True):
            if now is not own and not any(isinstance(constant, _Choice) for constant in now.co_consts):
                choice = _Choice(_with_code(function, own), _with_code(function, now))
                yield _Change(function, "__code__", now, _code_of(choice))


def _with_code(function: FunctionType, code: CodeType) -> FunctionType:
    rebuilt = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    rebuilt.__kwdefaults__ = function.__kwdefaults__
    return rebuilt


def _code_of(choice: _Choice) -> CodeType:
    """Code that calls a choice, for a function of any parameters: the choice is one of its constants."""

    def call(*args: Any, **keywords: Any) -> Any:
        chosen: Any = "choice"
        return chosen(*args, **keywords)

    code = call.__code__
    return code.replace(co_consts=tuple(choice if constant == "choice" else constant for constant in code.co_consts))


class _Installed:
    """The changes that are made while threads are inside of `own_functions`."""

    def __init__(self) -> None:
        self._places: list[_Attributes | _Codes] = _own()
        self._threads, self._changes = 0, list[_Change]()

    def enter(self) -> None:
        """Let functions that are replaced choose by thread."""
        for place in self._places:
            for change in place.changes():
                setattr(change.holder, change.name, change.choosing)
                self._changes.append(change)
        self._threads += 1

    def leave(self) -> None:
        """After the last thread, undo the changes; an attribute that its library has set since then stays."""
        self._threads -= 1
        while self._changes and not self._threads:
            change = self._changes.pop()
            if vars(change.holder).get(change.name, getattr(change.holder, change.name)) is change.choosing:
                setattr(change.holder, change.name, change.before)


def _own() -> list[_Attributes | _Codes]:
    """One `_Attributes` for each module of `_MODULES` and each class in it, then one `_Codes` for all their functions.

    The attributes are the functions that a module defines, and all functions of a public module, whose names users
    write. The `_Codes` has the Python functions among them, and the functions that they wrap, as jitted ones do.
    """
    attributes: list[_Attributes] = []
    functions: dict[int, FunctionType] = {}
    for name, module in [(n, m) for n, m in sys.modules.items() if n.startswith(_MODULES)]:
        is_public = not name.startswith("jax._src")
        for holder in (module, *(x for x in vars(module).values() if isinstance(x, type) and x.__module__ == name)):
            # Some 9,000 values pass here in each `import tilekern`, so the loop calls no Python function.
            own = {
                n: x
                for n, x in vars(holder).items()
                if callable(x) and not isinstance(x, type) and (is_public or getattr(x, "__module__", name) == name)
            }
            attributes += [_Attributes(holder, own)] if own else []
            for function in own.values():
                while function is not None:
                    if isinstance(function, FunctionType):
                        functions[id(function)] = function
                    function = getattr(function, "__wrapped__", None)
    return [*attributes, _Codes(list(functions.values()))]


_installed = _Installed()
