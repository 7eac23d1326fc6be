import pytest

from tests.passes.golden import assert_becomes
from tilekern.ir.core import Func
from tilekern.passes.canonicalize import canonicalize
from tilekern.passes.dce import dce


def clean(func: Func) -> Func:
    return dce(canonicalize(func))


CASES = {
    "affine": (
        """
        %1 = load %n[%j] : i32[]
        %2 = constant 4 : i32[]
        %3 = mul(%2, %i) : i32[]
        %4 = neg(%1) : i32[]
        %5 = sub(%4, %j) : i32[]
        %6 = constant 3 : i32[]
        %7 = sub(%5, %6) : i32[]
        %8 = add(%7, %3) : i32[]
        %9 = load %x[2*%8 + 10 +: 8] : f32[8]
        store %9 to %fs[%3 + %3 +: 8]""",
        """
        %1 = load %n[%j] : i32[]
        %9 = load %x[8*%i - 2*%j - 2*%1 + 4 +: 8] : f32[8]
        store %9 to %fs[8*%i +: 8]""",
    ),
    "what cancels goes, what is no sum stays": (
        """
        %1 = load %n[%j] : i32[]
        %2 = sub(%1, %i) : i32[]
        %3 = add(%2, %i) : i32[]
        %4 = mul(%1, %i) : i32[]
        %5 = sub(%i, %i) : i32[]
        %6 = load %m[-%3 + %1 + %4, %5] : f32[]
        store %6 to %fs[%i]""",
        """
        %1 = load %n[%j] : i32[]
        %4 = mul(%1, %i) : i32[]
        %6 = load %m[%4, 0] : f32[]
        store %6 to %fs[%i]""",
    ),
    "operands in the order of the grid, then of appearance": (
        """
        %1 = load %n[%j] : i32[]
        %2 = load %n[%i] : i32[]
        %3 = load %m[%2 + %1 + %j, %1 + %i] : f32[]
        store %3 to %fs[%i]""",
        """
        %1 = load %n[%j] : i32[]
        %2 = load %n[%i] : i32[]
        %3 = load %m[%j + %2 + %1, %i + %1] : f32[]
        store %3 to %fs[%i]""",
    ),
    "gather": (
        """
        %1 = load %n[8*%i +: 8] : i32[8]
        %2 = broadcast(%i) {dims=[]} : i32[8]
        %3 = constant 3 : i32[8]
        %4 = mul(%1, %3) : i32[8]
        %5 = add(%2, %4) : i32[8]
        %6 = sub(%5, %3) : i32[8]
        %7 = load %x[gather(%6, 8)] : f32[8]
        store %7 to %fs[8*%i +: 8]""",
        """
        %1 = load %n[8*%i +: 8] : i32[8]
        %7 = load %x[gather(%i + 3*%1 - 3, 8)] : f32[8]
        store %7 to %fs[8*%i +: 8]""",
    ),
    "gather by a sum of vectors": (
        """
        %1 = load %n[8*%i +: 8] : i32[8]
        %2 = load %n[8*%j +: 8] : i32[8]
        %3 = add(%1, %2) : i32[8]
        %4 = broadcast(%i) {dims=[]} : i32[8]
        %5 = add(%3, %4) : i32[8]
        %7 = load %x[gather(%5, 8)] : f32[8]
        store %7 to %fs[8*%i +: 8]""",
        """
        %1 = load %n[8*%i +: 8] : i32[8]
        %2 = load %n[8*%j +: 8] : i32[8]
        %3 = add(%1, %2) : i32[8]
        %7 = load %x[gather(%i + %3, 8)] : f32[8]
        store %7 to %fs[8*%i +: 8]""",
    ),
    "gather of equal lanes": (
        """
        %2 = broadcast(%i) {dims=[]} : i32[8]
        %7 = load %x[gather(%2, 8)] : f32[8]
        store %7 to %fs[8*%i +: 8]""",
        """
        %2 = broadcast(%i) {dims=[]} : i32[8]
        %7 = load %x[gather(%2, 8)] : f32[8]
        store %7 to %fs[8*%i +: 8]""",
    ),
    "gather along an iota": (
        """
        %1 = iota() {dim=0} : i32[8]
        %2 = broadcast(%i) {dims=[]} : i32[8]
        %3 = constant 8 : i32[8]
        %4 = mul(%2, %3) : i32[8]
        %5 = add(%4, %1) : i32[8]
        %6 = load %x[gather(%5, 8)] : f32[8]
        store %6 to %fs[gather(%5, 8)]""",
        """
        %6 = load %x[8*%i +: 8] : f32[8]
        store %6 to %fs[8*%i +: 8]""",
    ),
    "gather along every other element": (
        """
        %1 = iota() {dim=0} : i32[8]
        %2 = add(%1, %1) : i32[8]
        %3 = load %x[gather(%2, 8)] : f32[8]
        store %3 to %fs[gather(%1, 8)]""",
        """
        %1 = iota() {dim=0} : i32[8]
        %3 = load %x[gather(2*%1, 8)] : f32[8]
        store %3 to %fs[0 +: 8]""",
    ),
    "quotients and remainders": (
        """
        %1 = constant 4 : i32[]
        %2 = div(%i, %1) : i32[]
        %3 = rem(%i, %1) : i32[]
        %4 = load %m[%2, 2*%3 +: 8] : f32[8]
        %5 = mul(%2, %1) : i32[]
        %6 = add(%3, %5) : i32[]
        store %4 to %fs[8*%6 +: 8]""",
        """
        %4 = load %m[(%i // 4), 2*(%i % 4) +: 8] : f32[8]
        store %4 to %fs[8*%i +: 8]""",
    ),
    "quotients of sums": (
        """
        %1 = constant 8 : i32[]
        %2 = mul(%i, %1) : i32[]
        %3 = iota() {dim=0} : i32[8]
        %4 = broadcast(%2) {dims=[]} : i32[8]
        %5 = add(%4, %3) : i32[8]
        %6 = constant 4 : i32[8]
        %7 = div(%5, %6) : i32[8]
        %8 = constant 16 : i32[]
        %9 = div(%2, %8) : i32[]
        %10 = rem(%2, %8) : i32[]
        %11 = load %m[gather(%7, 8), (%9 // 2)] : f32[8]
        store %11 to %fs[16*%9 + %10 +: 8]""",
        """
        %3 = iota() {dim=0} : i32[8]
        %11 = load %m[gather(2*%i + (%3 // 4), 8), (%i // 4)] : f32[8]
        store %11 to %fs[8*%i +: 8]""",
    ),
    "what may be negative, or be divided by anything, stays": (
        """
        %1 = load %n[%j] : i32[]
        %2 = constant 4 : i32[]
        %3 = div(%1, %2) : i32[]
        %4 = rem(%i, %1) : i32[]
        %5 = sub(%i, %2) : i32[]
        %6 = rem(%5, %2) : i32[]
        %7 = load %m[%3, %4 + %6] : f32[]
        store %7 to %fs[%i]""",
        """
        %1 = load %n[%j] : i32[]
        %2 = constant 4 : i32[]
        %3 = div(%1, %2) : i32[]
        %4 = rem(%i, %1) : i32[]
        %5 = sub(%i, %2) : i32[]
        %6 = rem(%5, %2) : i32[]
        %7 = load %m[%3, %4 + %6] : f32[]
        store %7 to %fs[%i]""",
    ),
    "mask and fill stay": (
        """
        %1 = constant 1 : i32[]
        %2 = add(%i, %1) : i32[]
        %3 = load %b[%i +: 8] : bool[8]
        %4 = load %x[%j] : f32[]
        %5 = load %x[%2 +: 8] mask %3 fill %4 : f32[8]
        store %5 to %fs[%2 +: 8] mask %3""",
        """
        %3 = load %b[%i +: 8] : bool[8]
        %4 = load %x[%j] : f32[]
        %5 = load %x[%i + 1 +: 8] mask %3 fill %4 : f32[8]
        store %5 to %fs[%i + 1 +: 8] mask %3""",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_index_arithmetic_becomes_part_of_the_access(name: str) -> None:
    assert_becomes(clean, *CASES[name])


def test_a_long_chain_of_doublings_takes_no_longer_than_a_short_one() -> None:
    chain = "".join(f"%{n + 1} = add(%{n}, %{n}) : i32[]\n" for n in range(1, 25))
    assert_becomes(
        clean,
        f"%1 = load %n[%i] : i32[] {chain} %30 = load %x[%25] : f32[] store %30 to %fs[%i]",
        f"%1 = load %n[%i] : i32[] %30 = load %x[{2**24}*%1] : f32[] store %30 to %fs[%i]",
    )
