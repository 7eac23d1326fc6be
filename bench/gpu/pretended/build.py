"""Compile the pretended driver with the system's C compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent
NAME = "libcuda.so.1"
"""The file name by which JAX's plugin looks for the driver."""


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


def build(folder: Path) -> Path:
    """Compile the driver to a library in `folder`, and return its path.

    Raises:
      MissingError: the compiler or the headers are missing.
      subprocess.CalledProcessError: the compiler fails; its message is on standard error.
    """
    library = folder / NAME
    flags = ("-std=gnu11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", f"-Wl,-soname,{NAME}")
    sources = sorted(map(str, FOLDER.glob("*.c")))
    subprocess.run([compiler(), *flags, f"-I{headers()}", "-o", library, *sources, "-lpthread", "-ldl"], check=True)
    return library
