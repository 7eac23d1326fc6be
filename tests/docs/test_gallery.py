"""The gallery: a picture of each kernel of the library."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from docs import gallery

ROOT = Path(__file__).parents[2]


def test_every_folder_of_the_library_has_a_picture() -> None:
    drawn = re.findall(r'gallery\.tiles\("(\w+)", ', (ROOT / "docs" / "gallery.md").read_text())
    folders = [path.parent.name for path in (ROOT / "kernels").glob("*/cases.py")]
    assert sorted(drawn) == sorted(folders)


def test_a_picture_shows_the_arrays_of_the_kernel() -> None:
    words = ElementTree.fromstring(gallery.tiles("softmax", "vit_b16_classes").svg).itertext()
    assert {"x", "out", "load", "store"} <= {word.strip() for word in words}
