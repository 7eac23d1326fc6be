"""Sorting networks: their results in Triton's interpreter, and their machine code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tests.lower.triton.legalize.meaning as meaning
from tests.lower.triton.running import assert_runs, program_of
from tilekern.ir.core import Array, Func
from tilekern.ir.ordering import Sort, TopK
from tilekern.ir.types import DTYPES, kind_of
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.compile.compile_program import compile_program
from tilekern.lower.triton.compile.resources import measure

pytest.importorskip("triton", reason="needs triton")


def line(name: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Few different elements, among them extremes, zeros of both signs and NaN."""
    dtype = DTYPES[name]
    if kind_of(dtype) == "float":
        few = np.array([0.0, -0.0, np.nan, -np.inf, 1, -1.5, 2, -448])
    else:
        limits = np.iinfo(dtype) if kind_of(dtype) != "bool" else np.iinfo(np.uint8)
        few = np.array([limits.min, limits.max, 0, 1, limits.max - 1])
    return np.random.default_rng(seed).choice(few.astype(dtype), shape)


def several(names: str, shape: tuple[int, ...]) -> list[Array]:
    return [line(name, shape, seed) for seed, name in enumerate(names.split())]


# Layouts of keys and places in words: 16 + 16 bits in one of 32, 32 + 16 in one of 64, ...
KEYS = ("bf16", "f16", "f8e5m2", "u8", "bool", "i32", "f64", "u16 i8", "f32 u32", "i16 f32 u64 i8", "u64 i64")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("names", KEYS)
def test_sorts_find_places(names: str) -> None:
    """The sort picks the last operand, which is no key."""
    keys = several(names, (3, 12))
    func, arrays = meaning.one(Sort, *keys, line("i32", (3, 12)), dim=1, num_keys=len(keys), pick=len(keys))
    assert_runs(func, *arrays)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", DTYPES)
def test_sorts_of_elements(name: str) -> None:
    func, arrays = meaning.one(Sort, line(name, (6, 4)), dim=0)
    assert_runs(func, *arrays)


@pytest.mark.parametrize(("name", "k"), [("bf16", 1), ("f32", 3), ("u8", 8), ("f64", 5), ("u64", 16), ("bool", 11)])
def test_the_greatest_elements(name: str, k: int) -> None:
    func, arrays = meaning.one(TopK, line(name, (2, 16)), dim=1, k=k)
    assert_runs(func, *arrays)


@pytest.mark.parametrize(("op", "attributes"), [(Sort, {}), (TopK, {"k": 1})])
def test_lines_of_one_element(op: Any, attributes: dict[str, int]) -> None:
    func, arrays = meaning.one(op, line("f32", (5, 1)), dim=1, **attributes)
    program = assert_runs(func, *arrays)
    assert "sort" not in program.text and "least" not in program.text


def test_more_lanes_than_16_bits_count() -> None:
    x = np.arange(1 << 17, dtype=np.int32)[None, ::-1] // 2
    func, arrays = meaning.one(TopK, x, dim=1, k=2)
    assert_runs(func, *arrays)


# --- what the compiler makes of them ---------------------------------------------------------------------------------


def wide(kind: Any, names: str, **attributes: int) -> Func:
    return meaning.one(kind, *several(names, (8, 1024)), dim=1, **attributes)[0]


@pytest.mark.parametrize("func", [wide(Sort, "f32 i32", pick=1), wide(TopK, "f32", k=8)], ids=["sort", "top_k"])
@pytest.mark.parametrize("chip", [pytest.param("cuda:sm_80", marks=pytest.mark.slow), "cuda:sm_90", "cuda:sm_100"])
@pytest.mark.slow
def test_wide_lines_stay_in_registers(func: Func, chip: str) -> None:
    """The code of each of the ten distances is there once; an unrolled network takes minutes to compile, and spills."""
    binary = compile_program(program_of(func, chip), CHIPS[chip])
    assert measure(binary, CHIPS[chip]).spills == 0
    assert binary.text("ptx").count("shfl.sync") < 10 * 8 * 1024 // 32
