"""The handler's native code, called by a stand-in for XLA that does what XLA never did yet."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import tilekern as tk
from tests.lower.llvm.fake_xla import FakeError, FakeXla
from tests.lower.llvm.tasks import add_up, handler, process, scale, through_scratch
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.llvm.runtime import ffi_handler, ffi_structs

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time

pytest.importorskip("llvmlite", reason="needs llvmlite")


def _run_fake(xla: FakeXla, count: int, scratch: int = 64) -> None:
    x, y = np.arange(count, dtype=np.float32), np.full(count, 7, np.float32)
    xla.call(handler(through_scratch(count, scratch)), [x], [y])
    np.testing.assert_array_equal(y, x)


def test_metadata() -> None:
    assert FakeXla().metadata(handler(scale(1))) == (*ffi_structs.API, 0, 99)
    with pytest.raises(FakeError, match="3: tilekern cannot run by_hand: XLA_FFI_Metadata of this jaxlib has less"):
        FakeXla().metadata(handler(scale(1)), size=32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frame.size": 112}, "XLA_FFI_CallFrame of this jaxlib has less than the expected 120 bytes"),
        ({"api.size": 144}, "XLA_FFI_Api of this jaxlib has less than the expected 152 bytes"),
        ({"args.size": 32}, "XLA_FFI_Args or XLA_FFI_Rets of this jaxlib has less than the expected 40 bytes"),
        ({"rets.size": 32}, "XLA_FFI_Args or XLA_FFI_Rets of this jaxlib has less than the expected 40 bytes"),
        ({"buffer.size": 40}, "XLA_FFI_Buffer of this jaxlib has less than the expected 48 bytes"),
        ({"api.major": 1}, r"version of XLA's FFI is neither 0\.4 nor a later 0\.\*"),
        ({"api.minor": 3}, r"version of XLA's FFI is neither 0\.4 nor a later 0\.\*"),
        ({"frame.stage": 0}, "XLA calls it in another stage than execute"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_another_interface_is_an_error(change: dict[str, int], message: str) -> None:
    with pytest.raises(FakeError, match=f"^3: tilekern cannot run by_hand: .*{message}"):
        _run_fake(FakeXla(changes=change), 3)


@pytest.mark.parametrize("change", [{"frame.size": 400}, {"api.size": 999}, {"api.minor": 77}, {"buffer.size": 64}])
def test_later_interfaces_work(change: dict[str, int]) -> None:
    _run_fake(FakeXla(changes=change), 3)


def test_an_unknown_dtype_of_zeros() -> None:
    for dtype in (0, 21, 34, -1):
        with pytest.raises(FakeError, match=r"12: .*unknown dtype"):
            FakeXla(changes={"dtype": dtype}).call(handler(add_up(0)), [], [np.ones(4, np.float32)])


@pytest.mark.parametrize("threads", [None, 0, 1, -3])
def test_no_pool(threads: int | None) -> None:
    xla = FakeXla(threads)
    _run_fake(xla, 20)
    assert (xla.scheduled, xla.destroyed) == (0, threads is None)


@pytest.mark.parametrize(("threads", "count", "helpers"), [(4, 100, 3), (4, 3, 2), (4, 2, 1), (4, 1, 0), (2, 9, 1)])
def test_the_number_of_helpers(threads: int, count: int, helpers: int) -> None:
    xla = FakeXla(threads, lambda task: task() or True)  # here and now: they do all the work
    _run_fake(xla, count)
    assert (xla.scheduled, xla.destroyed) == (helpers, 0)


def test_a_pool_that_refuses() -> None:
    xla = FakeXla(8, lambda task: False)
    _run_fake(xla, 20)
    assert (xla.scheduled, xla.destroyed) == (7, 7)


def test_helpers_that_come_late() -> None:
    """After the call, when its arrays may be gone."""
    late: list[Any] = []
    xla = FakeXla(4, lambda task: late.append(task) or True)
    for _ in range(100):
        _run_fake(xla, 20, scratch=1 << 20)
    assert len(late) == 300
    for task in late:
        task()


def test_helpers_that_are_threads() -> None:
    with ThreadPoolExecutor(8) as pool:
        xla = FakeXla(9, lambda task: bool(pool.submit(task)))
        for _ in range(200):
            _run_fake(xla, 20)


@tk.kernel(out_type=lambda x, mask: x)
def picked(x: Any, mask: Any, out: Any) -> None:
    i = tk.parallel(x.shape[0])
    out[i] = x.load(i, mask=mask[i], fill=7)


def test_a_masked_load_of_one_element_has_memory_to_read() -> None:
    """A load with a false mask reads constant zeros."""
    lowered = LlvmLowering(picked.trace(np.zeros(5, np.int32), np.zeros(5, bool)).ir)
    assert re.search(r"select i1 .*, ptr @nothing", lowered.text)


def test_a_program_without_scratch_gets_some() -> None:
    """Code may address the scratch memory without reading it, as spare columns of products do."""
    lowered = LlvmLowering(picked.trace(np.zeros(5, np.int32), np.zeros(5, bool)).ir)
    assert lowered.program.scratch == 0
    text = ffi_handler.with_handler(lowered.program).text
    (given,) = re.findall(r"@tilekern_run\(ptr %frame, ptr @task, i64 5, i64 (\d+)", text)
    assert int(given) >= 8


def test_no_memory_for_scratch() -> None:
    """The call fails, and the process goes on."""
    code = """
