"""The table of loaded kernels and its handlers, called by a stand-in for XLA."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import numpy as np
import pytest

from tests.lower.llvm.fake_xla import FakeError, FakeXla
from tests.lower.llvm.tasks import scale
from tilekern.lower.llvm.compile import toolchain
from tilekern.lower.llvm.compile.loaded_code import CodeTable, LoadedCode
from tilekern.lower.llvm.runtime import code_table, ffi_structs

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time

pytest.importorskip("llvmlite", reason="needs llvmlite")


class Library:
    """A stand-in for linked code.

    Attributes:
      closed: how often it was unloaded.
    """

    closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def table() -> CodeTable:
    """A table of its own; the native entries are those of the process."""
    return CodeTable(toolchain.code_table().functions, threading.RLock())


def forget(table: CodeTable) -> None:
    """Clear one table, as `jax.clear_caches` clears all."""
    table._recent.clear()


KEY, OTHER = "k" * 32, "o" * 32


def loaded() -> LoadedCode:
    code = toolchain.compile(scale(2, 3.0)).code
    assert code is not None
    return code


def address(name: str) -> int:
    return toolchain.code_table().functions[name]


def release(state: int | None) -> None:
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address(code_table.RELEASE))(state)


def test_code_goes_with_its_last_user(table: CodeTable) -> None:
    library, xla = Library(), FakeXla(key=KEY)
    code = table.add(KEY, library, 0x123)
    assert table.find(KEY) is code and code.address == 0x123
    xla.instantiate(address(code_table.INSTANTIATE))
    forget(table)
    del code
    assert (library.closed, len(table)) == (0, 1)  # an executable has it
    again = table.find(KEY)
    assert again is not None and again.address == 0x123
    release(xla.state)
    table.unload_unused()
    assert library.closed == 0  # Python has it
    forget(table)
    del again
    assert (library.closed, len(table)) == (1, 0)
    assert table.find(KEY) is None


def test_the_last_executable(table: CodeTable) -> None:
    library, states = Library(), [FakeXla(key=KEY) for _ in range(3)]
    table.add(KEY, library, 0x123)
    for xla in states:
        xla.instantiate(address(code_table.INSTANTIATE))
    forget(table)
    for xla in states:
        table.unload_unused()
        assert library.closed == 0
        release(xla.state)
    table.unload_unused()
    table.unload_unused()
    assert library.closed == 1


def test_entries_are_used_again(table: CodeTable) -> None:
    """Also while others live; what is found is always the code of the key."""
    seen: set[int] = set()
    keep = table.add(KEY, Library(), 1)
    for n in range(100):
        other = table.add(OTHER, Library(), n)
        xla = FakeXla(key=OTHER)
        xla.instantiate(address(code_table.INSTANTIATE))
        seen.add(xla.state or 0)
        release(xla.state)
        forget(table)
        assert other.address == n and table.find(KEY) is keep
        del other
    assert len(seen) == 1
    forget(table)


def test_only_so_many_stay_without_users(table: CodeTable) -> None:
    libraries = [Library() for _ in range(200)]
    for n, library in enumerate(libraries):
        table.add(f"{n:032}", library, n)
        assert len(table) <= 65
    forget(table)
    assert [library.closed for library in libraries] == [1] * 200


def test_a_call() -> None:
    code, x, y = loaded(), np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    xla = FakeXla(key=code.key)
    xla.instantiate(address(code_table.INSTANTIATE))
    xla.call(address(code_table.EXECUTE), [x], [y])
    np.testing.assert_array_equal(y, 3 * x)
    release(xla.state)


def test_metadata() -> None:
    xla, type_id = FakeXla(), ctypes.PYFUNCTYPE(ctypes.c_void_p)(address(code_table.TYPE_ID))()
    known = ctypes.c_int64.from_address(type_id or 0).value
    assert xla.metadata(address(code_table.INSTANTIATE)) == (*ffi_structs.API, 0, known)
    assert xla.metadata(address(code_table.EXECUTE)) == (*ffi_structs.API, 0, 99)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frame.size": 112}, "XLA_FFI_CallFrame of this jaxlib has less than the expected 120 bytes"),
        ({"frame.size": 160}, "XLA_FFI_CallFrame of this jaxlib has less than the expected 168 bytes"),
        ({"api.size": 144}, "XLA_FFI_Api of this jaxlib has less than the expected 152 bytes"),
        ({"api.minor": 3}, r"version of XLA's FFI is neither 0\.4 nor a later 0\.\*"),
        ({"frame.stage": 3}, "XLA calls it in another stage than instantiate"),
        ({"attrs.size": 40}, "XLA_FFI_Attrs of this jaxlib has less than the expected 48 bytes"),
        ({"attrs.count": 0}, "it has other attributes than a key"),
        ({"attrs.count": 2}, "it has other attributes than a key"),
        ({"key.type": 3}, "it has other attributes than a key"),
        ({"key.length": 31}, "it has other attributes than a key"),
    ],
    ids=lambda x: "-".join(map(str, *x.items())) if isinstance(x, dict) else "",
)
def test_another_interface_is_an_error(change: dict[str, int], message: str) -> None:
    with pytest.raises(FakeError, match=f"^3: tilekern cannot run a kernel: .*{message}"):
        FakeXla(key=loaded().key, changes=change).instantiate(address(code_table.INSTANTIATE))


def test_another_interface_of_execute_is_an_error() -> None:
    with pytest.raises(FakeError, match=r"^3: tilekern cannot run a kernel: XLA_FFI_CallFrame of this jaxlib has less"):
        FakeXla(changes={"frame.size": 112}).call(address(code_table.EXECUTE), [], [])
    xla = FakeXla(key=loaded().key)
    xla.instantiate(address(code_table.INSTANTIATE))
    xla.changes = {"frame.stage": 0}
    with pytest.raises(FakeError, match=r"^3: tilekern cannot run by_hand: XLA calls it in another stage than execute"):
        xla.call(address(code_table.EXECUTE), [], [])
    release(xla.state)


def test_code_that_is_not_loaded() -> None:
    with pytest.raises(FakeError, match=r"^5: tilekern cannot run a kernel: its machine code is not loaded"):
        FakeXla(key="0" * 32).instantiate(address(code_table.INSTANTIATE))


def test_errors_of_xla_are_passed_on(table: CodeTable) -> None:
    with pytest.raises(FakeError, match="of XLA's own"):  # no state
        FakeXla().call(address(code_table.EXECUTE), [], [])
    library = Library()
    table.add(KEY, library, 0x123)
    with pytest.raises(FakeError, match="of XLA's own"):  # a second state
        FakeXla(key=KEY, state=1).instantiate(address(code_table.INSTANTIATE))
    forget(table)
    table.unload_unused()
    assert library.closed == 1  # the call that failed is no user


def test_threads_use_what_another_removes(table: CodeTable) -> None:
    """Threads find a key again and again while another thread adds and removes it: never the wrong entry."""
    stop, wrong, found = threading.Event(), [], []

    def use(key: str, handlers: range) -> None:
        find = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(address(code_table.FIND))
        while not stop.is_set():
            if entry := find(key.encode()):
                found.append(key)
                if ctypes.c_int64.from_address(entry + 8).value not in handlers:
                    wrong.append(key)
                release(entry)

    ranges = {KEY: range(1000), OTHER: range(1000, 2000)}
    threads = [threading.Thread(target=use, args=item) for item in ranges.items() for _ in range(2)]
    for thread in threads:
        thread.start()
    libraries: list[Any] = []
    for n in range(1000):
        for key, handlers in ranges.items():
            if table.find(key) is None:
                libraries.append(Library())
                table.add(key, libraries[-1], handlers[n])
        time.sleep(1e-4)  # lets the others run
        forget(table)
    stop.set()
    for thread in threads:
        thread.join()
    forget(table)
    table.unload_unused()
    assert not wrong and {*found} == {*ranges}
    assert all(library.closed == 1 for library in libraries) and len(libraries) > 2
