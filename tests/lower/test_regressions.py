"""Programs that a backend once got wrong, found by the random ones."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from tests.ir.funcs import assert_near
from tilekern.ir.core import Func
from tilekern.ir.interpret import interpret
from tilekern.ir.parse import parse
from tilekern.ir.types import kind_of
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.xla.emit.emit_xla import run
from tilekern.testing.programs import inputs_of

# What was wrong, and the program.
PROGRAMS = {
    "a constant was cast to an integer without saturation": """
func @f(%o: ref<u8[], out>, %p: ref<i8[], out>, %q: ref<i32[], out>) {
  %0 = constant -4.0 : f64[]
  %1 = constant 300.0 : f32[]
  %2 = constant nan : bf16[]
  %3 = convert(%0) : u8[]
  %4 = convert(%1) : i8[]
  %5 = convert(%2) : i32[]
  store %3 to %o[]
  store %4 to %p[]
  store %5 to %q[]
}""",
    "a dot of wide or unsigned integers was rejected": """
func @f(%x: ref<i64[4], in>, %y: ref<u64[4], in>, %z: ref<u8[4], in>, %o: ref<i32[3], out>) {
  %0 = load %x[0 +: 4] : i64[4]
  %1 = load %y[0 +: 4] : u64[4]
  %2 = load %z[0 +: 4] : u8[4]
  %3 = dot(%0, %0) {contract=[[0], [0]]} : i32[]
  %4 = dot(%1, %1) {contract=[[0], [0]]} : i32[]
  %5 = dot(%2, %2) {contract=[[0], [0]]} : i32[]
  store %3 to %o[0]
  store %4 to %o[1]
  store %5 to %o[2]
}""",
    "a grid index as the fill of a load over the edge had 64 bits": """
func @f(%x: ref<i32[3], in>, %o: ref<i32[1, 4], out>) {
  grid %i in i[1 by 1]
  %0 = load %x[0 +: 4] fill %i : i32[4]
  store %0 to %o[%i, 0 +: 4]
}""",
    "a position of stride 0 was divided by that": """
func @f(%x: ref<f32[2], in>, %o: ref<f32[2, 1], out>) {
  grid %i in i[2 by 1]
  %0 = load %x[0*%i +: 1] : f32[1]
  store %0 to %o[%i, 0 +: 1!]
}""",
    "memory of the positions of a store was used for another tile": """
func @f(%x: ref<i32[12, 3, 5], in>, %y: ref<f32[1, 1, 2], in>, %o: ref<f32[5, 1, 1, 2], out>, %p: ref<i32[2, 5], out>) {
  grid %i in i[5 by 5 descending], %j in j[2 by 1]
  %4 = constant [0, 0, 1, 0, 0] : i32[5]
  %5 = load %y[gather(%4, 5), 5*%i!, %i + 1!] : f32[5]
  %8 = constant 0.0 : f32[5]
  %9 = eq(%5, %8) : bool[5]
  %10 = select(%9, %8, %5) : f32[5]
  %11 = bitcast(%10) : i32[5]
  %12 = constant 31 : i32[5]
  %13 = shift_right_arithmetic(%11, %12) : i32[5]
  %14 = constant 2147483647 : i32[5]
  %15 = and(%13, %14) : i32[5]
  %16 = xor(%11, %15) : i32[5]
  %17 = ne(%5, %5) : bool[5]
  %18 = select(%17, %14, %16) : i32[5]
  %19 = iota() {dim=0} : i32[5]
  %20 = sort(%18, %19) {dim=0, pick=1} : i32[5]
  %21 = take(%5, %20) {dim=0, along=true} : f32[5]
  %22 = constant 0 : i32[1]
  %24 = convert(%5) : bool[5]
  %25 = reshape(%24) : bool[1, 5]
  %26 = load %x[gather(2*%22 + 3, 1)!, %j +: 5, 5*%i + 1!] mask %25 : i32[1, 5]
  %27 = broadcast(%19) {dims=[1]} : i32[1, 5]
  %28 = sort(%26, %27) {dim=1, pick=1} : i32[1, 5]
  %29 = take(%26, %28) {dim=1, along=true} : i32[1, 5]
  %30 = constant -8.0 : f32[5]
  %31 = max(%21, %30) : f32[5]
  %32 = constant 8.0 : f32[5]
  %33 = min(%31, %32) : f32[5]
  %34 = sin(%33) : f32[5]
  store %34 to %o[0 +: 5!, %i!, 0!, %j!]
  store %29 to %p[%j +: 1!, gather(5*%i - %19 + 4, 5)!] mask %25
  %35 = not(%25) : bool[1, 5]
  store %26 to %p[%j +: 1!, gather(5*%i - %19 + 4, 5)!] mask %35
}""",
    "the mask of a store was read after the next one had taken its place": """
