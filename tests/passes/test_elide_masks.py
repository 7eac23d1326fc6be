import pytest

from tests.passes.golden import assert_becomes
from tilekern.passes.elide_masks import elide_masks

# The grid has 12 by 2 programs, tiles of 8 by 16; arrays have 96 elements, `m` 96 by 20.
CASES = {
    "a block that divides the extent": ("%1 = load %x[8*%i +: 8] : f32[8]", "%1 = load %x[8*%i +: 8!] : f32[8]"),
    "each dim for itself": (
        "%1 = load %m[8*%i +: 8, 16*%j +: 16] : f32[8, 16]",
        "%1 = load %m[8*%i +: 8!, 16*%j +: 16] : f32[8, 16]",
    ),
    "the last element": ("%1 = load %x[8*%i + 7] : f32[]", "%1 = load %x[8*%i + 7!] : f32[]"),
    "behind the end": ("%1 = load %x[8*%i + 8] : f32[]", "%1 = load %x[8*%i + 8] : f32[]"),
    "before the start": ("%1 = load %x[8*%i - 1] : f32[]", "%1 = load %x[8*%i - 1] : f32[]"),
    "from the end": ("%1 = load %x[-8*%i + 88 +: 8] : f32[8]", "%1 = load %x[-8*%i + 88 +: 8!] : f32[8]"),
    "an index from memory": (
        "%1 = load %n[%i] : i32[] %2 = load %x[%1] : f32[]",
        "%1 = load %n[%i!] : i32[] %2 = load %x[%1] : f32[]",
    ),
    "an index proved elsewhere": (
        "%1 = load %n[%i] : i32[] %2 = load %x[%1!] : f32[]",
        "%1 = load %n[%i!] : i32[] %2 = load %x[%1!] : f32[]",
    ),
    "a clamped index": (
        """
        %1 = load %n[%i] : i32[]
        %2 = constant 0 : i32[]
        %3 = constant 95 : i32[]
        %4 = max(%1, %2) : i32[]
        %5 = min(%4, %3) : i32[]
        %6 = load %x[%5] : f32[]""",
        """
        %1 = load %n[%i!] : i32[]
        %2 = constant 0 : i32[]
        %3 = constant 95 : i32[]
        %4 = max(%1, %2) : i32[]
        %5 = min(%4, %3) : i32[]
        %6 = load %x[%5!] : f32[]""",
    ),
    "digits": (
        "%1 = load %m[(%i // 4), 4*(%i % 5) +: 4] : f32[4] %2 = load %m[(%i % 97), 16*(%j // 2) + 5] : f32[]",
        "%1 = load %m[(%i // 4)!, 4*(%i % 5) +: 4!] : f32[4] %2 = load %m[(%i % 97)!, 16*(%j // 2) + 5!] : f32[]",
    ),
    "the greater and the less": (
        """
        %1 = constant 11 : i32[]
        %2 = add(%i, %1) : i32[]
        %3 = max(%i, %2) : i32[]
        %4 = min(%1, %i) : i32[]
        %5 = min(%i, %j) : i32[]
        store %3 to %is[%4]
        store %5 to %is[%i]""",
        """
        %1 = constant 11 : i32[]
        %2 = add(%i, %1) : i32[]
        %5 = min(%i, %j) : i32[]
        store %2 to %is[%i!]
        store %5 to %is[%i!]""",
    ),
    "a gather": (
        "%1 = iota() {dim=0} : i32[8] %2 = load %x[gather(8*%i + %1, 8)] : f32[8]",
        "%1 = iota() {dim=0} : i32[8] %2 = load %x[gather(8*%i + %1, 8)!] : f32[8]",
    ),
    "a fold's index": (
        """
        %1 = constant 0 : i32[]
        %2 = constant 90 : i32[]
        fold %k in k[100 by 8] from %1 to %2 do {
          %3 = load %x[8*%k +: 8] : f32[8]
        }
        %4 = constant 100 : i32[]
        fold %l in l[100 by 8] from %2 to %4 do {
          %5 = load %x[8*%l +: 8] : f32[8]
        }""",
        """
        %1 = constant 0 : i32[]
        %2 = constant 90 : i32[]
        fold %k in k[100 by 8] from %1 to %2 do {
          %3 = load %x[8*%k +: 8!] : f32[8]
        }
        %4 = constant 100 : i32[]
        fold %l in l[100 by 8] from %2 to %4 do {
          %5 = load %x[8*%l +: 8] : f32[8]
        }""",
    ),
    "a comparison that always holds": (
        """
        %1 = constant 12 : i32[]
        %2 = lt(%i, %1) : bool[]
        %3 = broadcast(%2) {dims=[]} : bool[8]
        %4 = load %x[8*%i +: 8] mask %3 : f32[8]""",
        """
        %1 = constant 12 : i32[]
        %2 = constant true : bool[]
        %3 = constant true : bool[8]
        %4 = load %x[8*%i +: 8!] : f32[8]""",
    ),
    "a comparison that sometimes holds": (
        "%1 = constant 11 : i32[] %2 = lt(%i, %1) : bool[] store %2 to %bs[%i] mask %2",
        "%1 = constant 11 : i32[] %2 = lt(%i, %1) : bool[] store %2 to %bs[%i!] mask %2",
    ),
    "masked by false": (
        """
        %1 = constant false : bool[8]
        %2 = constant 2.0 : f32[]
        %3 = load %x[8*%i +: 8] mask %1 fill %2 : f32[8]
        %4 = load %n[8*%i +: 8] mask %1 : i32[8]
        store %3 to %fs[8*%i +: 8] mask %1
        store %3 to %fs[8*%i +: 8]
        store %4 to %is[8*%i +: 8]""",
        """
        %1 = constant false : bool[8]
        %2 = constant 2.0 : f32[]
        %3 = broadcast(%2) {dims=[]} : f32[8]
        %4 = constant 0 : i32[8]
        store %3 to %fs[8*%i +: 8!]
        store %4 to %is[8*%i +: 8!]""",
    ),
    "a store masked by true": (
        "%1 = constant true : bool[] %2 = constant 2.0 : f32[] store %2 to %fs[%i + 90] mask %1",
        "%1 = constant true : bool[] %2 = constant 2.0 : f32[] store %2 to %fs[%i + 90]",
    ),
    "a fill that is never used": (
        "%1 = constant 2.0 : f32[] %2 = load %x[%i] fill %1 : f32[] %3 = load %x[%i + 90] fill %1 : f32[]",
        "%1 = constant 2.0 : f32[] %2 = load %x[%i!] : f32[] %3 = load %x[%i + 90] fill %1 : f32[]",
    ),
    "a fill of masked lanes": (
        "%1 = constant 2.0 : f32[] %2 = load %b[%i] : bool[] %3 = load %x[%i] mask %2 fill %1 : f32[]",
        "%1 = constant 2.0 : f32[] %2 = load %b[%i!] : bool[] %3 = load %x[%i!] mask %2 fill %1 : f32[]",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_proved_is_no_longer_checked(name: str) -> None:
    assert_becomes(elide_masks, *CASES[name])
