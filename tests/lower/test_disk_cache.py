"""The files that are kept between processes."""

from __future__ import annotations

import errno
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

from tests.lang.checks import refused
from tilekern.errors import SettingError
from tilekern.lower import disk_cache

ROOT = Path(__file__).parents[2]
ROOM = disk_cache.Room("codes", max_bytes=1 << 30)
FILES = st.dictionaries(st.sampled_from(["launch.json", "ptx", "cubin"]), st.binary(max_size=2000), min_size=1)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with TemporaryDirectory() as base:
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        yield Path(base) / "tilekern" / "codes"


@given(files=FILES)
def test_what_is_stored_is_loaded(files: dict[str, bytes]) -> None:
    ROOM.store("entry", files)
    assert ROOM.load("entry", files) == files
    assert ROOM.load("entry", [*files, "another"]) is None
    assert ROOM.load("other", files) is None


@given(files=FILES, place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_entry_is_absent_or_harmless(files: dict[str, bytes], place: float, flip: int, cut: bool) -> None:
    ROOM.store("entry", files)
    base = disk_cache.folder()
    assert base is not None
    path = base / "codes" / "entry"
    content = bytearray(path.read_bytes())
    at = int(place * len(content))
    path.write_bytes(content[:at] if cut else content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :])
    assert ROOM.load("entry", files) in (None, files)
    ROOM.store("entry", files)
    assert ROOM.load("entry", files) == files


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
            ROOM.store("entry", version)
            found.append(ROOM.load("entry", version))
        return found

    with ThreadPoolExecutor(8) as pool:
        assert all(found in versions for many in pool.map(work, versions) for found in many)
    assert [file.name for file in folder.iterdir()] == ["entry"]


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.parent.write_text("a file where the folder should be")
    ROOM.store("entry", {"ptx": b"1"})
    assert ROOM.load("entry", ["ptx"]) is None


@pytest.mark.skipif(os.name != "posix", reason="needs permissions of POSIX")
def test_the_folder_is_private(folder: Path) -> None:
    ROOM.store("entry", {"ptx": b"1"})
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "entry").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.name != "posix", reason="needs permissions of POSIX")
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_not_used(folder: Path, mode: int) -> None:
    ROOM.store("entry", {"ptx": b"1"})
    folder.chmod(mode)
    assert ROOM.load("entry", ["ptx"]) is None
    ROOM.store("other", {"ptx": b"1"})
    assert [file.name for file in folder.iterdir()] == ["entry"]


def test_a_folder_among_the_files_stays(folder: Path) -> None:
    room = disk_cache.Room("codes", max_bytes=1)
    room.store("entry", {"ptx": b"1"})
    (folder / "of_another_program").mkdir()
    room.store("other", {"ptx": b"1"})
    assert [path.name for path in folder.iterdir()] == ["of_another_program"]


def test_a_system_without_permissions_uses_any_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ROOM.store("entry", {"ptx": b"1"})
    folder.chmod(0o777)
    monkeypatch.setattr(disk_cache.os, "name", "a system of another kind")
    assert ROOM.load("entry", ["ptx"]) == {"ptx": b"1"}


def run(program: str, folder: Path, **options: Any) -> subprocess.Popen[str]:
    """A process that runs a program with the cache in a folder."""
    code = f"import os, sys\nfrom tests.lower.test_disk_cache import ROOM\n{dedent(program)}"
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder.parents[1]), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, stdout=subprocess.PIPE, **options)


@pytest.mark.skipif(os.name != "posix", reason="needs limits of POSIX")
def test_a_full_disk_is_no_error(folder: Path) -> None:
    """The limit of a file's size fails as a full disk does: a write raises an OSError."""
    program = """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        ROOM.store("large", {"ptx": os.urandom(50_000)})
        ROOM.store("small", {"ptx": b"1"})
        print(ROOM.load("large", ["ptx"]), ROOM.load("small", ["ptx"]))
    """
    process = run(program, folder)
    assert process.communicate(timeout=60)[0] == "None {'ptx': b'1'}\n"
    assert [file.name for file in folder.iterdir()] == ["small"]


