"""The journal of a run: a line of JSON when an item begins, one when it ends, so that no crash loses what was done."""

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
        """An item is begun."""
        self._append({"item": name, "begun": time.time()})

    def end(self, name: str, record: Record) -> None:
        """An item is done."""
        self._append({"item": name, "record": record})

    def read(self) -> dict[str, Record | None]:
        """The record of every item that was begun; None where it did not end."""
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
