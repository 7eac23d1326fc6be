"""Frozen dataclasses whose methods are compiled in one go.

`dataclasses` of Python 3.12 compiles six functions for each frozen class, one by one. That was half of the time that
this package took to import. Here classes share the functions that do not depend on fields, and compile the others at
once.
Such a class is a dataclass in all else: `fields`, `replace`, `asdict`, `match` and `copy` take it. A class that
inherits from it is a `record`, too: `dataclass(frozen=True)` refuses it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, field
from typing import Any, Never, dataclass_transform, overload


@overload
def record[T](cls: type[T], /) -> type[T]: ...
@overload
def record[T](*, eq: bool = True, kw_only: bool = False, repr: bool = True) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: Any = None, /, *, eq: bool = True, kw_only: bool = False, repr: bool = True) -> Any:
    """Decorator: a class as `dataclass(frozen=True)` makes it.

    Args:
      cls: the class, for use without parentheses.
      eq: True if objects with equal fields are equal, and have equal hashes; else they are equal if identical.
      kw_only: True if arguments have to be named.
      repr: True if `repr` shows the fields; else the class shows itself as it defines, or inherits.
    """

    def made(cls: type[Any]) -> type[Any]:
        # A class with an `__eq__` of its own has None as `__hash__`, which counts as none, as in `dataclasses`.
        own = {name for name, value in vars(cls).items() if (name, value) != ("__hash__", None)}
        cls = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
        shared: dict[str, Any] = {"__setattr__": _refuse_to_set, "__delattr__": _refuse_to_delete}
        shared |= {"__repr__": _repr} if repr else {}
        for name, function in (shared | _compiled(cls, eq)).items():
            if name not in own:
                setattr(cls, name, function)
        return cls

    return made if cls is None else made(cls)


def _compiled(cls: type[Any], eq: bool) -> dict[str, Any]:
    """The methods that depend on the fields."""
    fields: list[Field[Any]] = list(dataclasses.fields(cls))
    # By its name and file, `tilekern.source` knows that the code belongs to no user.
    globals_: dict[str, Any] = {"__name__": cls.__module__, "_set": object.__setattr__, "_missing": MISSING}
    text = _init_text(cls, fields, globals_)
    if eq:
        values = "".join(f"self.{f.name}, " for f in fields if f.compare)
        theirs = values.replace("self.", "other.")
        text += f"def __eq__(self, other):\n if other.__class__ is self.__class__:\n  return ({values}) == ({theirs})\n"
        text += f" return NotImplemented\ndef __hash__(self):\n return hash(({values}))\n"
    methods: dict[str, Any] = {}
    exec(text, globals_, methods)
    for name, method in methods.items():
        method.__qualname__, method.__module__ = f"{cls.__qualname__}.{name}", cls.__module__
    return methods


def _init_text(cls: type[Any], fields: list[Field[Any]], globals_: dict[str, Any]) -> str:
    """The text of `__init__`; adds the defaults that it names to its globals."""
    plain, named, lines = list[str](), list[str](), list[str]()
    for f in fields:
        value = f.name
        if f.default_factory is not MISSING:
            globals_[f"_make_{f.name}"] = f.default_factory
            value = f"_make_{f.name}()" + (f" if {f.name} is _missing else {f.name}" if f.init else "")
        if f.init:
            globals_[f"_default_{f.name}"] = f.default
            has_default = f.default is not MISSING or f.default_factory is not MISSING
            (named if f.kw_only else plain).append(f"{f.name}=_default_{f.name}" if has_default else f.name)
        if f.init or f.default_factory is not MISSING:
            lines.append(f" _set(self, {f.name!r}, {value})\n")
    parameters = ", ".join(["self", *plain, *["*"] * bool(named), *named])
    after = " self.__post_init__()\n" if hasattr(cls, "__post_init__") else ""
    return f"def __init__({parameters}):\n{''.join(lines)}{after or ' pass' + chr(10)}"


def _refuse_to_set(self: object, name: str, value: object) -> Never:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: object, name: str) -> Never:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _repr(self: Any) -> str:
    shown = [f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr]
    return f"{type(self).__qualname__}({', '.join(shown)})"
