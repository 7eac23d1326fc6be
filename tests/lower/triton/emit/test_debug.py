"""Prints and assertions: in Triton's interpreter, as source, and in machine code."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.lower.triton.running import program_of
from tilekern.errors import DeviceAssertionError
from tilekern.ir.parse import parse
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.compile.compile_program import compile_program
from tilekern.lower.triton.interpret import interpret as run

pytest.importorskip("triton", reason="needs triton")

X = np.arange(1, 11, dtype=np.float32)

PRINTS = """
func @f(%x: ref<f32[6], in>, %o: ref<f32[6], out>) {
  grid %i in i[6 by 3]
  %a = load %x[3*%i +: 3!] : f32[3]
  %s = reduce(%a) {monoid="sum", dims=[0]} : f32[]
  %b = lt(%s, %s) : bool[]
  %c = convert(%a) : f8e5m2[3]
  %h = convert(%s) : bf16[]
  print(%i, %s, %a) {format="tile {} sums to {:.1f}, 100% of\\n{}."}
  print(%b, %c, %h) {format="{2} {0}{0} {1}"}
  print() {format="{{no value}}"}
  store %a to %o[3*%i +: 3!]
}"""


def test_prints_in_the_users_format(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the lane by which Triton's tile is padded."""
    run(program_of(parse(PRINTS)), [X[:6]])
    assert capsys.readouterr().out == (
        "tile 0 sums to 6.0, 100% of\n[1. 2. 3.].\n6.0 FalseFalse [1. 2. 3.]\n{no value}\n"
        "tile 1 sums to 15.0, 100% of\n[4. 5. 6.].\n15.0 FalseFalse [4. 5. 6.]\n{no value}\n"
    )


def test_a_gpu_prints_each_value_behind_the_text_in_front_of_it() -> None:
    lines = [line.strip() for line in program_of(parse(PRINTS)).text.splitlines() if "device_print" in line]
    assert [line.partition(",")[0] for line in lines] == [
        'tl.device_print("tile"',
        'tl.device_print("sums to"',
        'tl.device_print("100%% of\\\\n"',
        'tl.device_print(" "',
        'tl.device_print(" "',
        'tl.device_print(" "',
        'tl.device_print(" "',
        'tl.device_print("{no value}")',
    ]
    assert [line.endswith(".to(tl.float32))") for line in lines] == [False] * 6 + [True, False]


@pytest.mark.parametrize("debug", [True, False])
def test_prints_and_assertions_are_in_the_machine_code(debug: bool) -> None:
    func = ASSERTS if debug else re.sub(r"\n  assert.*|\n  print.*", "", ASSERTS)
    ptx = compile_program(program_of(parse(func)), CHIPS["cuda:sm_90"]).text("ptx")
    assert ("vprintf" in ptx) == ("__assertfail" in ptx) == debug


ASSERTS = r"""
func @f(%x: ref<f32[5], in>, %o: ref<f32[5], out>) {
  %a = load %x[0 +: 5!] : f32[5]
  %b = constant 9.0 : f32[5]
  %c = lt(%a, %b) : bool[5]
  print(%a) {format="{}"}
  assert(%c) {message="a \"small\" number,\n%s große"}
  store %a to %o[0 +: 5!]
}"""


def test_assertions_have_the_users_message() -> None:
    program = program_of(parse(ASSERTS))
    run(program, [X[:5]])
    with pytest.raises(DeviceAssertionError) as caught:
        run(program, [X[5:10]])
    assert caught.value.summary == 'a "small" number,\n%s große'
