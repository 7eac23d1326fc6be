"""Features that no GPU has: an error at the user's line says what there is instead."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ir.funcs import FILE, Source, access_of, func, ref, tile, whole
from tests.lower.triton.legalize.meaning import SM_80, SM_90
from tilekern.errors import TargetError
from tilekern.ir.compute import Dot
from tilekern.ir.core import Axis, Func, Value
from tilekern.ir.memory import ATOMICS, Atomic
from tilekern.ir.types import BF16, DTYPES, F16, F32, I32, DType, kind_of
from tilekern.lower.triton.chip import CHIPS, Chip
from tilekern.lower.triton.legalize import legalize
from tilekern.lower.triton.legalize.refuse import LARGEST_GRID

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program


def copy(dtype: DType, size: int = 8, extent: int = 8) -> Func:
    """out[i] = x[i]: the load is at line 1, the store at line 2."""
    x, out = ref("x", (extent,), dtype=dtype), ref("out", (extent,), "out", dtype)

    def body(b: Source, i: Value) -> None:
        b.store(out, b.load(x, tile(i, size)), tile(i, size))

    return func("copy", (x, out), (Axis("i", extent, size),), body)


def update(kind: Any, dtype: DType, role: str = "zeros") -> Func:
    """The update is at line 2."""
    x, out = ref("x", (8,), dtype=dtype), ref("total", (8,), role, dtype)

    def body(b: Source) -> None:
        access, positions = access_of((whole(8),))
        value = b.load(x, whole(8))
        b.add(Atomic(operands=(out, value, *positions), access=access, kind=kind, loc=b.loc()))

    return func("update", (x, out), (), body)


def refused(made: Func, chip: Chip, line: int, *parts: str) -> None:
    with pytest.raises(TargetError) as caught:
        legalize(made, chip)
    error = caught.value
    assert error.expected and error.got and error.fix
    assert (error.loc.file, error.loc.line) == (FILE, line)
    for part in parts:
        assert part in str(error)


def test_dtypes_of_newer_chips() -> None:
    refused(copy(DTYPES["f8e4m3fn"]), SM_80, 1, "cuda:sm_80 has no f8e4m3fn", "sm_89 or newer", 'target="cpu:xla"')
    legalize(copy(DTYPES["f8e4m3fn"]), SM_90)
    for dtype in DTYPES.values():
        if dtype != DTYPES["f8e4m3fn"]:
            legalize(copy(dtype), SM_80)


# What PTX's `atom` and `red` have, by kind; bfloat16 from sm_90 on.
INTEGERS = {"i32", "u32", "i64", "u64"}
AVAILABLE = {
    "add": INTEGERS | {"f16", "bf16", "f32", "f64"},
    "max": INTEGERS | {"f32", "f64"},
    "min": INTEGERS | {"f32", "f64"},
    **dict.fromkeys(("and", "or", "xor"), INTEGERS),
}


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("kind", AVAILABLE)
def test_atomics(kind: str, chip: Chip) -> None:
    for name, dtype in DTYPES.items():
        if kind not in ATOMICS[kind_of(dtype)]:
            continue
        made = update(kind, dtype)
        if name not in AVAILABLE[kind] or (dtype == BF16 and not chip.bf16_atomics):
            refused(made, chip, 1 if name == "f8e4m3fn" and not chip.float8 else 2, f"{chip.name} has no")
        else:
            legalize(made, chip)


def test_sums_need_no_atomics() -> None:
    for dtype in (BF16, F16, DTYPES["i8"], DTYPES["f8e5m2"]):
        legalize(update("add", dtype, "sum"), SM_80)


def test_grids_larger_than_the_hardware_counts() -> None:
    legalize(copy(F32, 1, LARGEST_GRID), SM_90)
    refused(copy(F32, 1, LARGEST_GRID + 1), SM_90, 1000, "the grid of copy is too large", "2147483648 programs")


@pytest.mark.parametrize("size", [(1 << 20) + 1, 1 << 21])
def test_tiles_larger_than_triton_takes(size: int) -> None:
    legalize(copy(F32, 1 << 20, 1 << 22), SM_90)
    refused(copy(F32, size, 1 << 22), SM_90, 1, "a tile is too large", "f32[2097152] in load")


def test_integer_dots_multiply_all_pairs_at_once() -> None:
    x, out = ref("x", (256, 256), dtype=I32), ref("out", (256, 256), "out", I32)

    def body(b: Source) -> None:
        a = b.load(x, whole(256), whole(256))
        b.store(out, b.op(Dot, a, a, contract=((1,), (0,))), whole(256), whole(256))

    refused(func("dot", (x, out), (), body), SM_90, 2, "a tile is too large", "integer dots")
