"""libtpu, the compiler and driver of TPUs, loaded by the first ahead-of-time compilation."""

from __future__ import annotations

import os
import re
import threading
from importlib import metadata
from typing import Any

from tilekern import _jax, _machine
from tilekern.errors import DependencyError
from tilekern.lower.mosaic.chip import Chip

OLDEST = (0, 0, 50)
"""The first version of libtpu that compiles our kernels.

0.0.48 refuses 8-bit tiles with less than 32 rows, and does not read the kernels of jax 0.12.
"""

# Without these variables, libtpu asks the machine's metadata server for its chips, and complains on standard error;
# ahead-of-time compilation names its chip itself. The last variable lets several processes load libtpu: no chips
# need a guard here.
_WITHOUT_CHIPS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

_lock = threading.Lock()
_devices: dict[str, Any] = {}


def device(chip: Chip) -> Any:
    """A device of `chip` to compile for, on any machine.

    Raises:
      DependencyError: libtpu is missing, too old, or in use by another process.
    """
    with _lock:
        if chip.topology not in _devices:
            _devices[chip.topology] = _load(chip)
        return _devices[chip.topology]


def check_version(version: str) -> None:
    """Refuse a libtpu older than `OLDEST`.

    Raises:
      DependencyError: `version` is older.
    """
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if match and tuple(map(int, match.groups())) >= OLDEST:
        return
    raise DependencyError(
        "this version of libtpu is not supported",
        expected=f"libtpu >= {'.'.join(map(str, OLDEST))}",
        got=f"libtpu {version}",
        fix="pip install 'jax[tpu]'",
    )


def _load(chip: Chip) -> Any:
    check_version(_version(chip))
    if not _machine.has_tpu_chips():
        for name, value in _WITHOUT_CHIPS.items():
            os.environ.setdefault(name, value)
    try:
        return _jax.tpu_topology(chip.topology)
    except RuntimeError as error:
        raise DependencyError(
            f"libtpu does not compile for {chip.name} here",
            expected="a libtpu that no other process has loaded",
            got=f"{type(error).__name__}: {error}",
            fix="end the other process, or set ALLOW_MULTIPLE_LIBTPU_LOAD=1 if neither runs on the TPU",
        ) from error


def _version(chip: Chip) -> str:
    try:
        return metadata.version("libtpu")
    except metadata.PackageNotFoundError as error:
        raise DependencyError(
            f"to compile for {chip.name} takes libtpu, the TPU's compiler",
            expected=f"libtpu >= {'.'.join(map(str, OLDEST))}; no TPU has to be here",
            got="no package of that name",
            fix="pip install 'jax[tpu]'",
        ) from error
