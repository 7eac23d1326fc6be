"""Plots and kept pictures: drawn from what was measured, with machine and date, and as they are in the repository."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs import plots
from docs.generate import pictures
from tilekern.ir.picture import Picture

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
PLOTS: list[Callable[[], Picture]] = [
    lambda: plots.h100_attention(4096, 16384),
    plots.h100_matmul,
    plots.h100_memory,
    plots.h100_others,
    plots.cpu_attention,
    plots.cpu_peak,
]
SVG = "{http://www.w3.org/2000/svg}"


def words(picture: Picture) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.fromstring(str(picture)).iter(f"{SVG}text")]


@pytest.mark.parametrize("draw", PLOTS)
def test_a_plot_names_machine_and_date(draw: Callable[[], Picture]) -> None:
    _, source, *_ = words(draw())
    assert source.startswith(("NVIDIA H100", "Intel")) and "2026-11-2" in source


@pytest.mark.parametrize("draw", PLOTS)
def test_bars_stay_inside_of_the_plot(draw: Callable[[], Picture]) -> None:
    root = ElementTree.fromstring(str(draw()))
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    drawn = list(root.iter(f"{SVG}rect"))
    assert drawn
    for bar in drawn:
        x, y, wide, tall = (float(bar.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x >= left and x + wide <= left + width and y >= top and y + tall <= top + height


def test_bars_are_as_long_as_their_numbers() -> None:
    picture = plots.bars("t", "s", "u", {"": [plots.Bar("a", 1.0, True), plots.Bar("b<c", 4.0, False)]}, line=2.0)
    first, second = ElementTree.fromstring(str(picture)).iter(f"{SVG}rect")
    assert float(second.attrib["width"]) == pytest.approx(4 * float(first.attrib["width"]), rel=0.01)
    assert words(picture) == ["t, u", "s", "a", "1.00", "b<c", "4.00"]


@pytest.mark.parametrize(("value", "pieces"), [(1.9, 2), (4.0, 1), (0.1, 1)])
def test_the_line_leaves_out_numbers(value: float, pieces: int) -> None:
    group = [plots.Bar("a", value, True), plots.Bar("b", 4.0, False)]
    root = ElementTree.fromstring(str(plots.bars("t", "s", "u", {"": group}, line=2.0)))
    (line,) = (path for path in root.iter(f"{SVG}path") if path.get("class") == "line")
    assert line.attrib["d"].count("M") == pieces


def test_numbers_are_those_of_the_table() -> None:
    assert words(plots.h100_matmul())[3:7] == ["tilekern, Gluon", "793", "tilekern, Triton", "766"]
    assert "3.50" in words(plots.h100_others()) and "0.60" in words(plots.h100_others())


def test_the_pictures_of_the_readme_are_what_is_drawn() -> None:
    """`python -m docs.generate` draws them anew."""
    drawn = {name: f"{text}\n" for name, text in pictures()}
    assert drawn == {path.name: path.read_text() for path in PICTURES.iterdir()}
    readme = (PICTURES.parents[1] / "README.md").read_text()
    assert all(f"](docs/pictures/{name})" in readme[:3000] for name in drawn)
