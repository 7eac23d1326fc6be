"""Write what the documentation takes from the code: `build/support.md`, the table of ops, dtypes and backends."""

from pathlib import Path

from tilekern.lower.support import markdown

BUILD = Path(__file__).parent.parent / "build"

if __name__ == "__main__":
    BUILD.mkdir(exist_ok=True)
    (BUILD / "support.md").write_text(markdown())
