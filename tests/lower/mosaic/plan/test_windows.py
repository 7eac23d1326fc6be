"""The windows of accesses and the blocks that follow from them: one small Func for each kind."""

from __future__ import annotations

import pytest

from tilekern.ir.core import Func
from tilekern.ir.memory import Load
from tilekern.ir.parse import parse
from tilekern.lower.mosaic.chip import CHIPS
from tilekern.lower.mosaic.plan.hbm_layout import Layout
from tilekern.lower.mosaic.plan.plan_kernel import plan_kernel as plan
from tilekern.lower.mosaic.plan.windows import Window, make_resident, merge, window_of

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program

WHOLE = "0 +: 128!"


def loading(shape: str, access: str, tile: str, before: str = "") -> Func:
    """A program for each of 4 tiles of 16 rows that loads once from x; t is a small table of scalars."""
    return parse(f"""
        func @f(%x: ref<f32[{shape}], in>, %t: ref<i32[4], in>, %v: ref<i32[8], in>, %o: ref<f32[{tile}], sum>) {{
          grid %i in i[64 by 16]
          %0 = load %t[%i!] : i32[]
          %1 = load %v[0 +: 8!] : i32[8]
          {before}
          %x_1 = load %x[{access}] : f32[{tile}]
          atomic %x_1 to %o[{", ".join(f"0 +: {n}!" for n in tile.split(", "))}] {{kind="add"}}
        }}
    """)


def layout_of(func: Func) -> Layout:
    found = plan(func, CHIPS["tpu:v5e"])
    (load,) = (op for op in found.func.walk() if isinstance(op, Load) and op.ref.name == "x")
    layout = found.layouts[load]
    assert layout is not None
    return layout


KINDS = [
    # what is loaded, the kinds of the dims, the block, and the array that it is a block of
    ("64, 128", f"16*%i +: 16!, {WHOLE}", "16, 128", "tiled static", (16, 128), (64, 128)),
    ("60, 128", f"16*%i +: 16, {WHOLE}", "16, 128", "tiled static", (16, 128), (60, 128)),
    ("4, 16, 128", f"%i!, 0 +: 16!, {WHOLE}", "16, 128", "at static static", (None, 16, 128), (4, 16, 128)),
    ("64, 128", f"16*%0 +: 16, {WHOLE}", "16, 128", "tiled static", (16, 128), (64, 128)),
    ("64, 128", f"8 +: 16!, {WHOLE}", "16, 128", "static static", (64, 128), (64, 128)),
    ("64, 128", f"16*%i - 1 +: 16, {WHOLE}", "16, 128", "rows static", (64, 1, 128), (64, 1, 128)),
    ("64, 128", f"gather(%1, 8), {WHOLE}", "8, 128", "rows static", (64, 1, 128), (64, 1, 128)),
    # A tile that is no multiple of (8, 128) is a whole dim of an array that XLA has split.
    ("20, 128", f"5*%i +: 5!, {WHOLE}", "5, 128", "tiled static", (None, 5, 128), (4, 5, 128)),
    ("128, 160", "0 +: 128!, 40*%i +: 40!", "128, 40", "static tiled", (None, 128, 40), (4, 128, 40)),
    ("128, 150", "0 +: 128!, 40*%i +: 40", "128, 40", "static tiled", (None, 128, 40), (4, 128, 40)),
    # A vector has a dim of one row before it.
    ("512", "128*%i +: 128!", "128", "tiled", (1, 128), (1, 512)),
    # A place before rows of whole registers is folded into them: heads of [T, N, H] are lanes of [T, N * H].
    ("16, 4, 128", f"0 +: 16!, %i!, {WHOLE}", "16, 128", "static at static", (16, 128), (16, 512)),
    ("16, 4, 64", "0 +: 16!, %i!, 0 +: 64!", "16, 64", "static at static", (None, 16, 64), (4, 16, 64)),
]


@pytest.mark.parametrize(("shape", "access", "tile", "kinds", "block", "view"), KINDS)
def test_what_a_program_sees(
    shape: str, access: str, tile: str, kinds: str, block: tuple[int | None, ...], view: tuple[int, ...]
) -> None:
    found = layout_of(loading(shape, access, tile))
    assert [window_dim.kind for window_dim in found.window.dims] == kinds.split()
    assert found.shape == view
    assert found.block == block


def test_tiles_that_a_loop_inside_of_the_kernel_counts() -> None:
    found = layout_of(
        parse("""
            func @f(%x: ref<f32[60, 128], in>, %o: ref<f32[16, 128], sum>) {
              %0 = constant 0 : i32[]
              %1 = constant 60 : i32[]
              fold %k in k[60 by 16] from %0 to %1 do {
                %2 = load %x[16*%k +: 16, 0 +: 128!] : f32[16, 128]
                atomic %2 to %o[0 +: 16!, 0 +: 128!] {kind="add"}
              }
            }
        """)
    )
    assert [window_dim.kind for window_dim in found.window.dims] == ["aligned", "static"]
    assert (found.block, found.shape) == ((64, 128), (60, 128))


def test_loads_of_the_same_tiles_share_a_block() -> None:
    func = loading(
        "64, 128", f"16*%i +: 16!, {WHOLE}", "16, 128", "%3 = load %x[16*%i +: 16!, 0 +: 128!] : f32[16, 128]"
    )
    assert [found.window.param.name for found in plan(func, CHIPS["tpu:v5e"]).inputs].count("x") == 1


def test_a_window_for_several_accesses() -> None:
    func = parse("""
        func @f(%x: ref<f32[64, 8, 4], in>, %o: ref<f32[], sum>) {
          grid %i in i[64 by 16], %j in j[4 by 1]
          %1 = load %x[16*%i +: 16!, 0 +: 8!, %j!] : f32[16, 8]
          %2 = load %x[16*%j +: 16!, 1 +: 4!, %i!] : f32[16, 4]
          %3 = load %x[8*%j +: 8!, 8*%i +: 8, %j!] : f32[8, 8]
          %4 = load %x[16*%i +: 16!, 0 +: 8!, %j!] : f32[16, 8]
        }
    """)
    found = plan(func, CHIPS["tpu:v5e"])
    first, second, third, again = (window_of(op, found.scalars) for op in func.walk() if isinstance(op, Load))
    assert first == again and merge([first, again]) == first

    def kinds(*windows: Window) -> str:
        return " ".join(window_dim.kind for window_dim in merge(windows).dims)

    assert kinds(first, second) == "aligned static rows"
    assert kinds(first, third) == "rows rows at"
    assert " ".join(r.kind for r in make_resident(first, found.scalars).dims) == "aligned static rows"
