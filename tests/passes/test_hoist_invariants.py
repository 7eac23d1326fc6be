import pytest

from tests.passes.golden import assert_becomes, func_of
from tilekern.passes.hoist_invariants import hoist_invariants

LOOP = "%1 = constant 0 : i32[] %2 = constant 96 : i32[] %3 = constant 1.0 : f32[8]"

# The grid has 12 by 2 programs, tiles of 8 by 16; arrays have 96 elements, `m` 96 by 20.
CASES = {
    "what depends on no tile and no carry": (
        f"""
        {LOOP}
        %4 = fold %k in k[96 by 8] from %1 to %2 with %c = %3 do {{
          %5 = load %x[8*%i +: 8] : f32[8]
          %6 = exp(%5) : f32[8]
          %7 = load %x[8*%k +: 8] : f32[8]
          %8 = mul(%6, %7) : f32[8]
          %9 = add(%c, %6) : f32[8]
          %10 = add(%9, %8) : f32[8]
          yield %10
        }} : f32[8]
        store %4 to %fs[8*%i +: 8]""",
        f"""
        {LOOP}
        %5 = load %x[8*%i +: 8] : f32[8]
        %6 = exp(%5) : f32[8]
        %4 = fold %k in k[96 by 8] from %1 to %2 with %c = %3 do {{
          %7 = load %x[8*%k +: 8] : f32[8]
          %8 = mul(%6, %7) : f32[8]
          %9 = add(%c, %6) : f32[8]
          %10 = add(%9, %8) : f32[8]
          yield %10
        }} : f32[8]
        store %4 to %fs[8*%i +: 8]""",
    ),
    "as far as it goes": (
        f"""
        {LOOP}
        fold %k in k[96 by 8] from %1 to %2 do {{
          fold %l in l[96 by 8] from %1 to %2 do {{
            %4 = exp(%3) : f32[8]
            %5 = load %x[8*%k +: 8] : f32[8]
            %6 = add(%4, %5) : f32[8]
            store %6 to %fs[8*%l +: 8]
          }}
        }}""",
        f"""
        {LOOP}
        %4 = exp(%3) : f32[8]
        fold %k in k[96 by 8] from %1 to %2 do {{
          %5 = load %x[8*%k +: 8] : f32[8]
          %6 = add(%4, %5) : f32[8]
          fold %l in l[96 by 8] from %1 to %2 do {{
            store %6 to %fs[8*%l +: 8]
          }}
        }}""",
    ),
    "what only makes a tile larger moves where it is needed": (
        f"""
        {LOOP}
        fold %k in k[96 by 8] from %1 to %2 do {{
          %4 = constant 2.0 : f32[8]
          %5 = mul(%3, %4) : f32[8]
          %6 = iota() {{dim=0}} : i32[8]
          %7 = broadcast(%k) {{dims=[]}} : i32[8]
          %8 = broadcast(%i) {{dims=[]}} : i32[8]
          %9 = add(%6, %7) : i32[8]
          store %5 to %fs[8*%k +: 8]
          store %9 to %is[8*%k +: 8]
        }}""",
        f"""
        {LOOP}
        %4 = constant 2.0 : f32[8]
        %5 = mul(%3, %4) : f32[8]
        fold %k in k[96 by 8] from %1 to %2 do {{
          %6 = iota() {{dim=0}} : i32[8]
          %7 = broadcast(%k) {{dims=[]}} : i32[8]
          %8 = broadcast(%i) {{dims=[]}} : i32[8]
          %9 = add(%6, %7) : i32[8]
          store %5 to %fs[8*%k +: 8]
          store %9 to %is[8*%k +: 8]
        }}""",
    ),
    "both regions of a while": (
        f"""
        {LOOP}
        %4 = while(%i) do (%p: i32[]) {{
          %5 = add(%1, %2) : i32[]
          %6 = lt(%p, %5) : bool[]
          yield %6
        }} do (%q: i32[]) {{
          %7 = sub(%2, %1) : i32[]
          %8 = add(%q, %7) : i32[]
          yield %8
        }} : i32[]
        store %4 to %is[%i]""",
        f"""
        {LOOP}
        %5 = add(%1, %2) : i32[]
        %7 = sub(%2, %1) : i32[]
        %4 = while(%i) do (%p: i32[]) {{
          %6 = lt(%p, %5) : bool[]
          yield %6
        }} do (%q: i32[]) {{
          %8 = add(%q, %7) : i32[]
          yield %8
        }} : i32[]
        store %4 to %is[%i]""",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_invariants_move_before_the_loop(name: str) -> None:
    assert_becomes(hoist_invariants, *CASES[name])


STAY = {
    "a load from an output": "%4 = load %fs[8*%i +: 8] : f32[8] store %4 to %fs[8*%k +: 8]",
    "a load at a place of the loop": "%4 = load %x[8*%k +: 8] : f32[8] store %4 to %fs[8*%k +: 8]",
    "a branch": """
        %4 = switch(%k) do {
          %5 = exp(%3) : f32[8]
          yield %5
        } do {
          yield %3
        } : f32[8]
        store %4 to %fs[8*%k +: 8]""",
}


@pytest.mark.parametrize("name", STAY)
def test_what_stays(name: str) -> None:
    func = func_of(f"{LOOP} fold %k in k[96 by 8] from %1 to %2 do {{{STAY[name]}}}")
    assert hoist_invariants(func) is func
