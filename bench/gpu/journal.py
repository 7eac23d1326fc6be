"""The journal of a run: a line of JSON when an item begins, and one when it ends, so that a crash loses nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path

from bench.gpu.item import Record


class Journal:
    """A file of lines, written by the child and read by its parent."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, name: str) -> None:
        """Record the begin of an item."""
        self._append({"item": name, "begun": time.time()})

    def end(self, name: str, record: Record) -> None:
        """Record the end of an item."""
        self._append({"item": name, "record": record})

    def read(self) -> dict[str, Record | None]:
        """The records of all items that were begun; None for an item that did not end."""
        items: dict[str, Record | None] = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            try:
                entry = json.loads(line)
            except ValueError:  # the process was killed within a line
                continue
            items[entry["item"]] = entry.get("record")
        return items

    def _append(self, entry: Record) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
