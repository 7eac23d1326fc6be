"""The disk cache of compiled programs: files found by a hash of everything that decides their contents.

An entry is one zip archive. A temporary file is renamed to it, so it appears complete, and any number of processes may
read and write. An entry that does not pass the archive's checksums counts as absent. A folder without write permission
is no error: the next process repeats the work. Nor is a full disk.

The files become code that runs. So the folder is for its user only. A folder that another user owns, or may write to,
is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

FORMAT = "1"
"""Version of the format, a part of every key; raised when older entries can no longer be read."""

MAX_BYTES = 2 << 30
"""Size of the folder above which the oldest entries are removed."""


def folder() -> Path | None:
    """The folder of the cache: `tilekern` in the user's cache folder, by the XDG Base Directory Specification."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # "All paths set in these environment variables must be absolute": others are ignored
        return Path(base) / "tilekern"
    try:
        return Path.home() / ".cache" / "tilekern"
    except RuntimeError:  # a user without a home
        return None


def key(parts: Iterable[str]) -> str:
    """The name of the entry for `parts`: a hash of all parts."""
    digest = hashlib.sha256()
    for part in (FORMAT, *parts):
        # The length in front keeps ("ab", "c") and ("a", "bc") apart.
        digest.update(f"{len(part.encode())}:{part}".encode())
    return digest.hexdigest()


def load(name: str, names: Iterable[str]) -> dict[str, bytes] | None:
    """The contents of the files `names` of entry `name`, by file; None if a file is missing or damaged."""
    path = _path(name)
    if path is None or not _is_private(path.parent):
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            return {file: archive.read(file) for file in names}
    except Exception:  # zipfile raises a dozen kinds for damaged archives, struct.error and zlib.error among them
        return None


def store(name: str, files: Mapping[str, bytes]) -> None:
    """Write `files` as entry `name`, if the folder can be written to."""
    path = _path(name)
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if _is_private(path.parent):
            _replace(path, files)
            _remove_oldest(path.parent)


def _path(name: str) -> Path | None:
    base = folder()
    return base and base / "triton" / f"{name}.zip"


def _is_private(directory: Path) -> bool:
    """True if no other user can have written to a folder."""
    if os.name != "posix":
        return True
    try:
        status = os.stat(directory)
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _replace(path: Path, files: Mapping[str, bytes]) -> None:
    """Write an archive under another name and rename it, so that no reader sees an incomplete archive."""
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
    """Remove the oldest files, leftovers of killed processes among them, until the remaining files fit `MAX_BYTES`."""
    with os.scandir(directory) as entries:
        files = [(entry.stat(), entry.path) for entry in entries if entry.is_file()]
    excess = sum(status.st_size for status, _ in files) - MAX_BYTES
    for status, path in sorted(files, key=lambda item: item[0].st_mtime):
        if excess <= 0:
            return
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.unlink(path)
        excess -= status.st_size
