"""The documentation: its code runs and prints what it shows, and nothing public is left out."""

import contextlib
import doctest
import io
import linecache
import re
from pathlib import Path

import pytest

import tilekern as tk

DOCS = Path(__file__).parent.parent / "docs"
KERNELS = sorted(path.parent.name for path in (DOCS.parent / "kernels").glob("*/kernel.py"))

# A block of Python, and behind it the block of text, if there is one, that shows what it prints.
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
PAGES = {str(page.relative_to(DOCS)): page.read_text() for page in sorted(DOCS.rglob("*.md"))}
PAGES_WITH_CODE = [name for name, text in PAGES.items() if EXAMPLE.search(text)]
NEEDS = {
    "cpu.md": "llvmlite",
    "frameworks.md": "flax",
    "gpu.md": "triton",
    "tpu.md": "libtpu",
    "tuning.md": "triton",
}


@pytest.mark.parametrize("name", PAGES_WITH_CODE)
def test_the_code_of_a_page_runs_and_prints_what_it_shows(name: str) -> None:
    """The blocks of a page are one program, `<page>.py`, whose lines the errors shown on the page name."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"needs {NEEDS[name]}")
    file = Path(name).with_suffix(".py").name
    program = "".join(code for code, _ in EXAMPLE.findall(PAGES[name]))
    linecache.cache[file] = (len(program), None, program.splitlines(keepends=True), file)
    namespace, lines_above = {"__name__": "docs"}, 0
    for code, shown in EXAMPLE.findall(PAGES[name]):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * lines_above + code, file, "exec"), namespace)
        assert fits(shown, printed.getvalue()), f"{file}, line {lines_above + 1} prints\n{printed.getvalue()}"
        lines_above += code.count("\n")


def fits(shown: str, printed: str) -> bool:
    """True if the text on a page is the printed text; `...` stands for any text."""
    return doctest.OutputChecker().check_output(shown.rstrip(), printed.rstrip(), doctest.ELLIPSIS)


def test_what_a_page_shows_is_compared() -> None:
    assert fits("a ... c\n", "a b c\n") and not fits("", "a\n") and not fits("a\n", "b\n") and not fits("a\n", "")


def test_the_pages_with_code_are_found() -> None:
    known = {"contracts.md", "cpu.md", "gpu.md", "index.md", "ir.md", "reference.md", "tpu.md", "tutorial.md"}
    assert known <= set(PAGES_WITH_CODE)
    assert not [name for name, text in PAGES.items() if text.count("```python") != len(EXAMPLE.findall(text))]


@pytest.mark.parametrize("public", tk.__all__)
def test_the_reference_has_an_example_of_every_public_name(public: str) -> None:
    code = "".join(code for code, _ in EXAMPLE.findall(PAGES["reference.md"]))
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
