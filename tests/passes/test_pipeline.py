from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.funcs import EXAMPLES
from tests.passes.strategies import assert_same_meaning, funcs
from tilekern.errors import TargetError, VerifyError
from tilekern.ir.core import Func
from tilekern.ir.memory import Load
from tilekern.ir.parse import parse
from tilekern.ir.text import to_text
from tilekern.ir.verify import verify
from tilekern.passes.cse import cse
from tilekern.passes.pipeline import IMPROVE, Rounds, run, verified


@pytest.mark.parametrize("improve", [*IMPROVE.passes, run])
@given(func=funcs(), seed=st.integers(0, 1000))
def test_the_meaning_stays_bit_for_bit(improve, func: Func, seed: int) -> None:
    verify(func)
    assert_same_meaning(func, improve(func), seed)


@pytest.mark.parametrize("improve", [*IMPROVE.passes, run])
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


def lose_the_load(func: Func) -> Func:
    ops = tuple(op for op in func.body.ops if not isinstance(op, Load))
    return func if ops == func.body.ops else replace(func, body=replace(func.body, ops=ops))


BROKEN = "store uses %a: f32\\[8\\], which is not defined there"


@pytest.mark.parametrize("passes", [(lose_the_load,), (Rounds((lose_the_load,)),)])
def test_a_broken_pass_is_named_when_checked(passes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEKERN_DEBUG", "")
    run(parse(TEXT), passes)
    with pytest.raises(VerifyError, match=BROKEN) as caught:
        run(parse(TEXT), passes, check=True)
    assert caught.value.__notes__ == ["in the pass lose_the_load, on f; TILEKERN_DEBUG=ir prints the Func before it"]
    monkeypatch.setenv("TILEKERN_DEBUG", "verify")
    with pytest.raises(VerifyError, match=BROKEN):
        run(parse(TEXT), passes)


def test_the_last_pass_of_a_target_verifies_what_the_others_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEKERN_DEBUG", "")
    with pytest.raises(VerifyError, match=BROKEN):
        run(parse(TEXT), (lose_the_load, verified))


def test_a_bug_of_a_pass_is_named_and_a_refusal_is_not() -> None:
    def fail(func: Func, error: Exception) -> Func:
        raise error

    with pytest.raises(AssertionError) as bug:
        run(parse(TEXT), (partial(fail, error=AssertionError("impossible")),))
    assert bug.value.__notes__ == ["in the pass fail, on f; TILEKERN_DEBUG=ir prints the Func before it"]
    with pytest.raises(TargetError) as refusal:
        run(parse(TEXT), (partial(fail, error=TargetError("no such op")),))
    assert not hasattr(refusal.value, "__notes__")


def test_rounds_come_to_an_end() -> None:
    def rename(func: Func) -> Func:
        return replace(func, name=f"{func.name}_")

    with pytest.raises(AssertionError, match="16 rounds of rename, cse change it"):
        run(parse(TEXT), (Rounds((rename, cse)),))
