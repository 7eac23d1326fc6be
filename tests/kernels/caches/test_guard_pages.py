"""Pools that end at pages which the process may not touch: no write leaves them, whatever tables say."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.caches.writes import PARTS

pytestmark = pytest.mark.one_backend

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def guards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that puts guards around the memory of XLA."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("guards") / "guards.so"
    source = Path(__file__).with_name("guards.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True)
    return library


def process(guards: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LD_PRELOAD": str(guards), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.sweep(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_writes_stay_inside_of_their_pools(guards: Path, part: int) -> None:
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    done = process(guards, "-m", "tests.kernels.caches.writes", str(part))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == (6 * 4 + 3 * 3 + 3) / PARTS


@pytest.mark.parametrize("at", [-1, 1 << 16])
def test_a_guard_ends_the_process(guards: Path, at: int) -> None:
    """Or else the test above proves nothing: an array of JAX, and a byte before or behind it."""
    code = f"""
import ctypes, jax.numpy as jnp
x = jnp.zeros(1 << 16, jnp.uint8)
print(x.unsafe_buffer_pointer() % 4096, flush=True)
(ctypes.c_char * 1).from_address(x.unsafe_buffer_pointer() + {at})[0] = 1
"""
    done = process(guards, "-c", code)
    assert (done.returncode, done.stdout) == (-11, "0\n"), done.stderr
