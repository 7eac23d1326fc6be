"""Write the parts of the documentation that come from the code, into `build`: tables, and the picture of the tree."""

from pathlib import Path

import error_examples
import sequence_tables
from picture import svg

from tilekern.testing import support

BUILD = Path(__file__).parent.parent / "build"

if __name__ == "__main__":
    BUILD.mkdir(exist_ok=True)
    (BUILD / "support.md").write_text(support.markdown())
    (BUILD / "sequences.md").write_text(sequence_tables.markdown())
    (BUILD / "errors.md").write_text(error_examples.markdown())
    (BUILD / "architecture.svg").write_text(svg())
