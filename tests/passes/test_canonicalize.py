import pytest

from tests.passes.golden import assert_becomes, func_of
from tilekern.ir.core import Func
from tilekern.passes.canonicalize import canonicalize
from tilekern.passes.dce import dce


def clean(func: Func) -> Func:
    """Canonicalise, then remove unused ops, so that golden texts show the others only."""
    return dce(canonicalize(func))


LOADS = """
    %1 = load %x[0 +: 8] : f32[8]
    %2 = load %n[0 +: 8] : i32[8]
    %3 = load %b[0 +: 8] : bool[8]
"""
STORES = {"f32": "fs", "i32": "is", "bool": "bs"}
SOURCES = {"f32": 1, "i32": 2, "bool": 3}


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(
    ("function", "dtype", "constant", "leaves"),
    [
        ("add", "f32", "-0.0", "either"),
        ("add", "f32", "0.0", "none"),
        ("add", "i32", "0", "either"),
        ("sub", "f32", "0.0", "right"),
        ("sub", "f32", "-0.0", "none"),
        ("sub", "i32", "0", "right"),
        ("mul", "f32", "1.0", "either"),
        ("mul", "i32", "1", "either"),
        ("mul", "i32", "0", "none"),
        ("div", "f32", "1.0", "right"),
        ("div", "i32", "1", "right"),
        ("and", "bool", "true", "either"),
        ("and", "i32", "-1", "either"),
        ("or", "bool", "false", "either"),
        ("or", "i32", "1", "none"),
        ("xor", "i32", "0", "either"),
    ],
)
def test_a_neutral_operand_goes(function: str, dtype: str, constant: str, leaves: str, left: bool) -> None:
    x = SOURCES[dtype]
    operands = f"%4, %{x}" if left else f"%{x}, %4"
    before = f"""{LOADS}
        %4 = constant {constant} : {dtype}[8]
        %5 = {function}({operands}) : {dtype}[8]
        store %5 to %{STORES[dtype]}[0 +: 8]"""
    gone = leaves == "either" or (leaves == "right" and not left)
    after = f"{LOADS} store %{x} to %{STORES[dtype]}[0 +: 8]" if gone else before
    assert str(clean(func_of(before))) == str(dce(func_of(after)))


