"""Compile the pretended driver with the system's C compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent
DRIVER, MANAGEMENT = "libcuda.so.1", "libnvidia-ml.so.1"
"""The file names by which JAX's plugin looks for the driver and for NVML."""


class MissingError(Exception):
    """Something of this machine that the pretended driver needs is missing; the text names it."""


def compiler() -> str:
    """The C compiler: $CC, or `cc`.

    Raises:
      MissingError: there is none.
    """
    name = os.environ.get("CC", "cc")
    if shutil.which(name) is None:
        raise MissingError("a C compiler")
    return name


def headers() -> Path:
    """The folder of `cuda.h`, in Triton's wheel.

    Raises:
      MissingError: Triton is not installed.
    """
    spec = find_spec("triton")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent / "backends/nvidia/include"
    if folder is None or not (folder / "cuda.h").exists():
        raise MissingError("triton")
    return folder


def build(folder: Path) -> tuple[Path, Path]:
    """Compile the driver and NVML to libraries in `folder`, and return their paths.

    Raises:
      MissingError: the compiler or the headers are missing.
      subprocess.CalledProcessError: the compiler fails; its message is on standard error.
    """
    return _library(folder / DRIVER, "driver"), _library(folder / MANAGEMENT, "management")


def _library(library: Path, sources: str) -> Path:
    flags = ("-std=gnu11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", f"-I{headers()}")
    files = sorted(map(str, (FOLDER / sources).glob("*.c")))
    linked = (f"-Wl,-soname,{library.name}", "-lpthread", "-ldl")
    subprocess.run([compiler(), *flags, "-o", library, *files, *linked], check=True)
    return library
