"""Warnings of versions of ptxas that miscompile, and other assemblers than Triton's own."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tests.lower.triton import samples
from tilekern.errors import AssemblerWarning, DependencyError
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.compile import toolchain
from tilekern.lower.triton.compile.assembler_faults import warn_of_faults
from tilekern.lower.triton.compile.binary import Binary
from tilekern.lower.triton.compile.compile_program import compile_program

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time

HOPPER = CHIPS["cuda:sm_90"]
SUMS = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1,%f2,%f3,%f4}"
REGISTERS = SUMS + ", {%r1,%r2,%r3,%r4}, %rd1, p, 1, 1, 1;"
SHARED = SUMS + ", %rd2, %rd1, p, 1, 1, 0, 0;"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs triton")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _with_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = toolchain.ptxas(90).path
    monkeypatch.setattr(toolchain, "ptxas", lambda capability: SimpleNamespace(path=own, version=version))


def _warned(ptx: str) -> list[str]:
    binary = Binary("f", {"ptx": ptx, "cubin": b"\x7fELF"}, 90, 4, 1, 0, 0, 0, 1, ())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_faults(binary, samples.add())
    return [str(warning.message) for warning in caught if warning.category is AssemblerWarning]


@pytest.mark.parametrize("version", ["12.8", "12.9", "13.0", "13.2"])
@pytest.mark.parametrize("ptx", [SHARED, REGISTERS], ids=["shared", "registers"])
def test_a_product_of_warpgroups_is_warned_of(version: str, ptx: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = toolchain.ptxas_variable(90)
    _with_version(version, monkeypatch)
    (message,) = _warned(ptx)
    assert f"ptxas of CUDA {version}" in message and f"let {variable} name" in message
    assert not _warned("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")


@pytest.mark.parametrize("version", ["12.3", "12.6", "13.3", "13.4", "14.0"])
def test_other_versions_are_not(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_version(version, monkeypatch)
    assert not _warned(REGISTERS)


@pytest.mark.parametrize("multiplies", [False, True])
def test_a_kernel_is_warned_of_once(multiplies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with a product of warpgroups; one without is not warned of."""

    @tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct((64, 64), jnp.float32))
    def product(x: tk.Ref, w: tk.Ref, out: tk.Ref) -> None:
        i, j = tk.parallel(64, 64), tk.parallel(64, 64)
        out[i, j] = tk.dot(x[i], w[:, j]) if multiplies else (x[i] + w[:, j]).astype(jnp.float32)

    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    _with_version("12.8", monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            product.trace(x, x, num_warps=4).lower("cuda:sm_90").compile()
    found = [warning for warning in caught if warning.category is AssemblerWarning]
    assert len(found) == multiplies
    for warning in found:
        assert warning.filename == __file__ and "as product does" in str(warning.message)


def test_another_assembler_is_called_and_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, before = toolchain.ptxas(90), toolchain.identity(HOPPER)
    other, calls = tmp_path / "ptxas", tmp_path / "calls"
    version = 'case "$1" in --version) echo "Cuda compilation tools, release 13.9, V13.9.1";; '
    other.write_text(f'#!/bin/sh\n{version}*) echo x >> "{calls}"; exec "{own.path}" "$@";; esac\n')
    other.chmod(0o755)
    monkeypatch.setenv(toolchain.ptxas_variable(90), str(other))
    assert {str(other), "13.9"} <= set(toolchain.identity(HOPPER)) and toolchain.identity(HOPPER) != before
    compile_program(samples.add(), HOPPER)
    assert calls.exists()


def test_an_assembler_that_does_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = toolchain.ptxas_variable(90)
    monkeypatch.setenv(variable, "/nowhere/ptxas")
    with pytest.raises(DependencyError, match=f"{variable} names no assembler that runs") as caught:
        compile_program(samples.add(), HOPPER)
    assert "got: " + f"{variable}=/nowhere/ptxas" in str(caught.value)
    assert "unset it" in caught.value.fix
