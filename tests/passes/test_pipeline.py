from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.funcs import EXAMPLES, assert_same
from tests.passes.strategies import arrays_for, funcs
from tilekern.errors import VerifyError
from tilekern.ir.core import Func
from tilekern.ir.interpret import interpret
from tilekern.ir.memory import Load
from tilekern.ir.parse import parse
from tilekern.ir.text import to_text
from tilekern.ir.verify import verify
from tilekern.passes import pipeline
from tilekern.passes.pipeline import PIPELINE, run


def assert_same_meaning(before: Func, after: Func, seed: int) -> None:
    verify(after)
    arrays = arrays_for(before, seed)
    for expected, found in zip(interpret(before, *arrays), interpret(after, *arrays), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("improve", [*PIPELINE, run])
@given(func=funcs(), seed=st.integers(0, 1000))
def test_the_meaning_stays_bit_for_bit(improve, func: Func, seed: int) -> None:
    verify(func)
    assert_same_meaning(func, improve(func), seed)


@pytest.mark.parametrize("improve", [*PIPELINE, run])
@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_the_meaning_of_an_example_stays(example: Callable[[], Func], improve) -> None:
    assert_same_meaning(example(), improve(example()), seed=0)


@given(func=funcs())
def test_running_again_changes_nothing(func: Func) -> None:
    once = run(func, check=True)
    assert run(once) is once
    # What the text does not show, the numbers of an access's operands, must make no difference either.
    assert to_text(run(parse(to_text(once)))) == to_text(once)


TEXT = """func @f(%x: ref<f32[96], in>, %out: ref<f32[96], out>) {
  grid %i in i[96 by 8]
  %block = constant 8 : i32[]
  %start = mul(%i, %block) : i32[]
  %lanes = iota() {dim=0} : i32[8]
  %base = broadcast(%start) {dims=[]} : i32[8]
  %at = add(%base, %lanes) : i32[8]
  %extent = constant 96 : i32[8]
  %inside = lt(%at, %extent) : bool[8]
  %a = load %x[gather(%at, 8)] mask %inside : f32[8]
  store %a to %out[%start +: 8] mask %inside
}
"""
IMPROVED = """func @f(%x: ref<f32[96], in>, %out: ref<f32[96], out>) {
  grid %i in i[96 by 8]
  %a = load %x[8*%i +: 8!] : f32[8]
  store %a to %out[8*%i +: 8!]
}
"""


def test_the_passes_work_together() -> None:
    assert to_text(run(parse(TEXT))) == IMPROVED


def test_debugging_prints_what_each_pass_changes(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("TILEKERN_DEBUG", "ir")
    run(parse(TEXT))
    printed = capsys.readouterr().err
    assert printed.startswith("--- canonicalize\nfunc @f(")
    assert printed.endswith(IMPROVED + "\n")
    monkeypatch.setenv("TILEKERN_DEBUG", "")
    run(parse(TEXT))
    assert not capsys.readouterr().err


@pytest.mark.parametrize("check", [False, True])
def test_a_broken_pass_is_found_when_checked(monkeypatch: pytest.MonkeyPatch, check: bool) -> None:
    def lose_the_load(func: Func) -> Func:
        ops = tuple(op for op in func.body.ops if not isinstance(op, Load))
        return func if ops == func.body.ops else replace(func, body=replace(func.body, ops=ops))

    monkeypatch.setattr(pipeline, "PIPELINE", (lose_the_load,))
    if not check:
        run(parse(TEXT), check=False)
        return
    with pytest.raises(VerifyError, match="store uses %a: f32\\[8\\], which is not defined there"):
        run(parse(TEXT), check=True)
