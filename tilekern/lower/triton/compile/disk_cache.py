"""Files that are kept between processes, found by a hash of all that decides their contents.

An entry is one zip archive. It appears at once and complete (a temporary file is renamed), so any number of processes
may read and write; whatever cannot be read back whole, by the archive's checksums, is as good as absent. A folder
that cannot be written to is no error: the work is done again in the next process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

FORMAT = "1"
"""Goes into every key: raised when older entries can no longer be read."""

MAX_BYTES = 2 << 30
"""Above this size of the folder the oldest entries are removed."""


def folder() -> Path | None:
    """Where entries lie: `tilekern` in the user's cache folder, by the XDG Base Directory Specification."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # "All paths set in these environment variables must be absolute": others are ignored
        return Path(base) / "tilekern"
    try:
        return Path.home() / ".cache" / "tilekern"
    except RuntimeError:  # a user without a home
        return None


def key(parts: Iterable[str]) -> str:
    """The name of the entry that `parts` decide."""
    digest = hashlib.sha256()
    for part in (FORMAT, *parts):
        # The length in front keeps ("ab", "c") and ("a", "bc") apart.
        digest.update(f"{len(part.encode())}:{part}".encode())
    return digest.hexdigest()


def load(name: str, names: Iterable[str]) -> dict[str, bytes] | None:
    """The files `names` of entry `name`; None if one of them is missing or damaged."""
    path = _path(name)
    if path is None:
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            return {file: archive.read(file) for file in names}
    except Exception:  # of a damaged archive zipfile raises a dozen kinds, struct.error and zlib.error among them
        return None


def store(name: str, files: Mapping[str, bytes]) -> None:
    """Keep `files` as entry `name`, if the folder lets us."""
    path = _path(name)
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, files)
        _remove_oldest(path.parent)


def _path(name: str) -> Path | None:
    base = folder()
    return base and base / "triton" / f"{name}.zip"


def _replace(path: Path, files: Mapping[str, bytes]) -> None:
    """Write an archive under another name and rename it, so that no reader sees a part of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _remove_oldest(directory: Path) -> None:
    """Remove what was written first until the rest fits `MAX_BYTES`; leftovers of killed processes count."""
    with os.scandir(directory) as entries:
        status = [(entry.stat(), entry.path) for entry in entries if entry.is_file()]
    excess = sum(stat.st_size for stat, _ in status) - MAX_BYTES
    for stat, path in sorted(status, key=lambda item: item[0].st_mtime):
        if excess <= 0:
            return
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.unlink(path)
        excess -= stat.st_size
