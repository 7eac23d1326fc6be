"""The picture of the architecture page agrees with the tree, and is drawn inside of its frame."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import tilekern
from docs.picture import BACKENDS, SHARED, WIDTH, svg

ROOT = Path(tilekern.__file__).parent

# Rooms beside the way of a kernel: the page speaks of them.
ASIDE = {"interpreter", "ptx"}


def test_every_room_of_a_backend_is_drawn() -> None:
    backends = {path.parent.name: path.parent for path in ROOT.glob("lower/*/lowering.py")}
    assert backends.keys() == BACKENDS.keys()
    for name, folder in backends.items():
        drawn = {room for rooms, _ in BACKENDS[name] for room in rooms.split()}
        rooms = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py") if path.parent.name not in ASIDE}
        calls = {"call.py"} if (folder / "call.py").exists() else set[str]()
        assert drawn == rooms | calls


def test_every_shared_stage_is_a_folder() -> None:
    assert all((ROOT / folder).is_dir() for _, folder, _ in SHARED)


def test_the_picture_is_one_element_without_empty_lines() -> None:
    """Markdown takes an element as it is up to the first empty line."""
    text = svg()
    root = ElementTree.fromstring(text)
    assert "\n\n" not in text and root.tag == "svg"
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for box in root.iter("rect"):
        left, top, wide, high = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert left >= 0 and left + wide <= width == WIDTH and top >= 0 and top + high <= height
    assert all(
        0 <= float(n) <= WIDTH for line in re.findall(r'points="([^"]*)"', text) for n in re.findall(r"[\d.]+", line)
    )
