"""Write the parts of the documentation that come from the code.

Into `build`: tables, and the picture of the tree. Into `docs/pictures`: the pictures of the README, which are kept in
the repository.
"""

from collections.abc import Iterator
from pathlib import Path

from docs import error_examples, pages, plots, sequence_tables
from docs.picture import svg
from tilekern.testing import support

ROOT = Path(__file__).parent.parent


def pictures() -> Iterator[tuple[str, str]]:
    """The pictures of the README: file names in `docs/pictures`, and SVG."""
    readme = (ROOT / "README.md").read_text()
    first_block = readme[: readme.index("```\n", readme.index("```python")) + 4]
    mark = "<!-- picture: matmul.trace(x, w).draw() -->"
    (drawn,) = (p for p in pages.run("README.md", f"{first_block}\n{mark}\n") if isinstance(p, pages.Drawn))
    yield "matmul.svg", str(drawn.picture)
    yield "attention-h100.svg", str(plots.h100_attention(4096))


if __name__ == "__main__":
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    (build / "support.md").write_text(support.markdown())
    (build / "sequences.md").write_text(sequence_tables.markdown())
    (build / "errors.md").write_text(error_examples.markdown())
    (build / "architecture.svg").write_text(svg())
    for name, text in pictures():
        (ROOT / "docs" / "pictures" / name).write_text(f"{text}\n")
