"""The documentation: its code runs and prints what it shows, and nothing public is left out."""

import doctest
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import tilekern as tk
from docs.pages import PART, Block, run, with_pictures

DOCS = Path(__file__).parent.parent / "docs"
KERNELS = sorted(path.parent.name for path in (DOCS.parent / "kernels").glob("*/kernel.py"))

PAGES = {str(page.relative_to(DOCS)): page.read_text() for page in sorted(DOCS.rglob("*.md"))}
PAGES_WITH_CODE = [name for name, text in PAGES.items() if PART.search(text)]
WITH_PICTURES = ("index.md", "tutorial.md", "cookbook.md", "from-jnp.md", "from-pallas.md", "from-triton.md")
NEEDS = {
    "cpu.md": "llvmlite",
    "frameworks.md": "flax",
    "gpu.md": "triton",
    "torch.md": "torch",
    "tpu.md": "libtpu",
    "tuning.md": "triton",
}


@pytest.mark.parametrize("name", PAGES_WITH_CODE)
def test_the_code_of_a_page_runs_and_prints_what_it_shows(name: str) -> None:
    """The blocks of a page are one program, `<page>.py`, whose lines the errors shown on the page name."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"needs {NEEDS[name]}")
    for part in run(name, PAGES[name]):
        if isinstance(part, Block):
            assert fits(part.shown, part.printed), f"line {part.line} of the page's program prints\n{part.printed}"
        else:
            assert ElementTree.fromstring(part.picture.svg).tag == "svg" and "\n" not in part.picture.svg


def codes(text: str) -> list[str]:
    """The blocks of Python of a page."""
    return [part["code"] for part in PART.finditer(text) if part["code"] is not None]


def fits(shown: str, printed: str) -> bool:
    """True if the text on a page is the printed text; `...` stands for any text."""
    return doctest.OutputChecker().check_output(shown.rstrip(), printed.rstrip(), doctest.ELLIPSIS)


def test_what_a_page_shows_is_compared() -> None:
    assert fits("a ... c\n", "a b c\n") and not fits("", "a\n") and not fits("a\n", "b\n") and not fits("a\n", "")


def test_the_pages_with_code_are_found() -> None:
    known = {"contracts.md", "cpu.md", "gpu.md", "index.md", "ir.md", "reference.md", "tpu.md", "tutorial.md"}
    assert known <= set(PAGES_WITH_CODE)
    assert not [name for name, text in PAGES.items() if text.count("```python") != len(codes(text))]


@pytest.mark.parametrize("public", tk.__all__)
def test_the_reference_has_an_example_of_every_public_name(public: str) -> None:
    code = "".join(codes(PAGES["reference.md"]))
    assert re.search(rf"\btk\.{public}\b", code)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_has_a_section(kernel: str) -> None:
    assert re.search(rf"^## {kernel}$", PAGES["kernels.md"], re.MULTILINE)
    assert f"::: tilekern.kernels.{kernel}." in PAGES["kernels.md"]


@pytest.mark.parametrize("public", tk.__all__)
def test_the_api_page_has_the_docstring_of_every_public_name(public: str) -> None:
    assert re.search(rf"^::: tilekern\.([a-z]+\.)*{public}$", PAGES["api.md"], re.MULTILINE)


def test_every_page_is_in_the_navigation() -> None:
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    assert not [name for name in PAGES if f": {name}\n" not in navigation]


def test_pictures_stand_in_the_place_of_their_marks() -> None:
    mark = "<!-- picture: Picture('<svg/>') -->"
    text = f"a\n\n```python\nfrom tilekern.ir.picture import Picture\n```\n\n{mark}\n\nb\n"
    assert with_pictures("page.md", text) == text.replace(mark, "<figure><svg/></figure>")
    assert with_pictures("page.md", "```python\nraise ValueError\n```\n").startswith("```python")


def test_pages_for_beginners_have_pictures() -> None:
    assert all("<!-- picture: " in PAGES[name] for name in WITH_PICTURES)
