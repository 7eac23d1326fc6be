"""The elements that programs touch, where the grid alone decides it."""

from __future__ import annotations

import numpy as np

from tilekern.ir.core import Func
from tilekern.ir.memory import Load, Store
from tilekern.ir.parse import parse
from tilekern.lang.grid_accesses import Accesses

LOOPS = """
func @f(%x: ref<i32[12], in>, %d: ref<i32[12], inout>) {
  grid %i in i[3 by 1], %j in j[5 by 1]
  %zero = constant 0 : i32[]
  %stop = mul(%i, %i) : i32[]
  %0 = fold %n in n[12 by 2] from %zero to %stop with %c = %zero do {
    %1 = load %d[2*%n +: 2] : i32[2]
    store %1 to %d[11 - %n]
    yield %c
  } : i32[]
  %data = load %x[0] : i32[]
  %2 = fold %m in m[12 by 1] from %zero to %data with %c = %zero do {
    %3 = load %d[%m] : i32[]
    store %3 to %d[%m]
    yield %c
  } : i32[]
}"""


def _elements(func: Func, most: int = 100) -> list[list[list[int]]]:
    """For each program the elements of each access to an array that programs write."""
    accesses = [op for op in func.walk() if isinstance(op, (Load, Store)) and op.ref.name == "d"]
    programs = Accesses(func, accesses).of_programs(most)
    return [[np.ravel(touched[op]).tolist() for op in accesses] for touched in programs]


def test_loops_whose_bounds_the_grid_decides_run() -> None:
    """Programs differ in i alone, since no access depends on j; a loop up to data is left out."""
    func = parse(LOOPS.replace("store %1 to %d[11 - %n]", "store %1 to %d[-2*%n + 10 +: 2]"))
    assert _elements(func) == [
        [[], [], [], []],
        [[0, 1], [10, 11], [], []],
        [[0, 1, 2, 3], [10, 11, 8, 9], [], []],
    ]


def test_a_switch_runs_the_region_of_the_program() -> None:
    func = parse("""
func @f(%d: ref<i32[12], inout>) {
  grid %i in i[4 by 1]
  %one = constant 1 : i32[]
  switch(%i) do {
    store %one to %d[%i]
  } do {
    store %one to %d[%i + 4]
  } do {
    store %one to %d[%i + 8]
  }
}""")
    assert _elements(func) == [[[0], [], []], [[], [5], []], [[], [], [10]], [[], [], [11]]]


def test_of_many_programs_the_first_and_the_last_run() -> None:
    func = parse("""
func @f(%d: ref<i32[900], inout>) {
  grid %i in i[900 by 1]
  %0 = load %d[%i] : i32[]
}""")
    assert _elements(func, most=6) == [[[n]] for n in (0, 1, 2, 897, 898, 899)]


def test_a_loop_of_one_program_ends_early() -> None:
    func = parse("""
func @f(%d: ref<i32[100000], inout>) {
  grid %i in i[2 by 1]
  %zero = constant 0 : i32[]
  %stop = constant 100000 : i32[]
  %0 = fold %n in n[100000 by 1] from %zero to %stop with %c = %zero do {
    %1 = load %d[%n] : i32[]
    yield %c
  } : i32[]
}""")
    ((touched,),) = _elements(func)
    assert touched == list(range(len(touched))) and 100 < len(touched) < 10000
