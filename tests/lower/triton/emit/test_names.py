"""Names of variables: those of the user, unique, and none with another meaning."""

from __future__ import annotations

import keyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilekern.lower.triton.emit import names as module
from tilekern.lower.triton.emit.names import Names, assigned
from tilekern.lower.triton.emit.prelude import reserved
from tilekern.source import UNKNOWN, Loc

WISHES = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["x", "x", "x_2", "tl", "triton", "libdevice", "for", "lambda", "maximum", "sort3", "2d", "größe"]),
)


@given(wishes=st.lists(WISHES, max_size=20))
def test_names_are_new_and_free(wishes: list[str]) -> None:
    names = Names()
    found = [names.fresh(w) for w in wishes]
    assert len(set(found)) == len(found)
    for name in found:
        assert name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
        assert not reserved(name) and name not in ("tl", "triton", "libdevice", "float", "range")


def test_a_wish_is_granted_if_it_can_be() -> None:
    names = Names()
    assert [names.fresh(w) for w in ("acc", "acc", "acc_2", "", "3d", "a b")] == [
        "acc",
        "acc_2",
        "acc_2_2",
        "x",
        "x3d",
        "a_b",
    ]


def test_many_equal_wishes_take_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes on where the one before it ended: a kernel that is unrolled asks for thousands of one name."""
    looked_at = list[str]()
    monkeypatch.setattr(module, "reserved", lambda name: looked_at.append(name) or reserved(name))
    names = Names()
    for n in range(2, 500, 3):
        names.fresh(f"acc_{n}")
    found = [names.copy().fresh("acc"), *(names.fresh("acc") for _ in range(1000))]
    assert found[:4] == ["acc", "acc", "acc_3", "acc_4"] and len(set(found)) == 1000
    assert len(looked_at) < 3000


def places() -> list[Loc]:
    """The lines of this function."""
    first = places.__code__.co_firstlineno
    a = b = 1
    c, d = 2, 3
    e: int = 4
    e += a
    f = [
        b,
        c,
    ]
    (f[0]) = d
    return [Loc(__file__, first + n) for n in range(12)]


def test_what_a_statement_assigns() -> None:
    lines = places()
    found = [assigned(loc) for loc in lines]
    # `a = b = 1` has two targets and no one name; a statement of several lines has its name on each of them.
    assert found[3:] == [(), ("c", "d"), ("e",), ("e",), ("f",), ("f",), ("f",), ("f",), ()]


def test_places_that_no_source_has() -> None:
    assert assigned(UNKNOWN) == assigned(Loc("/no/such/file.py", 1)) == ()
    assert assigned(Loc(__file__, 10**6)) == ()
