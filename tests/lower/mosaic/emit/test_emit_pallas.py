"""Results of kernels under every plan: programs that were computed wrong once."""

from __future__ import annotations

import numpy as np
import pytest

from tests.lower.mosaic.every_plan import every_plan, kind_of_plan
from tilekern.ir.core import Array
from tilekern.ir.interpret import interpret
from tilekern.ir.parse import parse
from tilekern.passes import pipeline


def agree(text: str, *arrays: Array) -> set[str]:
    """Assert that all forms of a program give what it means, bit for bit; which forms there are."""
    func = pipeline.run(parse(text))
    wanted = interpret(func, *arrays)
    found = set[str]()
    for lowering in every_plan(func):
        form = kind_of_plan(lowering.planned)
        for got, right in zip(lowering.interpret(*arrays), wanted, strict=True):
            np.testing.assert_array_equal(got, right, form)
        found.add(form)
    return found


def integers(*shape: int) -> Array:
    """Small whole numbers, with which floats are exact."""
    return np.random.default_rng(0).integers(-2, 3, shape).astype(np.float32)


def test_a_load_from_a_table_may_have_its_mask_as_fill() -> None:
    agree(
        """
        func @f(%x: ref<bool[2], in>, %o: ref<bool[2], out>) {
          grid %i in i[2 by 1]
          %0 = load %x[%i!] : bool[]
          %1 = load %x[%i!] mask %0 fill %0 : bool[]
          store %1 to %o[%i!]
        }
        """,
        np.array([True, False]),
    )


@pytest.mark.parametrize("size", [0, 2])
def test_bounds_are_computed_for_every_step(size: int) -> None:
    """Also if what stands before the loop needs them; and if there is no program at all."""
    forms = agree(
        f"""
        func @f(%x: ref<f32[24, 128], in>, %o: ref<f32[{size}, 8, 128], out>, %p: ref<i32[{size}], out>) {{
          grid %i in i[{8 * size} by 8]
          %0 = constant 0 : i32[]
          %1 = constant 8 : i32[]
          %16 = constant 16 : i32[]
          %2 = mul(%i, %16) : i32[]
          %3 = max(%2, %1) : i32[]
          %4 = load %x[%3 +: 8, 0 +: 128!] : f32[8, 128]
          %5 = fold %k in k[24 by 8] from %0 to %3 with %c = %4 do {{
            %6 = load %x[8*%k +: 8!, 0 +: 128!] : f32[8, 128]
            %7 = sub(%6, %c) : f32[8, 128]
            yield %7
          }} : f32[8, 128]
          store %5 to %o[%i!, 0 +: 8!, 0 +: 128!]
          store %3 to %p[%i!]
        }}
        """,
        integers(24, 128),
    )
    assert not size or forms == {"resident", "step_table", "grid_loop", "pipelined"}


def test_bounds_computed_ahead() -> None:
    """From float16, by a program that sees an input that is an output, too."""
    agree(
        """
        func @f(%x: ref<f16[8], in>, %y: ref<i32[32, 4], in>, %io: ref<i32[4], inout>, %o: ref<i32[4], out>) {
          %0 = load %x[0 +: 8!] : f16[8]
          %1 = convert(%0) : i32[8]
          %2 = reduce(%1) {monoid="max", dims=[0]} : i32[]
          %3 = constant 0 : i32[]
          %4 = constant 1 : i32[4]
          %5 = fold %k in k[32 by 1] from %3 to %2 with %c = %4 do {
            %6 = load %y[%k!, 0 +: 4!] : i32[4]
            %7 = sub(%6, %c) : i32[4]
            yield %7
          } : i32[4]
          store %5 to %o[0 +: 4!]
          store %5 to %io[0 +: 4!]
        }
        """,
        np.arange(8, dtype=np.float16),
        np.arange(128, dtype=np.int32).reshape(32, 4),
        np.zeros(4, np.int32),
    )


def test_a_place_from_a_table_where_there_is_no_grid() -> None:
    agree(
        """
        func @f(%t: ref<i32[2], in>, %y: ref<i32[32, 4], in>, %o: ref<i32[4], out>) {
          %0 = load %t[1!] : i32[]
          %1 = load %y[%0, 0 +: 4!] : i32[4]
          store %1 to %o[0 +: 4!]
        }
        """,
        np.array([3, 7], np.int32),
        np.arange(128, dtype=np.int32).reshape(32, 4),
    )


def test_a_pipeline_beside_an_output_that_does_not_follow_it() -> None:
    """Whose place depends on the loop, in a dim that is in VMEM as a whole."""
    agree(
        """
        func @f(%x: ref<f32[16, 128], in>, %o: ref<i32[2, 5], zeros>) {
          grid %i in i[2 by 1]
          %0 = constant 0 : i32[]
          %1 = constant 16 : i32[]
          fold %k in k[16 by 8] from %0 to %1 do {
            %2 = load %x[8*%k +: 8!, 0 +: 128!] : f32[8, 128]
            %3 = reduce(%2) {monoid="max", dims=[0, 1]} : f32[]
            %4 = convert(%3) : i32[]
            %5 = broadcast(%4) {dims=[]} : i32[3]
            atomic %5 to %o[%i!, -%k - 1 +: 3] {kind="add"}
          }
        }
        """,
        integers(16, 128),
    )