_TRUE = "%4 = constant true : bool[8] store %4 to %bs[0 +: 8]"
VALUES = {
    "and false": (
        "%4 = constant false : bool[8] %5 = and(%3, %4) : bool[8] store %5 to %bs[0 +: 8]",
        "%4 = constant false : bool[8] store %4 to %bs[0 +: 8]",
    ),
    "or true": (
        "%4 = constant true : bool[8] %5 = or(%4, %3) : bool[8] store %5 to %bs[0 +: 8]",
        "%4 = constant true : bool[8] store %4 to %bs[0 +: 8]",
    ),
    "not not": ("%4 = not(%2) : i32[8] %5 = not(%4) : i32[8] store %5 to %is[0 +: 8]", "store %2 to %is[0 +: 8]"),
    "or not": ("%4 = not(%3) : bool[8] %5 = or(%3, %4) : bool[8] store %5 to %bs[0 +: 8]", _TRUE),
    "not or": ("%4 = not(%3) : bool[8] %5 = or(%4, %3) : bool[8] store %5 to %bs[0 +: 8]", _TRUE),
    "or not of a conjunction with it": (
        """
        %4 = eq(%2, %2) : bool[8]
        %5 = and(%4, %3) : bool[8]
        %6 = and(%5, %4) : bool[8]
        %7 = not(%6) : bool[8]
        %8 = or(%3, %7) : bool[8]
        store %8 to %bs[0 +: 8]""",
        _TRUE,
    ),
    "or not of integers": (
        "%4 = not(%2) : i32[8] %5 = or(%2, %4) : i32[8] store %5 to %is[0 +: 8]",
        "%4 = not(%2) : i32[8] %5 = or(%2, %4) : i32[8] store %5 to %is[0 +: 8]",
    ),
    "select true": (
        "%4 = constant true : bool[8] %5 = neg(%1) : f32[8] %6 = select(%4, %1, %5) : f32[8] store %6 to %fs[0 +: 8]",
        "store %1 to %fs[0 +: 8]",
    ),
    "select false": (
        "%4 = constant false : bool[8] %5 = neg(%1) : f32[8] %6 = select(%4, %5, %1) : f32[8] store %6 to %fs[0 +: 8]",
        "store %1 to %fs[0 +: 8]",
    ),
    "select of one": ("%4 = select(%3, %1, %1) : f32[8] store %4 to %fs[0 +: 8]", "store %1 to %fs[0 +: 8]"),
    "convert": ("%4 = convert(%1) : f32[8] store %4 to %fs[0 +: 8]", "store %1 to %fs[0 +: 8]"),
    "convert to another dtype": (
        "%4 = convert(%2) : f32[8] store %4 to %fs[0 +: 8]",
        "%4 = convert(%2) : f32[8] store %4 to %fs[0 +: 8]",
    ),
    "convert to a wider float and back": (
        "%4 = convert(%1) : f64[8] %5 = convert(%4) : f32[8] store %5 to %fs[0 +: 8]",
        "store %1 to %fs[0 +: 8]",
    ),
    "convert to a narrower float and back": (
        "%4 = convert(%1) : bf16[8] %5 = convert(%4) : f32[8] store %5 to %fs[0 +: 8]",
        "%4 = convert(%1) : bf16[8] %5 = convert(%4) : f32[8] store %5 to %fs[0 +: 8]",
    ),
    "convert to an integer and back": (
        "%4 = convert(%1) : i64[8] %5 = convert(%4) : f32[8] store %5 to %fs[0 +: 8]",
        "%4 = convert(%1) : i64[8] %5 = convert(%4) : f32[8] store %5 to %fs[0 +: 8]",
    ),
    "identity broadcast": (
        "%4 = broadcast(%1) {dims=[0]} : f32[8] store %4 to %fs[0 +: 8]",
        "store %1 to %fs[0 +: 8]",
    ),
    "identity reshape": ("%4 = reshape(%1) : f32[8] store %4 to %fs[0 +: 8]", "store %1 to %fs[0 +: 8]"),
    "identity transpose": (
        "%4 = transpose(%1) {permutation=[0]} : f32[8] store %4 to %fs[0 +: 8]",
        "store %1 to %fs[0 +: 8]",
    ),
    "identity slice": (
        "%4 = slice(%1) {start=[0], stop=[8], stride=[1]} : f32[8] store %4 to %fs[0 +: 8]",
        "store %1 to %fs[0 +: 8]",
    ),
    "slice of one of two": (
        """
        %4 = concatenate(%1, %1) {dim=0} : f32[16]
        %5 = neg(%1) : f32[8]
        %6 = concatenate(%4, %5) {dim=0} : f32[24]
        %7 = slice(%6) {start=[16], stop=[24], stride=[1]} : f32[8]
        store %7 to %fs[0 +: 8]""",
        "%4 = neg(%1) : f32[8] store %4 to %fs[0 +: 8]",
    ),
    "slice of a part of the second": (
        """
        %4 = concatenate(%1, %1) {dim=0} : f32[16]
        %5 = slice(%4) {start=[9], stop=[16], stride=[2]} : f32[4]
        store %5 to %fs[0 +: 4]""",
        "%4 = slice(%1) {start=[1], stop=[8], stride=[2]} : f32[4] store %4 to %fs[0 +: 4]",
    ),
    "slice across two": (
        """
        %4 = concatenate(%1, %1) {dim=0} : f32[16]
        %5 = slice(%4) {start=[4], stop=[12], stride=[1]} : f32[8]
        store %5 to %fs[0 +: 8]""",
        """
        %4 = concatenate(%1, %1) {dim=0} : f32[16]
        %5 = slice(%4) {start=[4], stop=[12], stride=[1]} : f32[8]
        store %5 to %fs[0 +: 8]""",
    ),
    "identity pad": (
        "%4 = constant 0.0 : f32[] %5 = pad(%1, %4) {low=[0], high=[0], interior=[0]} : f32[8]store %5 to %fs[0 +: 8]",
        "store %1 to %fs[0 +: 8]",
    ),
    "pad that moves": (
        "%4 = constant 0.0 : f32[] %5 = pad(%1, %4) {low=[1], high=[-1], interior=[0]} : f32[8]store %5 to %fs[0 +: 8]",
        "%4 = constant 0.0 : f32[] %5 = pad(%1, %4) {low=[1], high=[-1], interior=[0]} : f32[8]store %5 to %fs[0 +: 8]",
    ),
    "broadcast of broadcast": (
        "%4 = broadcast(%1) {dims=[1]} : f32[4, 8] %5 = broadcast(%4) {dims=[0, 2]} : f32[4, 2, 8]"
        '%6 = reduce(%5) {monoid="max", dims=[0, 1]} : f32[8] store %6 to %fs[0 +: 8]',
        "%5 = broadcast(%1) {dims=[2]} : f32[4, 2, 8]"
        '%6 = reduce(%5) {monoid="max", dims=[0, 1]} : f32[8] store %6 to %fs[0 +: 8]',
    ),
    "reshape of reshape": (
        "%4 = reshape(%1) : f32[4, 2] %5 = reshape(%4) : f32[8] store %5 to %fs[0 +: 8]",
        "store %1 to %fs[0 +: 8]",
    ),
    "transpose of transpose": (
        "%4 = load %m[0 +: 2, 0 +: 4] : f32[2, 4] %5 = reshape(%4) : f32[2, 2, 2]"
        "%6 = transpose(%5) {permutation=[1, 2, 0]} : f32[2, 2, 2]"
        "%7 = transpose(%6) {permutation=[1, 0, 2]} : f32[2, 2, 2]"
        "%8 = reshape(%7) : f32[8] store %8 to %fs[0 +: 8]",
        "%4 = load %m[0 +: 2, 0 +: 4] : f32[2, 4] %5 = reshape(%4) : f32[2, 2, 2]"
        "%7 = transpose(%5) {permutation=[2, 1, 0]} : f32[2, 2, 2]"
        "%8 = reshape(%7) : f32[8] store %8 to %fs[0 +: 8]",
    ),
    "broadcast of a splat": (
        "%4 = constant 1.0 : f32[] %5 = broadcast(%4) {dims=[]} : f32[8] store %5 to %fs[0 +: 8]",
        "%5 = constant 1.0 : f32[8] store %5 to %fs[0 +: 8]",
    ),
    "a large splat": (
        "%4 = constant 1.0 : f32[100, 100] %5 = exp(%4) : f32[100, 100]"
        "%6 = slice(%5) {start=[0, 0], stop=[96, 20], stride=[1, 1]} : f32[96, 20] store %6 to %ms[0 +: 96, 0 +: 20]",
        "%4 = constant 2.7182817459106445 : f32[96, 20] store %4 to %ms[0 +: 96, 0 +: 20]",
    ),
    "small constants": (
        "%4 = constant [1, 2, 3, 4] : i32[4] %5 = concatenate(%4, %4) {dim=0} : i32[8] store %5 to %is[0 +: 8]",
        "%4 = constant [1, 2, 3, 4, 1, 2, 3, 4] : i32[8] store %4 to %is[0 +: 8]",
    ),
    "equal elements": (
        "%4 = constant [7, 7] : i32[2] store %4 to %is[0 +: 2]",
        "%4 = constant 7 : i32[2] store %4 to %is[0 +: 2]",
    ),
    "zeros of two signs": (
        "%4 = constant [0.0, -0.0] : f32[2] store %4 to %fs[0 +: 2]",
        "%4 = constant [0.0, -0.0] : f32[2] store %4 to %fs[0 +: 2]",
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    before, after = VALUES[name]
    assert str(clean(func_of(LOADS + before))) == str(dce(func_of(LOADS + after)))


def test_a_large_constant_that_is_no_splat_is_left_alone() -> None:
    func = func_of("""
        %1 = constant [1.0, 2.0] : f32[2]
        %2 = broadcast(%1) {dims=[0]} : f32[2, 4000]
        %3 = reduce(%2) {monoid="max", dims=[1]} : f32[2]
        store %3 to %fs[0 +: 2]""")
    assert canonicalize(func) is func


CONTROL = {
    "switch of constant index": (
        """
        %1 = constant 5 : i32[]
        %2 = switch(%1) do {
          %3 = constant 1.0 : f32[]
          yield %3
        } do {
          %4 = load %x[%i] : f32[]
          yield %4
        } : f32[]
        store %2 to %fs[%i]""",
        "%4 = load %x[%i] : f32[] store %4 to %fs[%i]",
    ),
    "switch of negative index": (
        "%1 = constant -2 : i32[] switch(%1) do { store %1 to %is[0] } do { store %1 to %is[1] } do { }",
        "%1 = constant -2 : i32[] store %1 to %is[0]",
    ),
    "fold over no tile": (
        """
        %1 = constant 8 : i32[]
        %2 = constant 5 : i32[]
        %3 = constant 1.0 : f32[]
        %5 = fold %k in k[100 by 4] from %1 to %2 with %c = %3 do {
          %4 = add(%c, %c) : f32[]
          yield %4
        } : f32[]
        store %5 to %fs[%i]""",
        "%3 = constant 1.0 : f32[] store %3 to %fs[%i]",
    ),
    "fold over one tile stays": (
        """
        %1 = constant 7 : i32[]
        %2 = constant 5 : i32[]
        %3 = constant 1.0 : f32[]
        %5 = fold %k in k[100 by 4] from %2 to %1 with %c = %3 do {
          %4 = add(%c, %c) : f32[]
          yield %4
        } : f32[]
        store %5 to %fs[%i]""",
        """
        %1 = constant 7 : i32[]
        %2 = constant 5 : i32[]
        %3 = constant 1.0 : f32[]
        %5 = fold %k in k[100 by 4] from %2 to %1 with %c = %3 do {
          %4 = add(%c, %c) : f32[]
          yield %4
        } : f32[]
        store %5 to %fs[%i]""",
    ),
    "carries that never change": (
        """
        %1 = constant 0 : i32[]
        %2 = constant 20 : i32[]
        %3 = constant 1.0 : f32[]
        %4 = load %x[%i] : f32[]
        %5.0, %5.1, %5.2 = fold %k in k[20 by 4] from %1 to %2 with %a = %3, %c = %4, %d = %4 do {
          %6 = mul(%c, %a) : f32[]
          %7 = add(%6, %d) : f32[]
          yield %3, %7, %d
        } : f32[], f32[], f32[]
        store %5.0 to %fs[%i]
        store %5.1 to %fs[%i]
        store %5.2 to %fs[%i]""",
        """
        %1 = constant 0 : i32[]
        %2 = constant 20 : i32[]
        %3 = constant 1.0 : f32[]
        %4 = load %x[%i] : f32[]
        %5 = fold %k in k[20 by 4] from %1 to %2 with %c = %4 do {
          %7 = add(%c, %4) : f32[]
          yield %7
        } : f32[]
        store %3 to %fs[%i]
        store %5 to %fs[%i]
        store %4 to %fs[%i]""",
    ),
    "carry of a while": (
        """
        %1 = load %n[%i] : i32[]
        %2 = constant 9 : i32[]
        %3.0, %3.1 = while(%1, %2) do (%a: i32[], %c: i32[]) {
          %4 = lt(%a, %c) : bool[]
          yield %4
        } do (%d: i32[], %e: i32[]) {
          %5 = add(%d, %e) : i32[]
          yield %5, %e
        } : i32[], i32[]
        store %3.0 to %is[%i]
        store %3.1 to %is[%i]""",
        """
        %1 = load %n[%i] : i32[]
        %2 = constant 9 : i32[]
        %3 = while(%1) do (%a: i32[]) {
          %4 = lt(%a, %2) : bool[]
          yield %4
        } do (%d: i32[]) {
          %5 = add(%d, %2) : i32[]
          yield %5
        } : i32[]
        store %3 to %is[%i]
        store %2 to %is[%i]""",
    ),
}


@pytest.mark.parametrize("name", CONTROL)
def test_control(name: str) -> None:
    assert_becomes(clean, *CONTROL[name])
