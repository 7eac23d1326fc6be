"""Prints and assertions of compiled code: the lines and the errors of the portable backend."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lower.llvm.machines import ALL, here
from tests.lower.llvm.running import Canaries, run
from tilekern.errors import FallbackWarning
from tilekern.ir.types import DTYPES
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.llvm.runtime.host_print import HOST_PRINT

pytest.importorskip("llvmlite", reason="needs llvmlite")

TARGETS = ("cpu:llvm", "cpu:xla")
like = tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))


@pytest.fixture(autouse=True)
def no_fallback() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield


def lines(call: Callable[[], Any], capfd: pytest.CaptureFixture[str]) -> Counter[str]:
    """The lines that a call prints, and how often."""
    capfd.readouterr()
    jax.block_until_ready(call())
    jax.effects_barrier()
    return Counter(capfd.readouterr().out.splitlines())


def printed(kernel: Callable[..., Any], capfd: pytest.CaptureFixture[str], *arrays: Any, **more: Any) -> Counter[str]:
    """The lines that a kernel prints on both targets."""
    native, portable = (lines(lambda t=t: kernel(*arrays, target=t, **more), capfd) for t in TARGETS)
    assert native and native == portable
    return native


@like
def talking(x, out):
    i = tk.parallel(x.shape[0], 4)
    tile = x[i]
    out[i] = tile
    tk.debug_print("rows {}: {} of {}", i.index, tile, i.valid)
    tk.debug_print("{}", tile[0, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_of_every_dtype(dtype: str, capfd: pytest.CaptureFixture[str]) -> None:
    with jax.enable_x64(True):
        x = (np.arange(35).reshape(7, 5) % 9).astype(DTYPES[dtype])
        printed(talking, capfd, x)


@like
def in_loops(x, out):
    i = tk.parallel(x.shape[0])

    def step(k, total):
        total = total + x[k].sum()

        @tk.when((k + i) % 2 == 0)
        def _():
            tk.debug_print("program {} step {}: {:.2f} {}", i, k, total, x[k] * 2)

        return total

    total = tk.fold(tk.serial(3), step, jnp.float32(0))
    tk.debug_print("end")
    out[i] = x[i] * total


def test_loops_and_branches(capfd: pytest.CaptureFixture[str]) -> None:
    found = printed(in_loops, capfd, np.arange(12, dtype=np.float32).reshape(3, 4))
    assert found["end"] == 3 and found["program 1 step 1: 28.00 [ 8. 10. 12. 14.]"] == 1


def test_batches(capfd: pytest.CaptureFixture[str]) -> None:
    rows = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    batched = [lines(lambda t=t: jax.vmap(lambda x: in_loops(x, target=t))(rows), capfd) for t in TARGETS]
    native, portable = batched
    # The portable backend prints once for the batch what is the same in all of its rows.
    assert native["end"] == 6 and portable["end"] == 3
    assert {**native, "end": 0} == {**portable, "end": 0}


def test_tiles_that_numpy_abbreviates(capfd: pytest.CaptureFixture[str]) -> None:
    found = printed(talking, capfd, np.arange(4 * 300, dtype=np.int32).reshape(4, 300))
    assert any("..." in line for line in found)


def test_options_of_numpy_are_those_of_the_lowering(capfd: pytest.CaptureFixture[str]) -> None:
    @like
    def thirds(x, out):
        tk.debug_print("{}", x[...] / 3)
        out[...] = x[...]

    with np.printoptions(precision=2):
        found = lines(lambda: thirds(np.ones(2, np.float32), target="cpu:llvm"), capfd)
    assert found == {"[0.33 0.33]": 1}


def test_lines_of_many_threads_do_not_mix(capfd: pytest.CaptureFixture[str]) -> None:
    @like
    def counting(x, out):
        i = tk.parallel(x.shape[0])
        tk.debug_print("program {} has {}", i, x[i])
        out[i] = x[i]

    x = np.repeat(np.arange(500, dtype=np.int32)[:, None], 8, 1)
    found = lines(lambda: counting(x, target="cpu:llvm"), capfd)
    assert found == {f"program {n} has {x[n]}": 1 for n in range(500)}


def test_prints_stay_inside_the_scratch_memory(capfd: pytest.CaptureFixture[str]) -> None:
    x = np.arange(35, dtype=np.float32).reshape(7, 5)
    func = talking.trace(x).lower("cpu:llvm").ir
    for machine in (None, *here()):
        memory = Canaries()
        assert run(LlvmLowering(func, machine), [x], memory, seed=1)[0].tobytes() == x.tobytes()
        assert memory.untouched()
    assert "rows 1" in capfd.readouterr().out


@pytest.mark.parametrize("machine", ALL, ids=lambda m: m.cpu)
def test_code_for_every_machine(machine: Any) -> None:
    x = np.ones((7, 5), np.float32)
    for kernel in (talking, checked):
        assert LlvmLowering(kernel.trace(x).lower("cpu:llvm").ir, machine).compile().asm["s"]


def test_only_kernels_that_print_call_the_host() -> None:
    x = np.ones((7, 5), np.float32)
    assert [HOST_PRINT in k.trace(x).lower("cpu:llvm").text for k in (talking, checked)] == [True, False]


# --- assertions ------------------------------------------------------------------------------------------------------


@like
def checked(x, out):
    i = tk.parallel(x.shape[0], 4)
    tile = x[i]
    tk.device_assert(tile >= 0, "an element is negative")
    tk.device_assert(tile.sum() < 100, "the sum of a tile is too large")

    def step(k, total):
        tk.device_assert(total < 50, "the sum of the rows is too large")
        return total + x[k].sum()

    tk.fold(tk.serial(x.shape[0]), step, jnp.float32(0))
    out[i] = tile


def fails(call: Callable[[], Any]) -> tuple[type, str]:
    """The type of the error of a call, and its message, from the assertion on."""
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(call())
        jax.effects_barrier()
    return caught.type, str(caught.value)[str(caught.value).rindex("DeviceAssertionError:") :].strip()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 2, 3, 4, 5, 6, -7], "an element is negative"),
        ([1, 2, 3, 4, 1000, 6, 7], "the sum of a tile is too large"),
        ([10, 20, 30, 1, 1, 1, 1], "the sum of the rows is too large"),
    ],
)
def test_an_assertion_that_fails_is_the_error_of_the_portable_backend(values: list[float], message: str) -> None:
    x = np.array(values, np.float32)
    native, portable = (fails(lambda t=t: jax.jit(lambda x: checked(x, target=t) * 2)(x)) for t in TARGETS)
    assert native == portable and message in native[1] and "tk.device_assert(" in native[1] and __file__ in native[1]
    assert fails(lambda: jax.vmap(lambda x: checked(x, target="cpu:llvm"))(np.stack([x * 0, x]))) == native


def test_the_first_of_several_assertions_that_fail_is_the_error() -> None:
    x = np.array([-1] + [60] * 6, np.float32)
    assert "an element is negative" in fails(lambda: checked(x, target="cpu:llvm"))[1]


def test_assertions_that_hold() -> None:
    x = np.array([1, 2, 3, 4, 5, 6, 7], np.float32)
    for _ in range(2):  # the flag of the call before is gone
        np.testing.assert_array_equal(checked(x, target="cpu:llvm"), x)
        fails(lambda: checked(-x, target="cpu:llvm"))
