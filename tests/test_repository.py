"""Facts that keep the repository honest."""

import ast
import importlib
import inspect
import os
import pkgutil
import re
import sys
import tomllib
from pathlib import Path

import pytest

import tilekern
from tilekern.lower.triton.compile import toolchain
from tilekern.testing import CheckError

ROOT = Path(__file__).parent.parent
FOLDERS = ("tilekern", "kernels", "tests", "bench", "examples")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KERNELS = sorted(path for path in (ROOT / "kernels").iterdir() if path.is_dir() and path.name[0] not in "_.")
MODULES = sorted(m.name for m in pkgutil.walk_packages(tilekern.__path__, "tilekern."))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_short_and_named_for_what_it_does(path: Path) -> None:
    assert path.stem not in ("utils", "util", "helpers", "common", "misc")
    assert path.read_text().count("\n") <= 500


def test_work_that_is_left_names_its_issue() -> None:
    todo = re.compile(r"# (TODO|FIXME|XXX)\b(?!.*#\d)")
    assert not [f"{path}: {line}" for path in SOURCES for line in path.read_text().splitlines() if todo.search(line)]


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_a_kernel_folder_is_complete(path: Path) -> None:
    missing = {"__init__.py", "kernel.py", "reference.py", "cases.py"} - {file.name for file in path.iterdir()}
    assert not missing
    assert (ROOT / "tests" / "kernels" / path.name).is_dir()


# Everything that kernels may import: users have it, too.
PUBLIC = {"tilekern", "tilekern.authoring", "tilekern.errors", "tilekern.testing", "jax", "numpy", "ml_dtypes"}
# A file that imports more, and the reason.
EXCEPTIONS = {"kernels/__init__.py": {"tilekern.source"}}  # it marks the folder as a part of the package


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_kernels_use_the_public_surface_alone(path: Path) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # `from tilekern import x` imports a module, or a public name.
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
            imported |= {m if m in MODULES else str(node.module) for m in modules}
    ours = {m for m in imported if not _is_public(m)}
    assert ours == EXCEPTIONS.get(str(path.relative_to(ROOT)), set())


def _is_public(module: str) -> bool:
    top = module.partition(".")[0]
    other = top in sys.stdlib_module_names or (top != "tilekern" and top in PUBLIC)
    return module in PUBLIC or other or module.startswith("tilekern.kernels")


def test_the_kernels_are_a_package_of_tilekern() -> None:
    link = ROOT / "tilekern" / "kernels"
    assert link.is_symlink() and os.readlink(link) == "../kernels"


@pytest.mark.parametrize("name", MODULES)
def test_public_methods_have_a_docstring_or_inherit_one(name: str) -> None:
    """Modules, classes and functions are ruff's business (D1xx), which cannot see what a method inherits."""
    module = importlib.import_module(name)
    classes = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == name and c.__name__[0] != "_"]
    assert not [f"{c.__name__}.{m}" for c in classes for m in _methods(c) if not inspect.getdoc(getattr(c, m))]


def _methods(cls: type) -> list[str]:
    """The public methods and properties that a class itself defines."""
    return [n for n, v in vars(cls).items() if n[0] != "_" and (inspect.isfunction(v) or isinstance(v, property))]


def test_the_public_names_exist_and_have_a_docstring() -> None:
    assert sorted(tilekern.__all__) == sorted(set(tilekern.__all__))
    assert not [name for name in tilekern.__all__ if not inspect.getdoc(getattr(tilekern, name))]


def test_the_oldest_jax_that_is_tested_is_the_oldest_allowed() -> None:
    (jax,) = [requirement for requirement in PROJECT["dependencies"] if requirement.startswith("jax")]
    oldest = re.search(r">=([\d.]+)", jax)
    assert oldest and f"jax=={oldest[1]} jaxlib=={oldest[1]}" in (ROOT / "Makefile").read_text()


def test_the_versions_of_triton_that_are_installed_are_those_that_work() -> None:
    oldest, beyond = (".".join(map(str, version)) for version in (toolchain.OLDEST, toolchain.BEYOND))
    extras = PROJECT["optional-dependencies"]
    (user,), (tests,) = ([r for r in extras[extra] if r.startswith("triton")] for extra in ("cuda", "test"))
    assert user == tests.partition(";")[0] == f"triton>={oldest},<{beyond}"
    assert f"triton=={oldest}.0" in (ROOT / "Makefile").read_text()


