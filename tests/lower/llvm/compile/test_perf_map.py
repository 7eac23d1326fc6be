"""The map for `perf`: the functions of a kernel at the addresses at which they are loaded."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest

from tests.lower.llvm.tasks import process

pytest.importorskip("llvmlite", reason="needs llvmlite")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

CALL = """
import os, pathlib, jax, jax.numpy as jnp, tilekern as tk

@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
def my_kernel(x, out):
    i = tk.parallel(x.shape[0], 64)
    out[i] = jnp.tanh(x[i])

my_kernel(jnp.ones(1000), target="cpu:llvm").block_until_ready()
path = pathlib.Path(f"/tmp/perf-{os.getpid()}.map")
if path.exists():
    print(path.read_text())
    path.unlink()
    from tilekern.lower.llvm.compile.toolchain import code_table
    print(*(hex(address)[2:] for _, address in code_table()._libraries.values()))
"""


def test_functions_of_a_kernel_stand_at_their_addresses() -> None:
    *lines, _, handlers = process(CALL, TILEKERN_DEBUG="perf").splitlines()
    entries = [line.split(" ", 2) for line in lines]
    assert entries and all(name.startswith("tilekern my_kernel ") for _, _, name in entries)
    assert handlers in {start for start, _, _ in entries}
    spans = sorted((int(start, 16), int(size, 16)) for start, size, _ in entries)
    assert all(size > 0 for _, size in spans)
    assert all(start + size <= following for (start, size), (following, _) in pairwise(spans))


def test_without_the_option_there_is_no_map() -> None:
    assert process(CALL, TILEKERN_DEBUG="verify") == ""
