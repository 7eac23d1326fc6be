"""The files that are kept between processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilekern.lower.triton.compile import disk_cache

ROOT = Path(__file__).parents[4]
FILES = st.dictionaries(st.sampled_from(["launch.json", "ptx", "cubin"]), st.binary(max_size=2000), min_size=1)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with TemporaryDirectory() as base:
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        yield Path(base) / "tilekern" / "triton"


@given(files=FILES)
def test_what_is_stored_is_loaded(files: dict[str, bytes]) -> None:
    disk_cache.store("entry", files)
    assert disk_cache.load("entry", files) == files
    assert disk_cache.load("entry", [*files, "another"]) is None
    assert disk_cache.load("other", files) is None


@given(files=FILES, place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_entry_is_absent_or_harmless(files: dict[str, bytes], place: float, flip: int, cut: bool) -> None:
    disk_cache.store("entry", files)
    base = disk_cache.folder()
    assert base is not None
    path = base / "triton" / "entry.zip"
    content = bytearray(path.read_bytes())
    at = int(place * len(content))
    path.write_bytes(content[:at] if cut else content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :])
    assert disk_cache.load("entry", files) in (None, files)
    disk_cache.store("entry", files)
    assert disk_cache.load("entry", files) == files


@given(parts=st.lists(st.text(max_size=3), max_size=4), others=st.lists(st.text(max_size=3), max_size=4))
def test_a_key_tells_its_parts_apart(parts: list[str], others: list[str]) -> None:
    assert (disk_cache.key(parts) == disk_cache.key(others)) == (parts == others)
    assert disk_cache.key([*parts, "ab", "c"]) != disk_cache.key([*parts, "a", "bc"])


def test_a_key_depends_on_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    before = disk_cache.key(["text"])
    monkeypatch.setattr(disk_cache, "FORMAT", "next")
    assert disk_cache.key(["text"]) != before


def test_threads_see_whole_entries_only(folder: Path) -> None:
    versions = [{"ptx": bytes([i]) * 50_000, "cubin": bytes([i])} for i in range(8)]

    def work(version: dict[str, bytes]) -> list[dict[str, bytes] | None]:
        found: list[dict[str, bytes] | None] = []
        for _ in range(10):
            disk_cache.store("entry", version)
            found.append(disk_cache.load("entry", version))
        return found

    with ThreadPoolExecutor(8) as pool:
        assert all(found in versions for many in pool.map(work, versions) for found in many)
    assert [file.name for file in folder.iterdir()] == ["entry.zip"]


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.parent.write_text("a file where the folder should be")
    disk_cache.store("entry", {"ptx": b"1"})
    assert disk_cache.load("entry", ["ptx"]) is None


@pytest.mark.skipif(os.name != "posix", reason="needs permissions of POSIX")
def test_the_folder_is_private(folder: Path) -> None:
    disk_cache.store("entry", {"ptx": b"1"})
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "entry.zip").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.name != "posix", reason="needs permissions of POSIX")
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_not_used(folder: Path, mode: int) -> None:
    disk_cache.store("entry", {"ptx": b"1"})
    folder.chmod(mode)
    assert disk_cache.load("entry", ["ptx"]) is None
    disk_cache.store("other", {"ptx": b"1"})
    assert [file.name for file in folder.iterdir()] == ["entry.zip"]


def test_a_folder_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_cache.store("entry", {"ptx": b"1"})
    monkeypatch.setattr(os, "geteuid", lambda: 12345, raising=False)
    assert disk_cache.load("entry", ["ptx"]) is None


def run(program: str, folder: Path, **options: Any) -> subprocess.Popen[str]:
    """A process that runs a program with the cache in a folder."""
    code = f"import os, sys\nfrom tilekern.lower.triton.compile import disk_cache\n{dedent(program)}"
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder.parents[1]), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, stdout=subprocess.PIPE, **options)


@pytest.mark.skipif(os.name != "posix", reason="needs limits of POSIX")
def test_a_full_disk_is_no_error(folder: Path) -> None:
    """The limit of a file's size fails as a full disk does: a write raises an OSError."""
    program = """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        disk_cache.store("large", {"ptx": os.urandom(50_000)})
        disk_cache.store("small", {"ptx": b"1"})
        print(disk_cache.load("large", ["ptx"]), disk_cache.load("small", ["ptx"]))
    """
    process = run(program, folder)
    assert process.communicate(timeout=60)[0] == "None {'ptx': b'1'}\n"
    assert [file.name for file in folder.iterdir()] == ["small.zip"]


@pytest.mark.skipif(os.name != "posix", reason="needs signals of POSIX")
def test_processes_that_are_killed_leave_whole_entries(folder: Path) -> None:
    """Two processes write one entry at once, and are killed in the middle."""
    program = """
        while True:
            disk_cache.store("entry", {"ptx": bytes([os.getpid() % 256]) * 300_000, "cubin": os.urandom(100_000)})
            print(flush=True)
    """
    processes = [run(program, folder) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for _ in range(50):
        found = disk_cache.load("entry", ["ptx", "cubin"])
        assert found is not None and len(set(found["ptx"])) == 1 and len(found["cubin"]) == 100_000
    for process in processes:
        process.kill()
        process.communicate(timeout=60)
    found = disk_cache.load("entry", ["ptx"])
    assert found is not None and len(found["ptx"]) == 300_000


def test_what_killed_processes_leave_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_cache.store("entry", {"ptx": b"1"})
    (folder / "left.tmp").write_bytes(bytes(10_000))
    os.utime(folder / "left.tmp", (1000, 1000))
    monkeypatch.setattr(disk_cache, "MAX_BYTES", 5000)
    disk_cache.store("other", {"ptx": b"1"})
    assert {file.name for file in folder.iterdir()} == {"entry.zip", "other.zip"}


def test_the_place_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/ignored")
    monkeypatch.setenv("HOME", "/home/me")
    assert disk_cache.folder() == Path("/home/me/.cache/tilekern")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # pyright: ignore[reportUnknownLambdaType]
    assert disk_cache.folder() is None
    disk_cache.store("entry", {"ptx": b"1"})
    assert disk_cache.load("entry", ["ptx"]) is None


def test_the_oldest_entries_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(1000)
    for age, name in enumerate("abc"):
        disk_cache.store(name, {"ptx": content})
        os.utime(folder / f"{name}.zip", (1000 + age, 1000 + age))
    monkeypatch.setattr(disk_cache, "MAX_BYTES", 3 * (folder / "a.zip").stat().st_size)
    disk_cache.store("d", {"ptx": content})
    assert [disk_cache.load(name, ["ptx"]) is not None for name in "abcd"] == [False, True, True, True]
