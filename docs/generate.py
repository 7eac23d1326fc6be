"""Write the parts of the documentation that come from the code, into `build`: tables, and the picture of the tree."""

from pathlib import Path

import error_examples
from picture import svg

from tilekern.lower import sequence, support
from tilekern.lower.target import TARGETS

BUILD = Path(__file__).parent.parent / "build"

SEQUENCES = ["cpu:xla", "cpu:llvm", "cuda:sm_90", "tpu:v5e"]
"""One target of each backend. Other targets of a backend leave out passes, or add some."""


def sequences() -> str:
    """The passes of each backend, as tables under headings."""
    return "\n".join(f"### {name}\n\n{sequence.markdown(TARGETS[name])}" for name in SEQUENCES)


if __name__ == "__main__":
    BUILD.mkdir(exist_ok=True)
    (BUILD / "support.md").write_text(support.markdown())
    (BUILD / "sequences.md").write_text(sequences())
    (BUILD / "errors.md").write_text(error_examples.markdown())
    (BUILD / "architecture.svg").write_text(svg())
