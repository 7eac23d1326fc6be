"""The permission to use tile registers, from a system that gives or refuses it."""

from __future__ import annotations

import ctypes
import platform
from types import SimpleNamespace
from typing import Any

import pytest

from tilekern.lower.llvm.runtime import tile_permission


def system(monkeypatch: pytest.MonkeyPatch, *, refuses: bool, granted: int, name: str = "Linux") -> list[int]:
    """A system that answers the request, and then says what is granted; the list of what it was asked."""
    asked: list[int] = []

    def syscall(number: int, code: int, argument: Any) -> int:
        assert number == 158
        asked.append(code)
        if code == 0x1023:
            assert argument.value == 18
            return -1 if refuses else 0
        argument._obj.value = granted
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(syscall=syscall))
    monkeypatch.setattr(platform, "system", lambda: name)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return asked


@pytest.mark.parametrize(
    ("refuses", "granted", "permitted"), [(False, 1 << 18 | 7, True), (False, 7, False), (True, 1 << 18, False)]
)
def test_linux_is_asked(monkeypatch: pytest.MonkeyPatch, refuses: bool, granted: int, permitted: bool) -> None:
    asked = system(monkeypatch, refuses=refuses, granted=granted)
    assert tile_permission.permitted() is permitted
    assert asked == ([0x1023] if refuses else [0x1023, 0x1022])


def test_other_systems_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = system(monkeypatch, refuses=False, granted=-1, name="Darwin")
    assert not tile_permission.permitted()
    assert asked == []