def test_values_that_branches_inside_of_a_loop_yield() -> None:
    forms = agree(
        """
        func @f(%x: ref<f32[16, 128], in>, %o: ref<f32[8, 128], out>) {
          %0 = constant 0 : i32[]
          %1 = constant 16 : i32[]
          %2 = load %x[8 +: 8!, 0 +: 128!] : f32[8, 128]
          %3 = constant 3.0 : f32[8, 128]
          %4 = fold %k in k[16 by 8] from %0 to %1 with %c = %3 do {
            %5 = load %x[8*%k +: 8!, 0 +: 128!] : f32[8, 128]
            %6 = switch(%k) do { %7 = switch(%k) do { yield %2 } do { yield %5 } : f32[8, 128] yield %7 } do {
              yield %5
            } : f32[8, 128]
            %8 = sub(%6, %c) : f32[8, 128]
            yield %8
          } : f32[8, 128]
          store %4 to %o[0 +: 8!, 0 +: 128!]
        }
        """,
        integers(16, 128),
    )
    assert forms == {"resident", "grid_loop", "pipelined"}


def test_stores_in_a_branch_before_a_loop() -> None:
    agree(
        """
        func @f(%x: ref<f32[16, 128], in>, %o: ref<f32[8, 128], out>, %p: ref<i32[2], out>) {
          grid %i in i[2 by 1]
          %0 = constant 0 : i32[]
          %1 = constant 16 : i32[]
          switch(%i) do { store %i to %p[%i!] } do { store %1 to %p[%i!] }
          %3 = constant 3.0 : f32[8, 64]
          %4 = fold %k in k[16 by 8] from %0 to %1 with %c = %3 do {
            %5 = load %x[8*%k +: 8!, 64*%i +: 64!] : f32[8, 64]
            %8 = sub(%5, %c) : f32[8, 64]
            yield %8
          } : f32[8, 64]
          store %4 to %o[0 +: 8!, 64*%i +: 64!]
        }
        """,
        integers(16, 128),
    )


@pytest.mark.parametrize("tile", ["8, 128", "128", ""])
def test_a_loop_goes_on_with_the_carry_of_the_one_around_it(tile: str) -> None:
    kind = f"f32[{tile}]"
    place = ", ".join(f"0 +: {n}!" for n in tile.split(", ") if n)
    assert agree(f"""
        func @f(%o: ref<{kind}, out>) {{
          %0 = constant 0 : i32[]
          %1 = constant 16 : i32[]
          %2 = constant 1.0 : {kind}
          %3 = constant 1.5 : {kind}
          %4 = fold %k in k[16 by 8] from %0 to %1 with %c = %2 do {{
            %5 = fold %m in m[24 by 8] from %0 to %1 with %d = %c do {{
              %6 = mul(%d, %3) : {kind}
              yield %6
            }} : {kind}
            yield %5
          }} : {kind}
          store %4 to %o[{place}]
        }}
    """) == {"resident", "grid_loop"}


@pytest.mark.parametrize("reverse", ["", "reverse"])
def test_loops_that_run_a_tile_again(reverse: str) -> None:
    """The third one starts at 8, where the first one has been before, up to 24: no step can run both of a tile."""
    bounds = ["%0 to %2", "%2 to %3", "%3 to %1"]

    def fold(n: int) -> str:
        return f"""
          %c{n + 1} = fold %k{n} in k[32 by 8] from {bounds[2 - n if reverse else n]} {reverse} with %d{n} = %c{n} do {{
            %t{n} = load %x[8*%k{n} +: 8!, 0 +: 128!] : f32[8, 128]
            %u{n} = {"add" if n == 1 else "sub"}(%t{n}, %d{n}) : f32[8, 128]
            %h{n} = mul(%u{n}, %f{n}) : f32[8, 128]
            yield %h{n}
          }} : f32[8, 128]
        """

    folds = "\n".join(map(fold, range(3)))
    forms = agree(
        f"""
        func @f(%x: ref<f32[32, 128], in>, %o: ref<f32[16, 128], out>) {{
          grid %i in i[16 by 8]
          %0 = constant 0 : i32[]
          %1 = constant 32 : i32[]
          %24 = constant 24 : i32[]
          %2 = mul(%i, %24) : i32[]
          %3 = constant 8 : i32[]
          %c0 = constant 1.0 : f32[8, 128]
          %f0 = constant 0.5 : f32[8, 128]
          %f1 = constant 0.25 : f32[8, 128]
          %f2 = constant 2.0 : f32[8, 128]
          {folds}
          store %c3 to %o[8*%i +: 8!, 0 +: 128!]
        }}
        """,
        integers(32, 128),
    )
    assert forms == {"resident", "pipelined"}
