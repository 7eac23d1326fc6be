"""Triton, its backend for AMD's GPUs, and NVIDIA's tools in its package; imported when the first kernel is compiled."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tilekern.errors import DependencyError
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.vendor import AMD

OLDEST, BEYOND = (3, 6), (3, 10)
"""Supported versions of Triton: from OLDEST on, before BEYOND."""

CLUSTERS = (3, 9)
"""The first version whose Gluon copies tiles to all thread blocks of a cluster, and has barriers of clusters."""

EXPECTED = f"triton >= {OLDEST[0]}.{OLDEST[1]}, < {BEYOND[0]}.{BEYOND[1]}"
FIX = f"pip install 'triton>={OLDEST[0]}.{OLDEST[1]},<{BEYOND[0]}.{BEYOND[1]}'"

# Environment variables that change the code of a kernel and are missing in Triton's `get_cache_invalidating_env_vars`.
_ENVIRONMENT = ("TRITON_FORCE_DISABLE_FP_FUSION", "TRITON_INSTRUMENTATION_MODE", "TRITON_LIBDEVICE_PATH")


def triton(module: str = "") -> Any:
    """A module of Triton (`triton("compiler")` is `triton.compiler`); the version is checked first.

    Raises:
      DependencyError: Triton is missing, too old or too new, or runs its interpreter instead of its compiler.
    """
    package = _import("triton")
    check_version(getattr(package, "__version__", "of no version"))
    if package.knobs.runtime.interpret:
        raise DependencyError(
            "Triton cannot compile while its interpreter is on",
            got=f"TRITON_INTERPRET={os.environ.get('TRITON_INTERPRET', '1')}",
            fix="unset TRITON_INTERPRET before Triton is imported; `.interpret` needs no such setting",
        )
    return _import(f"triton.{module}") if module else package


def check_version(version: str) -> None:
    """Refuse a Triton that tilekern was not tested with."""
    release = _release(version)
    if release and OLDEST <= release < BEYOND:
        return
    raise DependencyError(
        "this version of Triton is not supported",
        expected=EXPECTED,
        got=f"triton {version}",
        fix=FIX,
    )


def has_clusters() -> bool:
    """True if the installed Triton compiles programs for clusters, or if no Triton is installed to compile them."""
    try:
        release = _release(importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return True
    return release is not None and release >= CLUSTERS


def _release(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version: (3, 6) for "3.6.0"; None if it does not begin with two numbers."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def identity(chip: Chip) -> list[str]:
    """All inputs of the compilation besides the program: versions, the assembler, the environment."""
    if chip.vendor is AMD:
        tools = [AMD.backend, _amd_revision()]
    else:
        assembler = ptxas(chip.capability)
        tools = [assembler.path, assembler.version]
    settings: dict[str, str] = dict(triton("_C.libtriton").get_cache_invalidating_env_vars())
    settings |= {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return [triton().__version__, *tools, *(f"{k}={v}" for k, v in sorted(settings.items()))]


def _amd_revision() -> str:
    """The revision of the LLVM that makes AMD's machine code; "" where it is a part of Triton's own library.

    Raises:
      DependencyError: this Triton was built without its backend for AMD's GPUs, HIP.
    """
    try:
        backend = triton("backends.amd.compiler")
        return str(backend.get_amd_codegen_revision()) if hasattr(backend, "get_amd_codegen_revision") else ""
    except DependencyError as error:
        if importlib.util.find_spec("triton") is None or importlib.util.find_spec("triton.backends.amd") is not None:
            raise
        raise DependencyError(
            "this Triton has no backend for AMD's GPUs",
            expected="triton.backends.amd, which the wheels for Linux have",
            got=f"triton {triton().__version__} without it",
            fix=FIX,
        ) from error


def ptxas(capability: int) -> Any:
    """The assembler that Triton calls for a capability, with `path` and `version` (the release of CUDA).

    Raises:
      DependencyError: the environment names an assembler that does not run; Triton would quietly take its own.
    """
    assembler = triton("backends.nvidia.compiler").get_ptxas(capability)
    variable = ptxas_variable(capability)
    asked = os.environ.get(variable)
    if asked and asked != assembler.path and Path(assembler.path).is_relative_to(Path(triton().__file__).parent):
        raise DependencyError(
            f"{variable} names no assembler that runs",
            expected="the path of a ptxas, which prints its release when it is called with --version",
            got=f"{variable}={asked}",
            fix=f"correct or unset it: Triton has a ptxas of CUDA {assembler.version}",
        )
    return assembler


def ptxas_variable(capability: int) -> str:
    """The environment variable that names another assembler; Triton has one for older and one for newer GPUs."""
    tools = triton().knobs.nvidia
    newer = triton("backends.nvidia.compiler").get_ptxas(capability).path == tools.ptxas_blackwell.path
    return "TRITON_PTXAS_BLACKWELL_PATH" if newer else "TRITON_PTXAS_PATH"


def assemble(ptx: str, capability: int) -> tuple[bytes, str]:
    """The cubin of `ptx`, and ptxas' report of the registers, stack and spills of each function.

    Triton runs ptxas with the same options, but drops the report.
    """
    # backends/nvidia/compiler.py, make_cubin: 3.6 does not give the option, 3.7 to 3.9 do.
    level = [] if triton().__version__.startswith("3.6.") else ["--regAllocOptLevel=2"]
    architecture = f"sm_{capability}{'a' if capability >= 90 else ''}"
    with tempfile.TemporaryDirectory(prefix="tilekern-") as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        report = _call(
            ptxas(capability).path, "-lineinfo", "-v", *level, f"--gpu-name={architecture}", source, "-o", cubin
        )
        return cubin.read_bytes(), report.stderr


def disassemble(cubin: bytes, lines: bool = False) -> str:
    """The instructions of a cubin as text; with `lines`, comments name the line of code, and where it is inlined."""
    with tempfile.TemporaryDirectory(prefix="tilekern-") as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        options = ["--print-code", *["--print-line-info-inline"] * lines]
        return _call(triton().knobs.nvidia.nvdisasm.path, *options, path).stdout


def _call(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken installation raises anything
        raise DependencyError(
            "the targets cuda:* and rocm:* need Triton",
            expected=EXPECTED,
            got=f"{type(error).__name__}: {error}",
            fix=FIX,
        ) from error
