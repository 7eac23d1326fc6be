"""The store of what XLA compiles in tests, in the user's folder of caches.

All processes, runs and checkouts share it.
A third of the processor time of a first run is XLA's: a reference is compiled for each backend of a kernel, and after
each `jax.clear_caches`. The next run compiles it again. JAX makes the key of an entry of the program, XLA's version and
XLA's flags, so an entry is right for each checkout. JAX itself writes an entry in the open, and another process could
read half of it. Here an entry appears as a whole.

The object files of `cpu:llvm` lie in tilekern's own cache, whose folder all checkouts share. All else of this cache
belongs to a checkout.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import tempfile
from pathlib import Path

import jax
from jax._src import compilation_cache  # noqa: TID251 -- JAX has no public way to replace its store
from jax._src.lru_cache import LRUCache  # noqa: TID251 -- the same

from tilekern.lower.llvm.compile import toolchain

MOST_BYTES = 1 << 30
"""Bytes over which a run begins with removing the entries that were used least recently, until half of it is left."""


def folder(*parents: Path) -> Path:
    """The folder for this CPU in the first of `parents` that can be written: code for another CPU may not run here."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else platform.processor()
    flags = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), text)
    name = hashlib.sha256(flags.encode()).hexdigest()[:12]
    for parent in parents:
        path = parent / "tilekern-tests" / "xla" / name
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(path, os.W_OK):
            return path
    raise OSError(f"expected a folder that can be written, for what XLA compiles; got {parents=}")


class Store(LRUCache):
    """JAX's store of files, whose entries appear as a whole, and remember when they were used."""

    def get(self, key: str) -> bytes | None:
        """The entry of `key`, None if there is none."""
        try:
            entry = self._entry(key)
            os.utime(entry)
            return entry.read_bytes()
        except FileNotFoundError:
            return None

    def put(self, key: str, value: bytes) -> None:
        """Add the entry of `key`; a full disk, or a folder that may not be written, adds none."""
        with tempfile.NamedTemporaryFile(dir=str(self.path), prefix="new-", delete=False) as file:
            file.write(value)
        os.replace(file.name, self._entry(key))

    def _entry(self, key: str) -> Path:
        return Path(str(self.path)) / f"{key}-cache"


def keep(path: Path) -> None:
    """Keep in the folder what this process compiles from now on, however small it is."""
    compilation_cache.get_file_cache = lambda path: (Store(path, max_size=-1), path)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def link_machine_code(path: Path, cache: Path) -> None:
    """Make a folder, which all checkouts share, the place of the machine code of `cpu:llvm` in a checkout's cache.

    Args:
      path: the shared folder.
      cache: the folder of the checkout's cache, as `tilekern.lower.disk_cache.folder` has it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    link = cache / toolchain.CACHE.name
    with contextlib.suppress(FileExistsError):  # a run before this one, or another process
        link.symlink_to(path)


def prune(path: Path, most: int = MOST_BYTES) -> None:
    """Remove the entries that were used least recently until half of `most` bytes is left, if there are over `most`."""
    with os.scandir(path) as scan:
        entries = sorted((e.stat().st_mtime, e.stat().st_size, e.path) for e in scan if e.is_file())
    total = sum(size for _, size, _ in entries)
    surplus = total - most // 2 if total > most else 0
    for _, size, entry in entries:
        if surplus <= 0:
            return
        Path(entry).unlink(missing_ok=True)
        surplus -= size
