"""Right launches of kernels of users pass, and each planted fault is found, by the driver or by a check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tests.lower.triton import kernels
from tests.lower.triton.recording.checks import check
from tests.lower.triton.recording.driver import Recorded, addresses, driver
from tilekern.lower.triton.call import described
from tilekern.lower.triton.call_message import Int32, Int64, Launch, Parameter, Pointer, TensorMap
from tilekern.lower.triton.lowering import TritonLowering

LIKE = jax.ShapeDtypeStruct


@tk.kernel(out_type=lambda x: (), donate=("x",))
def doubled(x):
    i = tk.parallel(x.shape[0], 64)
    x[i] = x[i] * 2


@tk.kernel(out_type=lambda x, rows: tk.Zeros(LIKE((2**20 + 5, 4096), x.dtype)))
def scattered(x, rows, out):
    i, j = tk.parallel(rows.shape[0]), tk.parallel(x.shape[1], 512)
    out.at[rows[i], j].add(x[i, j], ordered=False)


@cache
def lowered(name: str, target: str = "cuda:sm_90") -> TritonLowering:
    square = jnp.zeros((512, 512), jnp.bfloat16)
    kernel, arrays = {
        "doubled": (doubled, (jnp.zeros(1000),)),
        "embedding": (scattered, (LIKE((3, 4096), "float32"), LIKE((3,), "int32"))),
        "histogram": (kernels.histogram, (jnp.zeros((16, 4)), jnp.zeros(16, jnp.int32), jnp.int32(0))),
        "large matmul": (kernels.matmul, (LIKE((2**20 + 16, 4096), jnp.bfloat16), LIKE((4096, 384), jnp.bfloat16))),
        "matmul": (kernels.matmul, (square, square)),
        "softmax": (kernels.softmax, (jnp.zeros((16, 64)),)),
    }[name]
    found = kernel.trace(*arrays).lower(target)._lowered
    assert isinstance(found, TritonLowering)
    return found


def launched(lowering: TritonLowering, launch: Launch, capability: int = 90, buffers: Sequence[int] = ()) -> Recorded:
    return driver(capability).launch(launch, buffers or addresses(lowering.program))


def right(name: str) -> Launch:
    pytest.importorskip("triton", reason="needs triton")
    lowering = lowered(name)
    return described(lowering.program, lowering._binary)


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["doubled", "embedding", "histogram", "large matmul", "matmul", "softmax"])
def test_a_right_launch_passes(name: str) -> None:
    """Written in place; filled with zeros; TMA descriptors and much shared memory; plain; more than 2^31 elements."""
    launch = right(name)
    for _ in range(2):  # the second time jaxlib takes the function from its cache
        check(lowered(name), launched(lowered(name), launch))


def test_what_is_recorded() -> None:
    """Of each kind there is a call, so that no check is empty."""
    calls = {name: launched(lowered(name), right(name)) for name in ("doubled", "histogram", "matmul")}
    assert len(calls["matmul"].of("map")) == 3
    assert [fill["bytes"] for fill in calls["histogram"].of("fill")] == [4 * 16 * 4 * 4, 4 * 4]
    operand, result, *_ = calls["doubled"].of("launch")[0]["values"]
    assert operand == result == 1 << 40
    assert [fill["bytes"] for fill in launched(lowered("embedding"), right("embedding")).of("fill")] == [17179951104]
    fresh = replace(right("matmul"), kernel=replace(right("matmul").kernel, ptx="// another key of jaxlib's cache"))
    kinds = [call["call"] for call in launched(lowered("matmul"), fresh).calls]
    assert kinds == ["map", "map", "map", "module", "opt-in", "launch"]


# --- faults that a check finds ----------------------------------------------------------------------------------------


def _kernel(launch: Launch, **changes: Any) -> Launch:
    return replace(launch, kernel=replace(launch.kernel, **changes))


def _parameters(launch: Launch, change: Callable[[Parameter], Parameter]) -> Launch:
    return replace(launch, parameters=tuple(map(change, launch.parameters)))


def _of(kind: type, **changes: Any) -> Callable[[Parameter], Parameter]:
    """Change the parameters of a kind."""
    return lambda parameter: replace(parameter, **changes) if isinstance(parameter, kind) else parameter


FAULTS: dict[str, tuple[str, Callable[[Launch], Launch]]] = {
    "one program more": ("softmax", lambda x: replace(x, programs=x.programs + 1)),
    "one program less": ("softmax", lambda x: replace(x, programs=x.programs - 1)),
    "parameters in reverse": ("matmul", lambda x: replace(x, parameters=x.parameters[::-1])),
    "a parameter is missing": ("softmax", lambda x: replace(x, parameters=x.parameters[:-1])),
    "a parameter too many": ("softmax", lambda x: replace(x, parameters=(*x.parameters, Int32(0)))),
    "shapes of the wrong size": ("matmul", lambda x: _parameters(x, _of(Int32, value=511))),
    "64-bit numbers of the wrong size": ("matmul", lambda x: _parameters(x, _of(Int64, value=1))),
    "no zeros": ("histogram", lambda x: _parameters(x, _of(Pointer, bytes_to_zero=0))),
    "zeros in an input": ("softmax", lambda x: _parameters(x, _of(Pointer, bytes_to_zero=16))),
    "an element type of the same size": ("matmul", lambda x: _parameters(x, _of(TensorMap, element_type=6))),
    "a map that leaves the array": ("matmul", lambda x: _parameters(x, _of(TensorMap, shape=(512, 520)))),
    "a map of other rows": ("matmul", lambda x: _parameters(x, _of(TensorMap, strides=(1024, 1)))),
    "no swizzle": ("matmul", lambda x: _parameters(x, _of(TensorMap, swizzle=0))),
    "half of each box": ("matmul", lambda x: _parameters(x, _of(TensorMap, block=(32, 64)))),
    "less shared memory": ("matmul", lambda x: _kernel(x, shared_bytes=x.kernel.shared_bytes - 1024)),
    "code of another kernel": ("softmax", lambda x: _kernel(x, cubin=x.kernel.cubin[:-1] + b"?", ptx="//")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    name, plant = FAULTS[fault]
    recorded = launched(lowered(name), plant(right(name)))
    with pytest.raises(AssertionError):
        check(lowered(name), recorded)


def test_operands_in_another_order_are_found() -> None:
    lowering = lowered("softmax")
    recorded = launched(lowering, right("softmax"), buffers=addresses(lowering.program)[::-1])
    with pytest.raises(AssertionError, match="instead of 0x10000000000"):
        check(lowering, recorded)


def test_a_missing_opt_in_is_found() -> None:
    fresh = _kernel(right("matmul"), ptx="// not in jaxlib's cache")
    recorded = launched(lowered("matmul"), fresh)
    check(lowered("matmul"), recorded)
    without = replace(recorded, calls=tuple(call for call in recorded.calls if call["call"] != "opt-in"))
    with pytest.raises(AssertionError):
        check(lowered("matmul"), without)


def test_an_output_that_is_not_in_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lowering, launch = lowered("doubled"), right("doubled")
    apart = launched(lowering, launch, buffers=[1 << 40, 2 << 40])
    with pytest.raises(AssertionError):
        check(lowering, apart)


# --- faults that the driver or jaxlib refuses -------------------------------------------------------------------------


REFUSED: dict[str, tuple[str, Callable[[Launch], Launch], str]] = {
    "other threads": ("softmax", lambda x: _kernel(x, num_warps=2 * x.kernel.num_warps, ptx="// w"), "INVALID_VALUE"),
    "no such function": ("softmax", lambda x: _kernel(x, name="other", ptx="// n"), "NOT_FOUND"),
    "damaged code": ("softmax", lambda x: _kernel(x, cubin=b"\x7fELF" + bytes(60), ptx="// d"), "INVALID_IMAGE"),
    "no programs": ("softmax", lambda x: replace(x, programs=0), "INVALID_VALUE"),
    "a large cluster": ("softmax", lambda x: _kernel(x, num_ctas=16, ptx="// c"), "INVALID_VALUE"),
    "more shared memory than there is": (
        "matmul",
        lambda x: _kernel(x, shared_bytes=240_000),
        "exceeds device resources",
    ),
    "rows of odd bytes": ("matmul", lambda x: _parameters(x, _of(TensorMap, strides=(516, 1))), "divisible by 16"),
    "a long box": ("matmul", lambda x: _parameters(x, _of(TensorMap, block=(512, 64))), "512"),
    "a box wider than its swizzle": ("matmul", lambda x: _parameters(x, _of(TensorMap, swizzle=1)), "INVALID_VALUE"),
    "no such element type": ("matmul", lambda x: _parameters(x, _of(TensorMap, element_type=99)), "99"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_fault_is_refused(fault: str) -> None:
    name, plant, expected = REFUSED[fault]
    recorded = launched(lowered(name), plant(right(name)))
    assert recorded.error is not None and expected in recorded.error
    assert all(call["status"] for call in recorded.of("launch"))


def test_an_address_that_is_not_aligned_is_refused() -> None:
    recorded = launched(lowered("softmax"), right("softmax"), buffers=[(1 << 40) + 8, 2 << 40])
    assert recorded.error is not None and "not divisible by 16" in recorded.error
    recorded = launched(lowered("matmul"), right("matmul"), buffers=[(1 << 40) + 8, 2 << 40, 3 << 40])
    assert recorded.error is not None and "16-byte aligned" in recorded.error


def test_code_of_another_architecture_is_refused() -> None:
    for target, capability, runs in (("cuda:sm_90", 80, False), ("cuda:sm_90", 100, False), ("cuda:sm_80", 86, True)):
        pytest.importorskip("triton", reason="needs triton")
        lowering = lowered("softmax", target)
        recorded = launched(lowering, described(lowering.program, lowering._binary), capability)
        assert (recorded.error is None) == runs, (target, capability)
        if not runs:
            assert "NO_BINARY_FOR_GPU" in str(recorded.error)
