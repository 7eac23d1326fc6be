"""The page of an explanation: well-formed, self-contained, linked line by line, and safe for any source."""

from dataclasses import replace
from html.parser import HTMLParser
from importlib.util import find_spec
from typing import Any

import jax.numpy as jnp
import pytest

from tests.estimate.explain.test_explain import LINES, TARGETS, explained
from tests.estimate.kernels import product, types
from tilekern.estimate.drawings import roofline
from tilekern.estimate.explain import Explanation, LineReport, Listing, TilePicture
from tilekern.estimate.explain.page import page, section
from tilekern.estimate.explain.tiles import tiles
from tilekern.estimate.result import Estimate

VOID = {"meta", "br", "rect", "circle", "polyline"}


class Page(HTMLParser):
    """Counts tags, and fails where an end tag does not fit."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("target", TARGETS)
def test_a_page_is_well_formed_and_loads_nothing(target: str) -> None:
    text = explained(target).html()
    made = Page(text)
    assert made.open == [] and {"svg", "table", "pre"} <= set(made.tags)
    assert not {name for name, _ in made.attributes} & {"src", "href"} and "url(" not in text and "@import" not in text


@pytest.mark.parametrize("target", TARGETS)
def test_lines_of_programs_belong_to_lines_of_the_user(target: str) -> None:
    explanation = explained(target)
    (dot,) = [n for n, line in enumerate(explanation.lines) if line.line == LINES["dot"]]
    linked = {
        name: [text for text, origin in zip(made.text.splitlines(), made.origins, strict=True) if origin == dot]
        for name, made in explanation.listings.items()
    }
    assert any("dot(" in line for line in linked["block IR"]) and not any("fold" in line for line in linked["block IR"])
    if target.startswith("cuda"):
        assert any("tl.dot" in line for line in linked["program"])
        assert any("HGMMA" in line for line in linked["assembly"])
    assert f'data-line="{dot}"' in section(explanation)


def test_tiles_are_of_the_program_in_the_middle() -> None:
    func = product.trace(*types((512, 512), (512, 256), dtype=jnp.bfloat16)).ir
    assert set(tiles(func)) == {
        TilePicture("x", (512, 512), (256, 0), (64, 512), False),
        TilePicture("w", (512, 256), (0, 128), (512, 64), False),
        TilePicture("out", (512, 256), (256, 128), (64, 64), True),
    }


def explanation(**changes: Any) -> Explanation:
    line = LineReport("a<b>.py", 3, "x < 1 and '</script><script>alert(1)</script>'", ("<b>", "&amp;"), None)
    listing = Listing("a < b\n\n</pre>", (0, -1, 0))
    made = Explanation(
        "k<i>", "cpu", None, "<none>", (line,), "", {"<m>": "<1>"}, (), 0, {}, {}, lambda: {"<ir>": listing}, tiles=()
    )
    return replace(made, programs=lambda: {"<ir>": listing}, **changes)


def test_names_and_sources_are_escaped() -> None:
    text = page([explanation(), explanation()])
    made = Page(text)
    assert made.open == [] and made.tags.count("script") == 2 and "alert(1)</script>" not in text
    assert "b" not in made.tags or made.tags.count("b") == 2  # the listings' own headings


def test_arrays_of_any_rank_are_drawn() -> None:
    pictures = (
        TilePicture("a", (7,), (0,), (7,), False),
        TilePicture("b", (2, 0, 5), (0, 0, 1), (1, 0, 2), True),
        TilePicture("c", (1, 1_000_000), (0, 10), (1, 3), False),
    )
    assert Page(page([explanation(tiles=pictures)])).tags.count("figure") == 3


def test_a_kernel_without_products_has_no_roofline() -> None:
    estimate = Estimate("k", "t", "d", 1.0, {"matrix": 0.0, "memory": 0.5}, {"memory": 0.5}, 10, 10, None, 0)
    assert roofline(estimate) == "" and Page(page([explanation(estimate=estimate)])).open == []


def test_a_notebook_shows_an_estimate() -> None:
    estimate = Estimate("k<b>", "t", "d", 1.0, {"matrix": 0.2, "memory": 0.5}, {"memory": 0.5}, 10, 10, None, 40)
    made = Page(estimate._repr_html_())
    assert made.open == [] and "svg" in made.tags and "b" not in made.tags


@pytest.mark.skipif(find_spec("llvmlite") is None, reason="needs llvmlite")
def test_a_notebook_shows_the_section() -> None:
    made = explained("cpu:llvm")
    assert made._repr_html_() == section(made) and "<html" not in made._repr_html_()
