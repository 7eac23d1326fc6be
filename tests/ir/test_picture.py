"""Pictures of kernels: the right tiles at the right places, masked lanes outside of arrays, valid XML."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tests.lang.checks import refused
from tilekern.errors import ArgumentError
from tilekern.ir.analysis.touches import LONGEST, touches
from tilekern.ir.picture import Picture, picture
from tilekern.testing.programs.batches import sample

SVG = "{http://www.w3.org/2000/svg}"


def like(x: Any, *_: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@tk.kernel(out_type=like)
def copy(x, out, *, rows: int = 4, columns: int = 4):
    i = tk.parallel(x.shape[0], rows)

    def step(j):
        out[i, j] = x[i, j]

    tk.foreach(tk.serial(x.shape[1], columns), step)


def boxes(drawing: Picture, kind: str) -> list[tuple[float, ...]]:
    """The rectangles of a class as x, y, width and height in pixels."""
    root = ElementTree.fromstring(str(drawing))
    found = [e for e in root.iter(f"{SVG}rect") if e.get("class") == kind]
    return [tuple(float(e.attrib[name]) for name in ("x", "y", "width", "height")) for e in found]


def words(drawing: Picture) -> str:
    return " ".join("".join(e.itertext()) for e in ElementTree.fromstring(str(drawing)).iter(f"{SVG}text"))


def test_all_tiles_are_drawn_and_those_of_one_program_coloured() -> None:
    drawing = copy.trace(jnp.ones((10, 7))).draw()
    assert len(boxes(drawing, "array")) == 2
    assert len(boxes(drawing, "tile")) == 2 * 3 * 2  # of both arrays: 3 programs by 2 tiles of the loop
    assert len(boxes(drawing, "load")) == len(boxes(drawing, "store")) == 2
    x, y, width, height = boxes(drawing, "array")[0]
    (first, second), side = boxes(drawing, "load"), width / 7
    assert height == pytest.approx(10 * side)
    assert first == pytest.approx((x, y + 4 * side, 4 * side, 4 * side))
    assert second == pytest.approx((x + 4 * side, y + 4 * side, 4 * side, 4 * side))
    assert "Grid of 3 programs. Coloured: the program of tile i = 1." in words(drawing)


def test_lanes_outside_of_an_array_are_hatched() -> None:
    drawing = copy.trace(jnp.ones((10, 7))).draw()
    x, y, width, height = boxes(drawing, "array")[0]
    side = width / 7
    below, beside = boxes(drawing, "outside")[:2]
    assert below == pytest.approx((x, y + height, 8 * side, 2 * side))
    assert beside == pytest.approx((x + width, y, side, height))
    assert "outside of the array: masked" in words(drawing)


def test_tiles_that_fit_leave_nothing_outside() -> None:
    drawing = copy.trace(jnp.ones((8, 8))).draw()
    assert not boxes(drawing, "outside") and "outside" not in words(drawing)


@pytest.mark.parametrize("program", range(3))
def test_any_program_can_be_chosen(program: int) -> None:
    drawing = copy.trace(jnp.ones((10, 7))).draw(program=(program,))
    _, y, width, _ = boxes(drawing, "array")[0]
    assert boxes(drawing, "load")[0][1] == pytest.approx(y + 4 * program * width / 7)


@pytest.mark.parametrize("program", [(3,), (-1,), (), (0, 0)])
def test_a_program_outside_of_the_grid(program: tuple[int, ...]) -> None:
    traced = copy.trace(jnp.ones((10, 7)))
    with refused(ArgumentError, "copy has no such program", expected="i < 3", got=f"program={program}"):
        traced.draw(program)  # <-


def test_a_halo_before_the_array_is_outside() -> None:
    @tk.kernel(out_type=like)
    def left(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[i] = x[i - 1]

    drawing = left.trace(jnp.ones(8)).draw()
    x, y, width, height = boxes(drawing, "array")[0]
    side = width / 8
    assert boxes(drawing, "outside") == [pytest.approx((x - side, y, side, height))]


def test_tiles_that_overlap_are_drawn_on_one_grid_without_numbers() -> None:
    for far in (1, 3):  # 3: the first tile and the last tile lie apart

        @tk.kernel(out_type=like)
        def stencil(x, out):
            i = tk.parallel(x.shape[0], 4)
            out[i] = x[i - far] + x[i] + x[i + far]  # noqa: B023

        drawing = stencil.trace(jnp.ones((8, 3))).draw()
        assert len(boxes(drawing, "tile")) == 2 * 2 and len(boxes(drawing, "load")) == 3
        assert len(boxes(drawing, "outside")) == 2  # a row above, a row below
        assert "text-anchor" not in drawing.svg  # of numbers
    assert "text-anchor" in copy.trace(jnp.ones((10, 7))).draw().svg


def test_a_file_is_readable_on_any_page() -> None:
    text = str(copy.trace(jnp.ones((10, 7))).draw())
    assert text.count("background:") == 2 and "prefers-color-scheme:dark" in text


def test_a_loop_ends_where_the_place_of_the_program_says() -> None:
    @tk.kernel(out_type=like)
    def causal(x, out):
        i = tk.parallel(x.shape[0], 4)
        keys = tk.serial(x.shape[1], 4, stop=i.indices.max() + 1)
        out[i] = x[i] + tk.fold(keys, lambda j, total: total + x[i, j].sum(), jnp.float32(0))

    func = causal.trace(jnp.ones((16, 16))).ir
    for program in range(4):
        tiles = {t.place for t in touches(func, (program,)) if t.op.access.shape == (4, 4)}
        assert tiles == {((4 * program, 4), (4 * j, 4)) for j in range(program + 1)}


def test_places_that_data_decide_cover_the_dim() -> None:
    @tk.kernel(out_type=lambda x, rows: jax.ShapeDtypeStruct((rows.shape[0], x.shape[1]), x.dtype))
    def take(x, rows, out):
        i = tk.parallel(rows.shape[0], 4)
        out[i] = x[rows[i]]

    drawing = take.trace(jnp.ones((16, 3)), jnp.zeros(8, jnp.int32)).draw()
    assert "load 4 × 3, gathered" in words(drawing)
    assert boxes(drawing, "load")[1][3] == boxes(drawing, "array")[1][3]


def test_a_long_loop_is_one_band() -> None:
    func = copy.trace(jnp.ones((4, 4 * LONGEST + 1))).ir
    assert [t.first for t in touches(func, (0,))] == [(0, None), (0, None)]
    assert len(list(touches(copy.trace(jnp.ones((4, 4 * LONGEST))).ir, (0,)))) == 2 * LONGEST


def test_other_dims_stand_in_the_title() -> None:
    @tk.kernel(out_type=like)
    def batched(x, out):
        b, i = tk.parallel(x.shape[0]), tk.parallel(x.shape[1], 4)
        out[b, i] = x[b, i]

    assert "x f32[3, 64, 5] at [1, :, :]" in words(batched.trace(jnp.ones((3, 64, 5))).draw())


def test_a_scalar_and_an_array_without_elements() -> None:
    assert len(boxes(copy.trace(jnp.ones((0, 7))).draw(), "array")) == 0

    @tk.kernel(out_type=like)
    def double(x, out):
        out[...] = x[...] * 2

    assert len(boxes(double.trace(jnp.float32(1)).draw(), "load")) == 1


@pytest.mark.parametrize("seed", range(30))
def test_any_program_is_drawn_as_one_valid_element(seed: int) -> None:
    made = picture(sample(seed)[0].func)
    ElementTree.fromstring(str(made))
    ElementTree.fromstring(made.svg)
    assert "\n" not in made.svg


def test_notebooks_show_the_picture_and_the_text() -> None:
    traced = copy.trace(jnp.ones((10, 7)))
    assert traced._repr_html_().startswith(traced.draw().svg) and "load %x[" in traced._repr_html_()
    lowered = traced.lower("cpu:xla")
    assert "<details><summary>Plan</summary>" in lowered._repr_html_() and "<svg" in lowered._repr_html_()
    assert not re.search(
        r"<(?!/?(svg|defs|pattern|path|g|rect|text|tspan|pre|details|summary)\b)", lowered._repr_html_()
    )
