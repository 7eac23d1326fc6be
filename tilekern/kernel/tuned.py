"""Tuned blocks: the table of a file, the calls that use it, and how files merge.

    {
    "format": "tilekern tuned, version 1",
    "entries": [
    {"kernel": "double", "ir": "90bf…", "extents": {"x[1]": 4096}, …, "settings": {"block": 64}, …}
    ]
    }

An entry stands on a line of its own, so that files diff and merge by lines. It fits a call whose `Key` is the entry's
key. A call without such an entry has the blocks of its schedule. Blocks never change results, so a wrong entry costs
time only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

import jax

from tilekern.errors import ArgumentError, LoadError, checked
from tilekern.ir.records import record
from tilekern.kernel.choice import Tunable

FORMAT = "tilekern tuned, version 1"
VARIABLE = "TILEKERN_TUNED"
"""The environment variable that names a file for all calls of a process."""


@record
class Key:
    """The calls that an entry fits.

    Attributes:
      kernel: the name of the kernel.
      ir: a hash of the block IR with the schedule's own blocks, in which extents and blocks have no numbers.
      gradient: True for the kernels of derived derivatives.
      extents: for each dim that not only the grid divides, "x[1]", the least power of two that holds it; in tables
        that tilekern ships the size of each dim of each array.
      programs: the least power of two that holds the number of programs, 1,024 for more; in tables that tilekern ships
        the number itself.
      fixed: the blocks, choices and launch options that the call itself gives.
      target: the target, with its emitter; "cuda:sm_90+auto" for calls that leave the emitter open.
      device: the machine, "NVIDIA H100 80GB HBM3"; "" for any machine of the target, which estimates are for.
      versions: of tilekern, jax, and the package that the target compiles with; of this package alone in tables that
        tilekern ships.
    """

    kernel: str
    ir: str
    gradient: bool
    extents: tuple[tuple[str, int], ...]
    programs: int
    fixed: tuple[tuple[str, Tunable], ...]
    target: str
    device: str
    versions: tuple[tuple[str, str], ...]


@record
class Entry:
    """The fastest settings of a kernel for the calls of a key.

    Attributes:
      key: the calls.
      settings: blocks, choices and launch options.
      by: the source of the seconds, a "measurement" or an "estimate".
      seconds: the time of a call.
      default_seconds: the time with the schedule's own settings; None if the target refuses these.
      confidence: the probability that the settings are not slower than the schedule's, by a sign test; None for
        estimates.
      date: the day, "2026-11-26".
      emitter: the fastest emitter, "gluon", for a key that leaves it open; "" for all other keys.
    """

    key: Key
    settings: tuple[tuple[str, Tunable], ...]
    by: Literal["measurement", "estimate"]
    seconds: float
    default_seconds: float | None
    confidence: float | None
    date: str
    emitter: str = ""


_PAIRS = ("extents", "fixed", "versions")


def fields_of(record: Entry | Key) -> dict[str, Any]:
    """An entry or a key as an object of JSON."""
    fields = vars(record)
    if isinstance(record, Entry):
        fields = {**vars(record.key), **fields}
        del fields["key"]
        if not record.emitter:
            del fields["emitter"]
    return {name: dict(value) if name in (*_PAIRS, "settings") else value for name, value in fields.items()}


def entry_of(fields: Any) -> Entry:
    """The entry of an object of JSON.

    Raises:
      ValueError, TypeError, KeyError, AttributeError: it is none.
    """
    settings = _settings(fields["settings"])
    extents = tuple((str(name), int(size)) for name, size in fields["extents"].items())
    versions = tuple((str(name), str(version)) for name, version in fields["versions"].items())
    texts = [str(fields[name]) for name in ("kernel", "ir", "target", "device")]
    kernel, ir, target, device = texts
    programs, gradient, by = int(fields["programs"]), fields["gradient"] is True, fields["by"]
    key = Key(kernel, ir, gradient, extents, programs, _settings(fields["fixed"]), target, device, versions)
    if by not in ("measurement", "estimate"):
        raise ValueError(f"by = {by!r}")
    default, confidence, emitter = fields["default_seconds"], fields["confidence"], fields.get("emitter", "")
    if not isinstance(emitter, str):
        raise TypeError(f"emitter = {emitter!r}")
    return Entry(
        key,
        settings,
        by,
        float(fields["seconds"]),
        None if default is None else float(default),
        None if confidence is None else float(confidence),
        str(fields["date"]),
        emitter,
    )


def _settings(values: Mapping[str, Any]) -> tuple[tuple[str, Tunable], ...]:
    for name, value in values.items():
        if not isinstance(value, str | bool) and not (isinstance(value, int) and value >= 1):
            raise ValueError(f"{name} = {value!r}")
    return tuple(values.items())


@dataclass(frozen=True, init=False)
class Tuned:
    """Tuned blocks of kernels: calls that are traced inside of `with tk.tuned("file.json"):` have them.

    Attributes:
      entries: one for each key.
      shipped: False if kernels of tilekern do not have the blocks of the tables that it ships, either.

    Example:
      >>> import jax, jax.numpy as jnp, tilekern as tk
      >>> @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
      ... def double(x, out, *, block: tk.Block = 128):
      ...     i = tk.parallel(x.shape[0], block)
      ...     out[i] = x[i] * 2
      >>> with tk.Tuned():  # no entries: the blocks of the kernel
      ...     double(jnp.arange(3.0))
      Array([0., 2., 4.], dtype=float32)
    """

    entries: tuple[Entry, ...]
    shipped: bool

    @checked
    def __init__(self, entries: Any = (), *, shipped: bool = True) -> None:
        object.__setattr__(self, "entries", entries)
        object.__setattr__(self, "shipped", shipped)
        if not (isinstance(entries, tuple) and all(isinstance(e, Entry) for e in cast(tuple[Any, ...], entries))):
            raise ArgumentError(
                "a table of tuned blocks holds entries",
                expected="a tuple of entries of other tables, tk.Tuned(table.entries[:1])",
                got=f"{entries=!r}",
                fix="read a file with tk.tuned(path), or tune with kernel.tune(...).tuned",
            )

    @cached_property
    def _by_key(self) -> dict[Key, Entry]:
        return {entry.key: entry for entry in self.entries}

    @cached_property
    def names(self) -> frozenset[tuple[str, str, bool]]:
        """The kernels with an entry: name, target and whether it is for derivatives."""
        return frozenset((key.kernel, key.target, key.gradient) for key in self._by_key)

    @cached_property
    def _text(self) -> str:
        lines = ",\n".join(json.dumps(fields_of(entry)) for entry in self.entries)
        return f'{{\n"format": {json.dumps(FORMAT)},\n"entries": [\n{lines}\n]\n}}\n'

    @cached_property
    def _digest(self) -> bytes:
        return hashlib.sha256(self._text.encode()).digest()

    def __hash__(self) -> int:
        """JAX traces again for another table, not for another object with the same entries."""
        return hash(self._digest)

    def entry(self, key: Key) -> Entry | None:
        """The entry for a call; None if the table has none."""
        by_key = self._by_key
        return by_key.get(key) or by_key.get(replace(key, device=""))

    @checked
    def merge(self, *others: Tuned) -> Tuned:
        """The entries of all tables. Of two for one key a measurement wins over an estimate, else the later table."""
        entries: dict[Key, Entry] = {}
        for entry in (entry for table in (self, *others) for entry in table.entries):
            earlier = entries.get(entry.key)
            if earlier is None or entry.by == "measurement" or earlier.by == "estimate":
                entries[entry.key] = entry
        ordered = tuple(sorted(entries.values(), key=lambda entry: repr(entry.key)))
        return Tuned(ordered, shipped=all(table.shipped for table in (self, *others)))

    @checked
    def save(self, path: str | PathLike[str]) -> None:
        """Write the entries to a file, beside those that it has for other keys.

        Raises:
          tilekern.errors.LoadError: the file exists, and holds something else.
          tilekern.errors.ArgumentError: it cannot be written.
        """
        file = Path(path)
        merged = check_replaceable(file).merge(self)
        temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}.tmp")
        try:
            temporary.write_text(merged._text, encoding="utf-8", newline="\n")
            temporary.replace(file)
        except OSError as error:
            raise _unwritable(file, error) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        around = active()
        context = _context(self if around is None else around.merge(self))
        context.__enter__()
        _contexts().append(context)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _contexts().pop().__exit__(kind, error, tb)


# JAX traces and compiles again where the value changes. One for each process: making one is not safe among threads.
_context: Any = cast(Any, jax).make_user_context(default_value=None)
_of_thread = threading.local()


def _contexts() -> list[Any]:
    """The contexts that this thread is in."""
    contexts: list[Any] = _of_thread.__dict__.setdefault("contexts", [])
    return contexts


@checked
def tuned(path: str | PathLike[str]) -> Tuned:
    """The tuned blocks of a file that `kernel.tune(...).save` wrote, for calls inside of a `with`.

    The file is read once. Blocks that a call gives win over the file, the file over the schedule. A call whose kernel,
    extents, machine or versions are not in the file has the blocks of its schedule: nothing is tuned by a call. The
    environment variable `TILEKERN_TUNED` names a file for all calls of a process. With one file for all hosts of a job
    all have the same blocks.

    Raises:
      tilekern.errors.LoadError: there is no such file, or it is damaged.

    Example:
      >>> import jax, jax.numpy as jnp, pathlib, tempfile, tilekern as tk
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "tuned.json")
      ...     tk.Tuned().save(path)
      ...     with tk.tuned(path) as table:
      ...         len(table.entries)
      0
    """
    try:
        document: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"format = {document['format']!r}")
        return Tuned(tuple(map(entry_of, document["entries"])))
    except OSError as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _unreadable(path, f"a file with an error: {type(error).__name__}: {error}") from error


# --- tables that tilekern ships ---------------------------------------------------------------------------------------


def shipped_file(target: str) -> Path:
    """The file of the blocks of tilekern's own kernels for a target, which may not exist: "cuda-sm_90.json"."""
    return Path(__file__).parents[1] / "tables" / f"{target.replace(':', '-')}.json"