@pytest.mark.skipif(os.name != "posix", reason="needs signals of POSIX")
def test_processes_that_are_killed_leave_whole_entries(folder: Path) -> None:
    """Two processes write one entry at once, and are killed in the middle."""
    program = """
        while True:
            ROOM.store("entry", {"ptx": bytes([os.getpid() % 256]) * 300_000, "cubin": os.urandom(100_000)})
            print(flush=True)
    """
    processes = [run(program, folder) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for _ in range(50):
        found = ROOM.load("entry", ["ptx", "cubin"])
        assert found is not None and len(set(found["ptx"])) == 1 and len(found["cubin"]) == 100_000
    for process in processes:
        process.kill()
        process.communicate(timeout=60)
    found = ROOM.load("entry", ["ptx"])
    assert found is not None and len(found["ptx"]) == 300_000


def test_what_killed_processes_leave_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ROOM.store("entry", {"ptx": b"1"})
    (folder / "left.tmp").write_bytes(bytes(10_000))
    os.utime(folder / "left.tmp", (1000, 1000))
    disk_cache.Room("codes", max_bytes=5000).store("other", {"ptx": b"1"})
    assert {file.name for file in folder.iterdir()} == {"entry", "other"}


def test_the_place_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/ignored")
    monkeypatch.setenv("HOME", "/home/me")
    assert disk_cache.folder() == Path("/home/me/.cache/tilekern")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # pyright: ignore[reportUnknownLambdaType]
    assert disk_cache.folder() is None
    ROOM.store("entry", {"ptx": b"1"})
    assert ROOM.load("entry", ["ptx"]) is None


def test_what_was_used_least_recently_makes_room(folder: Path) -> None:
    content, names = os.urandom(1000), "abcdefgh"
    for age, name in enumerate(names):
        ROOM.store(name, {"ptx": content})
        os.utime(folder / name, (1000 + age, 1000 + age))
    assert ROOM.load("a", ["ptx"]) == {"ptx": content}  # used now, so it is no longer the oldest
    size = (folder / "a").stat().st_size
    room = disk_cache.Room("codes", max_bytes=8 * size)
    room.store("i", {"ptx": content})
    assert {file.name for file in folder.iterdir()} == set("aefghi"), "3/4 of 8"


@given(sizes=st.lists(st.integers(0, 4000), min_size=1, max_size=30))
def test_the_bound_is_kept(sizes: list[int]) -> None:
    with TemporaryDirectory() as base, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEKERN_CACHE", base)
        room = disk_cache.Room("codes", max_bytes=10_000)
        for number, size in enumerate(sizes):
            room.store(f"{number}", {"o": os.urandom(size)})
            files = list((Path(base) / "codes").iterdir())
            assert sum(file.stat().st_size for file in files) <= 10_000
            assert f"{number}" in {file.name for file in files}


def test_the_entry_of_another_key_is_absent(folder: Path) -> None:
    """Files are copied and renamed by people, and by other programs."""
    ROOM.store("entry", {"ptx": b"1"})
    (folder / "entry").rename(folder / "other")
    assert ROOM.load("other", ["ptx"]) is None
    ROOM.store("other", {"ptx": b"2"})
    assert ROOM.load("other", ["ptx"]) == {"ptx": b"2"}


def test_the_cache_is_turned_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ROOM.store("entry", {"ptx": b"1"})
    monkeypatch.setenv("TILEKERN_CACHE", "off")
    assert disk_cache.folder() is None and ROOM.load("entry", ["ptx"]) is None
    ROOM.store("other", {"ptx": b"1"})
    assert [file.name for file in folder.iterdir()] == ["entry"]


def test_a_folder_by_name(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEKERN_CACHE", str(tmp_path / "deep" / "cache"))
    ROOM.store("entry", {"ptx": b"1"})
    assert ROOM.load("entry", ["ptx"]) == {"ptx": b"1"}
    assert (tmp_path / "deep" / "cache" / "codes" / "entry").exists() and not folder.exists()


def test_a_folder_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEKERN_CACHE", "here")
    with refused(
        SettingError,
        "TILEKERN_CACHE",
        expected="absolute path of a folder, or off",
        got="TILEKERN_CACHE=here",
        fix="unset",
    ):
        ROOM.load("entry", ["ptx"])  # <-


def test_a_folder_to_read_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that is mounted to read has entries, and takes none."""
    ROOM.store("entry", {"ptx": b"1"})

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        for function in ("mkdir", "open", "utime", "replace", "unlink"):
            patch.setattr(os, function, refuse)
        assert ROOM.load("entry", ["ptx"]) == {"ptx": b"1"}
        ROOM.store("other", {"ptx": b"1"})
    assert [file.name for file in folder.iterdir()] == ["entry"]


@pytest.mark.skipif(os.name != "posix", reason="needs permissions of POSIX")
@pytest.mark.parametrize(("owner", "safe"), [(0, True), (12345, True), (54321, False)])
def test_the_folder_of_root_is_used(owner: int, safe: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image of a container has entries that root wrote."""
    ROOM.store("entry", {"ptx": b"1"})
    status = os.stat(folder)
    monkeypatch.setattr(os, "geteuid", lambda: 12345, raising=False)
    monkeypatch.setattr(os, "stat", lambda _: os.stat_result((*status[:4], owner, *status[5:])))
    assert (ROOM.load("entry", ["ptx"]) is not None) == safe