def test_the_python_version_is_the_oldest_allowed() -> None:
    assert PROJECT["requires-python"] == ">=" + (ROOT / ".python-version").read_text().strip()


def test_version_python_and_licence_are_the_same_everywhere() -> None:
    python = (ROOT / ".python-version").read_text().strip()
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {PROJECT['version']}\n" in citation and f"\nlicense: {PROJECT['license']}\n" in citation
    assert PROJECT["version"] == tilekern.__version__


def test_the_code_of_the_readme_runs() -> None:
    """The ```python blocks of README.md, in order, in one namespace; a block's lines keep their numbers."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert blocks
    namespace = {"__name__": "readme"}
    for block in blocks:
        if '.lower("cuda:' in block[1]:
            pytest.importorskip("triton", reason="needs triton")
        above = "\n" * text.count("\n", 0, block.start(1))
        exec(compile(above + block[1], readme, "exec"), namespace)


DESIGN = ROOT / "docs" / "design"
RECORDS = sorted(DESIGN.glob("[0-9]*.md"))
STATUS = re.compile(r"Status: (accepted|(?:amended|superseded) by (.+)) \(\d{4}-\d\d-\d\d\)")
LINK = re.compile(r"\]\(([^)#]+\.md)")


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_record_has_a_status_and_is_listed_by_its_title(record: Path) -> None:
    heading, _, status, *_ = record.read_text().splitlines()
    title = heading.removeprefix("# ")
    words = re.findall(r"[a-z0-9]+", title.lower().replace("'", ""))
    assert record.stem[:4] == title[:4] and set(record.stem.split("-")) <= set(words)
    assert f"- {title}: design/{record.name}\n" in (ROOT / "mkdocs.yml").read_text()
    assert (DESIGN / "index.md").read_text().count(f"[{title}]({record.name})") == 1
    stated = STATUS.fullmatch(status)
    assert stated
    if stated[2]:
        assert all(link > record.name and (DESIGN / link).exists() for link in _later_records(stated[2]))


def _later_records(names: str) -> list[str]:
    """The files of the records `[NNNN](file)` that a status names, each by its own number."""
    links = [re.fullmatch(r"\[(\d{4})\]\((.+)\)", name) for name in names.split(" and ")]
    assert all(link and link[2].startswith(link[1]) for link in links)
    return [link[2] for link in links if link]


MEASUREMENTS = sorted((ROOT / "docs" / "measurements").glob("*.md"))


@pytest.mark.parametrize("page", MEASUREMENTS, ids=lambda page: page.name)
def test_a_measurement_has_its_machine_and_date_and_is_listed_by_its_title(page: Path) -> None:
    heading, _, *lines = page.read_text().splitlines()
    title, above = heading.removeprefix("# "), "\n".join(lines).partition("\n\n")[0]
    assert above.startswith("Machine: ") and re.search(r"\bDate: \d{4}-\d\d-\d\d\b", above)
    assert f"- {title}: measurements/{page.name}\n" in (ROOT / "mkdocs.yml").read_text()
    assert f"[{title}](../measurements/{page.name})" in (DESIGN / "index.md").read_text()


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_the_pages_that_a_page_links_to_exist(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *sorted(DESIGN.glob("*.md"))], ids=lambda page: page.name)
def test_the_modules_that_a_page_names_exist(page: Path) -> None:
    """Modules with their folder, from the root or from `tilekern/`; a bare `kernel.py` stands for many files."""
    named = re.findall(r"`((?:[\w<>]+/)+\w+\.py)`", page.read_text())
    assert not [n for n in named if "<" not in n and not (ROOT / n).exists() and not (ROOT / "tilekern" / n).exists()]


def test_the_template_for_faults_quotes_the_heading_of_the_script_that_check_prints() -> None:
    heading = "To make it again:"
    assert heading in (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text()
    assert heading in str(CheckError("wrong", "double(x)", "print(1)", ""))