func @f(%x: ref<i32[8], in>, %m: ref<bool[8], in>, %o: ref<i32[8], zeros>) {
  %0 = load %x[0 +: 8] : i32[8]
  %1 = load %m[0 +: 8] : bool[8]
  %2 = constant 0 : i32[]
  %3 = constant 2 : i32[]
  %4 = fold %k0 in k0[2 by 1] from %2 to %3 with %c = %1 do {
    store %0 to %o[0 +: 8!] mask %c
    %5 = constant false : bool[8]
    yield %5
  } : bool[8]
}""",
    "a sort that picks other integers than positions picked positions": """
func @f(%x: ref<i32[4], in>, %y: ref<i32[4], in>, %o: ref<i32[4], out>) {
  %0 = load %x[0 +: 4] : i32[4]
  %1 = load %y[0 +: 4] : i32[4]
  %2 = sort(%0, %1) {dim=0, pick=1} : i32[4]
  store %2 to %o[0 +: 4]
}""",
    "an 8-bit float was cast as if the CPU had a cast": """
func @f(%x: ref<f8e4m3fn[3], in>, %o: ref<f8e4m3fn[3], out>, %p: ref<i32[], out>) {
  %0 = load %x[0 +: 3] : f8e4m3fn[3]
  %1 = scan(%0) {monoid="max", dim=0} : f8e4m3fn[3]
  store %1 to %o[0 +: 3]
  %2 = arg_reduce(%0) {extreme="max", dim=0} : i32[]
  store %2 to %p[]
}""",
    "a sort of nothing took elements of it": """
func @f(%x: ref<f32[3, 0], in>, %o: ref<f32[3, 0], out>) {
  %0 = load %x[0 +: 3, 0 +: 0] : f32[3, 0]
  %1 = sort(%0) {dim=1} : f32[3, 0]
  store %1 to %o[0 +: 3, 0 +: 0]
}""",
    "a sign on its way to float16 was rounded by a function that does not exist": """
func @f(%x: ref<f16[3], in>, %o: ref<f16[3], out>) {
  %0 = load %x[0 +: 3] : f16[3]
  %1 = asinh(%0) : f16[3]
  store %1 to %o[0 +: 3]
}""",
    "a few products of bools were added up by an instruction that LLVM cannot select": """
func @f(%x: ref<bool[2, 4], in>, %y: ref<bool[2, 4], in>, %o: ref<i32[2, 2], out>) {
  %0 = load %x[0 +: 2, 0 +: 4] : bool[2, 4]
  %1 = load %y[0 +: 2, 0 +: 4] : bool[2, 4]
  %2 = dot(%0, %1) {contract=[[1], [1]]} : i32[2, 2]
  store %2 to %o[0 +: 2, 0 +: 2]
}""",
    "loops over the first column of a tile computed the tile": """
func @f(%x: ref<f32[4, 32], in>, %o: ref<f32[4, 32], out>) {
  %0 = load %x[0 +: 4, 0 +: 32] : f32[4, 32]
  %1 = sqrt(%0) : f32[4, 32]
  %2 = slice(%1) {start=[0, 0], stop=[4, 1], stride=[1, 1]} : f32[4, 1]
  %3 = broadcast(%2) {dims=[0, 1]} : f32[4, 32]
  %4 = sub(%1, %3) : f32[4, 32]
  store %4 to %o[0 +: 4, 0 +: 32]
}""",
    "a tile was computed over a longer one of narrower elements, which were still read": """
func @f(%x: ref<f64[2, 32], in>, %o: ref<f64[2, 32], out>) {
  %0 = load %x[0 +: 2, 0 +: 32] : f64[2, 32]
  %1 = iota() {dim=1} : i32[2, 32]
  %2 = sort(%0, %1) {dim=1, pick=1} : i32[2, 32]
  %3 = convert(%2) : f64[2, 32]
  %4 = sqrt(%3) : f64[2, 32]
  %5 = slice(%4) {start=[0, 0], stop=[2, 16], stride=[1, 1]} : f64[2, 16]
  %6 = broadcast(%5) {dims=[0, 1]} : f64[2, 16, 2]
  %7 = reshape(%6) : f64[2, 32]
  store %7 to %o[0 +: 2, 0 +: 32]
}""",
}


def by_llvm(func: Func, *arrays: Any) -> Any:
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    return LlvmLowering(func).run(*arrays)


@pytest.mark.parametrize("backend", [run, by_llvm], ids=["xla", "llvm"])
@pytest.mark.parametrize("text", PROGRAMS.values(), ids=PROGRAMS)
def test_the_backend_agrees_with_the_interpreter(text: str, backend: Callable[..., Any]) -> None:
    func = parse(text)
    inputs = inputs_of(func, seed=0)
    with jax.enable_x64(True):
        found = jax.device_get(jax.jit(lambda *arrays: backend(func, *arrays))(*inputs))
    for output, expected in zip(found, interpret(func, *inputs), strict=True):
        if kind_of(expected.dtype) == "float":
            assert_near(output, expected.astype(np.float64))
        else:
            np.testing.assert_array_equal(output, expected, strict=True)
