"""Drawn faults: a sample of the edits of the package, as large in each room, always the same one.

The order in a room depends on the names of edits alone. A larger sample begins with the smaller one, and an edit of one
function moves no fault of another.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from tests.mutants.edits import KINDS, Edit, edits
from tests.mutants.reach import files_of_package

ROOMS: dict[str, tuple[str, ...]] = {
    "meshes": (
        "tilekern/_meshes.py",
        "tilekern/authoring/meshes.py",
        "tilekern/ir/analysis/sharding.py",
        "tilekern/kernel/divided.py",
        "tilekern/kernel/sharding_rule.py",
        "tilekern/kernel/stated_sharding.py",
        "tilekern/lower/partitioning.py",
        "tilekern/passes/divide.py",
        "tilekern/distributed/",
    ),
    "analysis": ("tilekern/ir/analysis/",),
    "ir": ("tilekern/ir/",),
    "passes": ("tilekern/passes/",),
    "autodiff": ("tilekern/autodiff/",),
    "lang": ("tilekern/lang/", "tilekern/authoring/", "tilekern/_interception.py"),
    "llvm": ("tilekern/lower/llvm/",),
    "mosaic": ("tilekern/lower/mosaic/",),
    "triton": ("tilekern/lower/triton/",),
    "xla": ("tilekern/lower/xla/",),
    "lower": ("tilekern/lower/",),
    "testing": ("tilekern/testing/",),
    "training": ("tilekern/training/",),
    "nn": ("tilekern/nn/",),
    "kernels": ("kernels/",),
    "kernel": ("tilekern/",),
}
"""Paths of the files of a room; the first room that has a file holds it."""

# Data of tests, measured numbers, and text for people.
_LEFT_OUT = re.compile(
    r"(^|/)(cases|reference|calibration|errors|describe|plan_text|report|__main__)\.py$|/command_line/"
)


def room_of(file: str) -> str:
    """The room that holds a file."""
    return next(room for room, paths in ROOMS.items() if file.startswith(paths))


def drawn(count: int, files: dict[str, str] | None = None, chosen: Collection[str] = ()) -> list[Edit]:
    """At least `count` faults, as many from each room as it has; from all rooms, if none are chosen."""
    rooms = defaultdict[str, dict[str, str]](dict)
    for file, text in (files_of_package() if files is None else files).items():
        if not _LEFT_OUT.search(file) and (not chosen or room_of(file) in chosen):
            rooms[room_of(file)][file] = text
    share = -(-count // len(rooms))
    return [edit for room in ROOMS if room in rooms for edit in _of_room(rooms[room], share)]


def _of_room(texts: dict[str, str], share: int) -> list[Edit]:
    """Faults of a room: kinds take turns, and no function has two before each has one."""
    kinds: dict[str, list[Edit]] = {kind: [] for kind in KINDS}
    for file, text in texts.items():
        for edit in edits(file, text):
            kinds[edit.kind].append(edit)
    queues = [sorted(found, key=lambda edit: _hash(edit.name)) for found in kinds.values()]
    chosen: list[Edit] = []
    while len(chosen) < share and any(queues):
        used = {(edit.file, edit.scope) for edit in chosen}
        for queue in queues:
            place = next((n for n, edit in enumerate(queue) if (edit.file, edit.scope) not in used), 0)
            for edit in _changes(queue[place:], texts):
                queue.remove(edit)
                used.add((edit.file, edit.scope))
                chosen.append(edit)
                break
    return chosen[:share]


def _changes(queue: Sequence[Edit], texts: dict[str, str]) -> Iterator[Edit]:
    """The edits whose text parses, and means something else."""
    for edit in queue:
        text = texts[edit.file]
        try:
            planted = ast.parse(edit.planted(text))
        except SyntaxError:
            continue
        if ast.dump(planted) != ast.dump(ast.parse(text)):
            yield edit


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
