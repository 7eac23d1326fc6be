"""Make JAX of this process see a pretended GPU. Call `install` before JAX looks for devices.

JAX's plugin finds the driver by its name, and takes a driver that is loaded already. The CUDA runtime inside of the
plugin cannot work with it. So the plugin's table of symbols tells where the functions of that runtime are, and each is
made to jump to the function in `runtime.c`. This works on x86-64, and with plugins that have a table of symbols, as the
plugins of JAX 0.11.2 and 0.12.0 have.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import platform
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from bench.gpu.pretended.build import MissingError, build, compiler, headers

_PLUGIN = "jax_plugins.xla_cuda13"

# ELF-64 (System V Application Binary Interface): sections and symbols.
_SECTION = np.dtype("u4, u4, u8, u8, u8, u8, u4, u4, u8, u8")
_SECTION.names = ("name", "type", "flags", "address", "offset", "size", "link", "info", "align", "entry")
_SYMBOL = np.dtype("u4, u1, u1, u2, u8, u8")
_SYMBOL.names = ("name", "info", "other", "section", "value", "size")
_SYMTAB = 2


def install(folder: Path) -> None:
    """Build the driver in a folder, load it, and make JAX's CUDA plugin use it.

    Raises:
      MissingError: the plugin, a C compiler, Triton's headers or an x86-64 processor is missing.
    """
    check_requirements()
    plugin = _plugin()
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # NVIDIA's libraries may be missing
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    # Autotuning compares results of kernels, which do not run here.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    # JAX looks for /dev/nvidia0 first.
    importlib.import_module("jax._src.hardware_utils").has_visible_nvidia_gpu = lambda: True
    driver, _ = (ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL) for library in build(folder))
    ctypes.CDLL(str(plugin))
    _redirect(plugin, driver)


def check_requirements() -> None:
    """Check that a GPU can be pretended on this machine.

    Raises:
      MissingError: something is missing.
    """
    if platform.machine() != "x86_64":
        raise MissingError("an x86-64 processor")
    compiler(), headers(), _plugin()


def _plugin() -> Path:
    """The file of JAX's CUDA plugin.

    Raises:
      MissingError: the plugin is not installed.
    """
    spec = find_spec(_PLUGIN) if find_spec("jax_plugins") else None
    if spec is None or spec.origin is None or find_spec("jax_cuda13_plugin") is None:
        raise MissingError("jax-cuda13-plugin and jax-cuda13-pjrt")
    return Path(spec.origin).with_name("xla_cuda_plugin.so")


def _redirect(plugin: Path, driver: ctypes.CDLL) -> None:
    declared = set(re.findall(r"\b(cuda[A-Z]\w+)\(", (headers() / "cuda_runtime_api.h").read_text(errors="replace")))
    base, redirected = _loaded_at(plugin), 0
    for name, value in _functions(plugin):
        if name in declared:
            target = getattr(driver, f"runtime_{name}", driver.runtime_other)
            if driver.redirect(ctypes.c_void_p(base + value), target):
                raise OSError(f"the code of {name} cannot be written")
            redirected += 1
    if not redirected:
        raise MissingError("a CUDA plugin with a table of symbols")


def _functions(library: Path) -> Iterator[tuple[str, int]]:
    """Names and addresses of a library's functions whose names begin with "cuda", from its table of symbols."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
        place, count = int.from_bytes(image[40:48], "little"), int.from_bytes(image[60:62], "little")
        sections = np.frombuffer(image[place : place + count * _SECTION.itemsize], _SECTION)
        for table in sections[sections["type"] == _SYMTAB]:
            symbols = np.frombuffer(image[table["offset"] : table["offset"] + table["size"]], _SYMBOL)
            texts = sections[table["link"]]
            names = np.frombuffer(image[texts["offset"] : texts["offset"] + texts["size"]], np.uint8)
            begin = symbols["name"].astype(np.int64)[:, None] + np.arange(4)
            is_of_cuda = (names[np.minimum(begin, names.size - 1)] == np.frombuffer(b"cuda", np.uint8)).all(axis=1)
            for symbol in symbols[is_of_cuda & (symbols["info"] & 15 == 2) & (symbols["value"] > 0)]:
                yield bytes(names[symbol["name"] :][:200]).partition(b"\0")[0].decode(), int(symbol["value"])


def _loaded_at(library: Path) -> int:
    """The address of the first byte of a library of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, offset, _, _, *path = line.split(maxsplit=5)
        if path and int(offset, 16) == 0 and path[0].endswith(library.name):
            return int(addresses.partition("-")[0], 16)
    raise AssertionError(f"{library} is not loaded")