import resource
half = through_scratch(2, 1 << 29)
x = numbers(2, 1)
function = jax.jit(lambda x: run(half, x)).lower(x).compile()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limits = resource.getrlimit(resource.RLIMIT_AS)
for room in (1 << 28, 3 << 28):  # not even for the caller; for the caller alone
    resource.setrlimit(resource.RLIMIT_AS, (used + room, limits[1]))
    try:
        np.testing.assert_array_equal(function(x), x)
        print("enough")
    except jax.errors.JaxRuntimeError as error:
        print(str(error).splitlines()[0])
    resource.setrlimit(resource.RLIMIT_AS, limits)
np.testing.assert_array_equal(function(x), x)
"""
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    refused, worked = process(code).splitlines()
    assert refused.startswith("RESOURCE_EXHAUSTED: ")
    assert "tilekern cannot run by_hand: there is no memory for its intermediate values" in refused
    assert worked == "enough"


# Where c_api.h has what the handler touches; and sizes of structs, without a field.
LAYOUT = {
    "CallFrame": {
        "extension_start": 8,
        "api": 16,
        "ctx": 24,
        "stage": 32,
        "args": 40,
        "rets": 80,
        "attrs": 120,
        "future": 168,
    },
    "Attrs": {"size": 16, "types": 24, "attrs": 40, "": 48},
    "ByteSpan": {"ptr": 0, "len": 8},
    "State_Set_Args": {"ctx": 16, "stage": 24, "type_id": 32, "state": 40, "": 48},
    "State_Get_Args": {"ctx": 16, "stage": 24, "type_id": 32, "state": 40, "": 48},
    "TypeInfo": {"deleter": 16, "": 24},
    "Args": {"size": 16, "args": 32, "": 40},
    "Rets": {"size": 16, "rets": 32, "": 40},
    "Buffer": {"dtype": 16, "data": 24, "rank": 32, "dims": 40, "": 48},
    "Api": {"api_version.major_version": 32, "api_version.minor_version": 36, "XLA_FFI_Error_Create": 48}
    | {"XLA_FFI_Error_Destroy": 64, "XLA_FFI_State_Set": 104, "XLA_FFI_State_Get": 112}
    | {"XLA_FFI_ThreadPool_Schedule": 136, "XLA_FFI_ThreadPool_NumThreads": 144},
    "Metadata_Extension": {"extension_base.type": 8, "metadata": 24},
    "Metadata": {
        "api_version.major_version": 24,
        "api_version.minor_version": 28,
        "traits": 32,
        "state_type_id": 40,
        "": 36,
    },
    "ThreadPool_NumThreads_Args": {"ctx": 16, "num_threads": 24, "": 32},
    "ThreadPool_Schedule_Args": {"ctx": 16, "task": 24, "data": 32, "": 40},
    "Error_Create_Args": {"message": 16, "errc": 24, "": 28},
    "Error_Destroy_Args": {"error": 16, "": 24},
}


def test_the_header_of_the_installed_jaxlib(tmp_path: Path) -> None:
    if not (compiler := shutil.which("cc")):
        pytest.skip("needs a C compiler")
    checks = [
        (f"offsetof(XLA_FFI_{struct}, {name})" if name else f"XLA_FFI_{struct}_STRUCT_SIZE", number)
        for struct, fields in LAYOUT.items()
        for name, number in fields.items()
    ]
    source = tmp_path / "layout.c"
    asserts = "".join(f'_Static_assert({found} == {number}, "{found}");\n' for found, number in checks)
    source.write_text(f'#include "xla/ffi/api/c_api.h"\n{asserts}')
    command = [compiler, "-fsyntax-only", "-I", jax.ffi.include_dir(), source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
