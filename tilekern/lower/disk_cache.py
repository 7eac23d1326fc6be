"""The disk cache of compiled programs: files found by a hash of everything that decides their contents.

A temporary file is renamed to an entry, so an entry appears complete, and any number of processes may read and write.
An entry begins with a hash of its key and its contents: a damaged entry, or the entry of another key, counts as absent,
and the next `store` replaces it. No state of the disk is an error: without permissions, on a full disk, or without a
home, the next process repeats the work.

The files become code that runs. So the folder is for its user only. A folder is not used if another user than root owns
it, or if others may write to it.

`TILEKERN_CACHE` names another folder by its absolute path, or is `off`: then nothing is read and nothing is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tilekern.errors import SettingError

FORMAT = "2"
"""Version of the format, a part of every key; raised when older entries can no longer be read."""

VARIABLE = "TILEKERN_CACHE"
"""The environment variable that names the folder of the cache, or turns the cache off."""

_HASH_BYTES = hashlib.sha256().digest_size


def folder() -> Path | None:
    """The folder of the cache: `tilekern` in the user's cache folder, by the XDG Base Directory Specification.

    Returns:
      The folder that `TILEKERN_CACHE` names, if it is set. None if it is `off`, and for a user without a home.

    Raises:
      SettingError: `TILEKERN_CACHE` is neither `off` nor the absolute path of a folder.
    """
    named = os.environ.get(VARIABLE, "")
    if named == "off":
        return None
    if os.path.isabs(named):
        return Path(named)
    if named:
        raise SettingError(
            f"{VARIABLE} names no folder",
            expected="the absolute path of a folder, or off",
            got=f"{VARIABLE}={named}",
            fix="correct or unset the variable: then the cache is in ~/.cache/tilekern",
        )
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


@dataclass
class Room:
    """A part of the cache with a bound of its own: a folder in `folder()`.

    Attributes:
      name: of the folder.
      max_bytes: size of the folder above which the entries used least recently are removed, until 3/4 of it are left.
    """

    name: str
    max_bytes: int

    def __post_init__(self) -> None:
        # Bytes of the folder when it was last looked through, and what this process has written since.
        self._bytes: dict[Path, int] = {}

    def load(self, key: str, names: Iterable[str]) -> dict[str, bytes] | None:
        """The contents of the files `names` of the entry `key`, by file; None if a file is missing or damaged."""
        path = self._path(key)
        if path is None or not _is_safe(path.parent):
            return None
        try:
            files = _decoded(key, path.read_bytes())
            contents = {name: files[name] for name in names}
        except Exception:  # missing, damaged or of another format: OSError, zlib.error, ValueError, KeyError and more
            return None
        with contextlib.suppress(OSError):  # the time of the last use, by which `store` removes entries
            os.utime(path)
        return contents

    def store(self, key: str, files: Mapping[str, bytes]) -> None:
        """Write `files` as the entry `key`, if the folder can be written to."""
        path = self._path(key)
        if path is None:
            return
        with contextlib.suppress(OSError):
            path.parent.parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            if _is_safe(path.parent):
                self._make_room(path.parent, _replace(path, _encoded(key, files)))

    def _path(self, key: str) -> Path | None:
        base = folder()
        return base and base / self.name / key

    def _make_room(self, directory: Path, added: int) -> None:
        """Remove the oldest files, leftovers of killed processes among them, if there is more than `max_bytes`.

        The folder is looked through at the first entry of a process, and when the bound may have been reached.
        """
        if directory in self._bytes:
            self._bytes[directory] += added
            if self._bytes[directory] <= self.max_bytes:
                return
        with os.scandir(directory) as entries:
            files = [(entry.stat(), entry.path) for entry in entries if entry.is_file()]
        total = sum(status.st_size for status, _ in files)
        least = total if total <= self.max_bytes else self.max_bytes * 3 // 4
        for status, path in sorted(files, key=lambda item: item[0].st_mtime):
            if total <= least:
                break
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                os.unlink(path)
            total -= status.st_size
        self._bytes[directory] = total


def _encoded(key: str, files: Mapping[str, bytes]) -> bytes:
    """An entry: a hash of the key and the body. The body: the names and sizes of the files, and their contents."""
    table = json.dumps({name: len(content) for name, content in files.items()}).encode()
    body = zlib.compress(b"\n".join((table, b"".join(files.values()))), level=1)
    return hashlib.sha256(key.encode() + body).digest() + body


def _decoded(key: str, entry: bytes) -> dict[str, bytes]:
    """The files of an entry.

    Raises:
      ValueError: the entry is damaged, or is the entry of another key.
    """
    body = entry[_HASH_BYTES:]
    if hashlib.sha256(key.encode() + body).digest() != entry[:_HASH_BYTES]:
        raise ValueError("damaged")
    table, _, contents = zlib.decompress(body).partition(b"\n")
    files: dict[str, bytes] = {}
    for name, size in json.loads(table).items():
        files[name], contents = contents[:size], contents[size:]
    return files


def _is_safe(directory: Path) -> bool:
    """True if no user but this user and root can have written to a folder."""
    if os.name != "posix":
        return True
    try:
        status = os.stat(directory)
    except OSError:
        return False
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _replace(path: Path, content: bytes) -> int:
    """Write a file under another name and rename it, so that no reader sees an incomplete file; returns its size."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return len(content)