@cache
def shipped(target: str) -> Tuned | None:
    """The table of a target that tilekern ships, read once; None if there is none."""
    file = shipped_file(target)
    return tuned(file) if file.is_file() else None


# --- calls ------------------------------------------------------------------------------------------------------------


def active() -> Tuned | None:
    """The table of the calls of this place: of the `with` around it, or of the environment; None for none."""
    table: Tuned | None = _context.value
    return table if table is not None else _of_environment(os.environ.get(VARIABLE, ""))


@contextmanager
def untuned() -> Generator[None]:
    """Calls inside have no blocks of the user's files."""
    with _context(Tuned()):
        yield


@cache
def _of_environment(path: str) -> Tuned | None:
    return tuned(path) if path else None


def check_replaceable(path: Path) -> Tuned:
    """The entries of a file that will be written again; none if it does not exist.

    Raises:
      ArgumentError: the folder is missing, or the file or the folder may not be written to.
      LoadError: the file holds something else.
    """
    is_allowed = path.parent.is_dir() and os.access(path.parent, os.W_OK) and not path.is_dir()
    if not is_allowed or (path.exists() and not os.access(path, os.W_OK)):
        raise _unwritable(path, "a folder that is missing, or no permission to write")
    return tuned(path) if path.exists() else Tuned()


def _unwritable(path: Path, got: object) -> ArgumentError:
    return ArgumentError(
        f"{path} cannot be written",
        expected="a file in a folder that exists and can be written to",
        got=str(got),
        fix="name another file",
    )


def _unreadable(path: str | PathLike[str], got: str) -> LoadError:
    named = os.environ.get(VARIABLE) == str(path)
    return LoadError(
        f"{path} is not a file of tuned blocks" + (f", which {VARIABLE} names" if named else ""),
        expected=f'a file that kernel.tune(...).save wrote, with "format": "{FORMAT}"',
        got=got,
        fix=f"tune again, or unset {VARIABLE}" if named else "tune the kernel again",
    )
