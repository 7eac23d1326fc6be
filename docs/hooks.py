"""What MkDocs calls while it builds the site."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from docs.pages import with_pictures


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Draw the pictures of a page from its own kernels."""
    return with_pictures(page.file.src_uri, markdown)
