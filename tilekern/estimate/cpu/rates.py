"""The rates of this machine that the roofline of CPUs needs: measured once, then read from a file.

The file is `cpu-rates-….json` in the cache folder of tilekern; its name has a hash of the machine and of the number of
threads. Removing it makes the next estimate measure again, which takes three seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np

from tilekern.estimate.cpu.peak import THREADS, Peak
from tilekern.lower.disk_cache import folder
from tilekern.lower.llvm.runtime.machine import Machine

_FORMAT = "2"  # of the file, a part of its name
_SIZES = {"L2": 256 << 10, "L3": 4 << 20, "memory": 64 << 20}  # bytes that each thread copies
_ROUNDS = 25
_SECONDS = 0.01  # of a round of the loop of multiply-adds


@dataclass(frozen=True)
class Rates:
    """Rates of all threads together.

    Attributes:
      float32: multiplications and additions of float32 a second.
      bfloat16: the same of bfloat16, by the fastest instruction; as `float32` if there is none.
      l2: bytes a second that loads and stores move, if each thread touches 512 KiB.
      l3: the same for 8 MiB.
      memory: the same for 128 MiB.
      threads: the number of threads.
      date: the day of the measurement.
    """

    float32: float
    bfloat16: float
    l2: float
    l3: float
    memory: float
    threads: int
    date: str


@cache
def rates(machine: Machine) -> Rates:
    """The rates of this machine, from the file if there is one."""
    path = _path(machine)
    if path is not None and (known := _read(path)) is not None:
        return known
    measured = measure(machine)
    if path is not None:
        _write(path, measured)
    return measured


def measure(machine: Machine) -> Rates:
    """Measure the rates. The fastest round counts, for other work on the machine makes rounds slower."""
    l2, l3, memory = map(_bandwidth, _SIZES.values())
    float32 = _flops(Peak(machine, "float32", THREADS, _SECONDS))
    bfloat16 = _flops(Peak(machine, "bfloat16", THREADS, _SECONDS)) if machine.multiplies_bfloat16 else float32
    # Noise must not make a farther level faster: more bytes would take less time.
    return Rates(float32, bfloat16, l2, min(l2, l3), min(l2, l3, memory), THREADS, time.strftime("%Y-%m-%d"))


def _flops(loop: Peak) -> float:
    return loop.flops / min(loop.seconds() for _ in range(_ROUNDS))


def _bandwidth(nbytes: int) -> float:
    """Bytes a second of copies between two arrays of each thread; a copied byte counts twice."""
    pairs = [(np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)) for _ in range(THREADS)]
    repeats = max(1, (16 << 20) // nbytes)

    def copy(pair: tuple[np.ndarray, np.ndarray]) -> None:  # NumPy lets go of Python's lock
        for _ in range(repeats):
            np.copyto(pair[1], pair[0])

    seconds: list[float] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            list(pool.map(copy, pairs))
            seconds.append(time.perf_counter() - start)
    return 2.0 * nbytes * repeats * THREADS / min(seconds)


def _path(machine: Machine) -> Path | None:
    """The file of the rates; None without a cache folder."""
    parts = (_FORMAT, platform.node(), machine.cpu, machine.features, str(machine.vector_bytes), str(THREADS))
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    base = folder()
    return base and base / f"cpu-rates-{digest}.json"


def _read(path: Path) -> Rates | None:
    """The rates in a file; None if it is missing or damaged."""
    try:
        stored = Rates(**json.loads(path.read_text()))
        numbers = (stored.float32, stored.bfloat16, stored.l2, stored.l3, stored.memory)
        return stored if all(0 < n < 1e18 for n in numbers) and stored.threads == THREADS else None
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, measured: Rates) -> None:
    """Write the file, whole or not at all; a folder that cannot be written to is no error."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(asdict(measured), indent=1) + "\n")
        temporary.replace(path)
