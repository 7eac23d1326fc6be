"""Programs that a backend once got wrong, found by the random ones."""

import jax
import numpy as np
import pytest

from tests.programs import inputs_of
from tilekern.ir.interpret import interpret
from tilekern.ir.parse import parse
from tilekern.lower.xla.emit import run

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
}


@pytest.mark.parametrize("text", PROGRAMS.values(), ids=PROGRAMS)
def test_the_backend_agrees_with_the_interpreter(text: str) -> None:
    func = parse(text)
    inputs = inputs_of(func, seed=0)
    with jax.enable_x64(True):
        found = jax.device_get(jax.jit(lambda *arrays: run(func, *arrays))(*inputs))
    for output, expected in zip(found, interpret(func, *inputs), strict=True):
        np.testing.assert_array_equal(output, expected, strict=True)
