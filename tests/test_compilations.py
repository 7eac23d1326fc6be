"""The store of what XLA compiles: shared by processes, whole entries, bounded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import compilations

PROGRAM = """
import sys, jax
from pathlib import Path
from tests import compilations
compilations.keep(Path(sys.argv[1]))
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if "cache_hits" in name else None)
assert float(jax.jit(lambda x: x * 3 + 1)(2.0)) == 7
print(len(hits))
"""


def run(folder: Path) -> int:
    """How many programs a new process finds in the store."""
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": root}
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(folder)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def test_another_process_compiles_nothing_again(tmp_path: Path) -> None:
    assert run(tmp_path) == 0
    (entry,) = tmp_path.iterdir()
    os.utime(entry, (0, 0))
    assert run(tmp_path) == 1
    assert entry.stat().st_mtime > 0, "an entry remembers when it was used"


def test_checkouts_share_machine_code(tmp_path: Path) -> None:
    for checkout in ("a", "b", "b"):
        compilations.link_machine_code(tmp_path / "shared", tmp_path / checkout / "tilekern")
    (tmp_path / "a" / "tilekern" / "llvm" / "entry").write_bytes(b"code")
    assert (tmp_path / "b" / "tilekern" / "llvm" / "entry").read_bytes() == b"code"


def test_an_entry_appears_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, seen = compilations.Store(str(tmp_path), max_size=-1), list[bytes | None]()
    replace = os.replace

    def watched(source: str, target: Path) -> None:
        seen.append(store.get("a"))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    store.put("a", b"first")
    assert store.get("a") == b"first"
    store.put("a", b"second")
    assert seen == [None, b"first"]
    assert [path.name for path in tmp_path.iterdir()] == ["a-cache"]


def test_what_was_used_least_recently_is_removed(tmp_path: Path) -> None:
    store = compilations.Store(str(tmp_path), max_size=-1)
    for number in range(10):
        store.put(f"{number}", bytes(100))
        os.utime(tmp_path / f"{number}-cache", (number, number))
    store.get("0")
    compilations.prune(tmp_path, most=1000)
    assert len(list(tmp_path.iterdir())) == 10
    compilations.prune(tmp_path, most=999)
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["0", "7", "8", "9"]


def test_a_home_that_cannot_be_written_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = compilations.folder(tmp_path / "file", tmp_path / "build")
    assert path.is_relative_to(tmp_path / "build") and path.is_dir()
    with pytest.raises(OSError, match="expected a folder that can be written"):
        compilations.folder(tmp_path / "file")
