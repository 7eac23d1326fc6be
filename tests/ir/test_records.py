"""Records: what `dataclass(frozen=True)` makes of a class, `record` makes of it too."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import pytest

from tilekern.ir.records import record


def classes(decorator: Any) -> dict[str, Any]:
    """The same classes by a decorator: plain, with defaults, a subclass, with a check, named arguments, methods."""

    @decorator
    class Plain:
        a: int
        b: str = "b"
        kind: ClassVar[int] = 7

    @decorator
    class Defaults:
        items: list[int] = field(default_factory=list[int])
        hidden: int = field(default=3, compare=False, repr=False)

    @decorator
    class Sub(Plain):
        c: float = 0.5
        total: int = field(init=False, default=4)

    @decorator
    class Checked:
        a: int
        double: int = field(init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "double", 2 * self.a)

        @cached_property
        def triple(self) -> int:
            return 3 * self.a

    @decorator
    class Own:
        a: int

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 5

    @decorator
    class OwnEquality:
        a: int

        def __eq__(self, other: object) -> bool:
            return True

    @decorator
    class Empty:
        pass

    return {c.__name__: c for c in (Plain, Defaults, Sub, Checked, Own, OwnEquality, Empty)}


RECORDS, DATACLASSES = classes(record), classes(dataclass(frozen=True))
CALLS = {
    "Plain": [lambda c: c(1), lambda c: c(1, b="x"), lambda c: c(a=2, b="x")],
    "Defaults": [lambda c: c(), lambda c: c([1], 2)],
    "Sub": [lambda c: c(1), lambda c: c(1, "x", 2.5), lambda c: c(1, c=2.5)],
    "Checked": [lambda c: c(3)],
    "Own": [lambda c: c(1)],
    "OwnEquality": [lambda c: c(1)],
    "Empty": [lambda c: c()],
}
PAIRS = [(name, call) for name, calls in CALLS.items() for call in calls]


@pytest.mark.parametrize(("name", "call"), PAIRS)
def test_a_record_is_the_dataclass(name: str, call: Any) -> None:
    ours, theirs = call(RECORDS[name]), call(DATACLASSES[name])
    assert is_dataclass(ours) and asdict(ours) == asdict(theirs)
    assert repr(ours).split(".")[-1] == repr(theirs).split(".")[-1]
    assert [f.name for f in fields(ours)] == [f.name for f in fields(theirs)]
    assert ours == call(RECORDS[name]) and (name in ("Defaults", "Own") or hash(ours) == hash(theirs))
    assert copy.copy(ours) == copy.deepcopy(ours) == ours and getattr(ours, "triple", 9) == 9
    assert type(ours).__match_args__ == type(theirs).__match_args__
    assert str(inspect.signature(RECORDS[name])).count(",") == str(inspect.signature(DATACLASSES[name])).count(",")


@pytest.mark.parametrize(("name", "call"), PAIRS)
def test_a_record_does_not_change(name: str, call: Any) -> None:
    value = call(RECORDS[name])
    for attribute in ("a", "items", "new"):
        with pytest.raises(FrozenInstanceError):
            setattr(value, attribute, 1)
        with pytest.raises(FrozenInstanceError):
            delattr(value, attribute)


@pytest.mark.parametrize("call", [lambda c: c(), lambda c: c(1, 2, 3), lambda c: c(1, d=2), lambda c: c(1, a=2)])
def test_wrong_arguments_are_refused_alike(call: Any) -> None:
    errors = []
    for kinds in (RECORDS, DATACLASSES):
        with pytest.raises(TypeError) as error:
            call(kinds["Plain"])
        errors.append(str(error.value).split(".")[-1])
    assert errors[0] == errors[1]


def test_equality_is_of_one_class_and_of_compared_fields() -> None:
    plain, sub, defaults = RECORDS["Plain"], RECORDS["Sub"], RECORDS["Defaults"]
    assert plain(1) != plain(2) and plain(1) != sub(1) and plain(1) != (1, "b")
    assert defaults([1], 2) == defaults([1], 3) != defaults([2], 2)
    assert defaults().items is not defaults().items
    assert replace(sub(1), a=5, c=1.0) == sub(5, "b", 1.0)


def test_identity_and_named_arguments() -> None:
    @record(eq=False, kw_only=True, repr=False)
    class Named:
        a: int
        b: int = 2

    assert Named(a=1) != Named(a=1) and len({Named(a=1), Named(a=1)}) == 2
    assert "object at" in repr(Named(a=1))
    with pytest.raises(TypeError):
        Named(1)  # pyright: ignore[reportCallIssue]


def test_records_of_a_module_are_pickled() -> None:
    from tilekern.source import Loc

    assert pickle.loads(pickle.dumps(Loc("a.py", 3))) == Loc("a.py", 3)
    from tilekern.ir.types import F32, TileType

    assert pickle.loads(pickle.dumps(TileType((2,), F32))) == TileType((2,), F32)
