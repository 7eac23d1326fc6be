"""Exported programs: they run without tilekern, and their code fits machines other than the one that exports."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import like_first, numbers
from tests.lower.triton.test_call import opaque
from tilekern import _machine
from tilekern.kernels.softmax import softmax
from tilekern.lower.target import TARGETS, on_platform

X = numbers(3, 40)

_PLATFORMS = ("cpu", "cuda", "tpu")
# Runs a serialized program where `import tilekern` fails.
_STRANGER = """
import sys
sys.modules["tilekern"] = None
import jax, numpy as np
exported = jax.export.deserialize(bytearray(open("program", "rb").read()))
np.savez("results.npz", *jax.tree.leaves(jax.jit(exported.call)(np.load("x.npy"))))
assert not [name for name in sys.modules if name.startswith("tilekern.")]
"""


def rows(x: Any) -> Any:
    """A kernel under vmap, with its gradient: three kinds of calls."""
    return jax.vmap(jax.value_and_grad(lambda row: (softmax(row) ** 2).sum()))(x)


def custom_calls(module: str) -> set[str]:
    """The names of all custom calls of a program."""
    return set(re.findall(r"custom_call @(\w+)", module))


@pytest.fixture(scope="module")
def exported() -> jax.export.Exported:
    pytest.importorskip("triton", reason="needs triton")
    return jax.export.export(jax.jit(rows), platforms=_PLATFORMS, disabled_checks=tk.export.checks())(X)


def test_a_program_with_a_gradient_runs_where_there_is_no_tilekern(exported: Any, tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(exported.serialize())
    np.save(tmp_path / "x.npy", X)
    environment = {"JAX_PLATFORMS": "cpu", "PATH": "", "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-P", "-c", _STRANGER], cwd=tmp_path, env=environment, check=True, timeout=100)
    found = np.load(tmp_path / "results.npz")
    for array, expected in zip(found.values(), rows(jnp.asarray(X)), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-6, atol=1e-7)


def test_its_custom_calls_are_those_of_the_platforms(exported: Any) -> None:
    """No callback of Python is among them."""
    assert custom_calls(exported.mlir_module()) == {"triton_kernel_call_ffi", "tpu_custom_call"}


def test_all_code_for_gpus_is_ptx_of_the_oldest_one(exported: Any) -> None:
    messages = opaque(exported.mlir_module())
    assert len(messages) == 2  # forward and backward
    assert all(b".target sm_80\n" in m and b"\x7fELF" not in m for m in messages)


@like_first
def copy(x, out):
    out[...] = x[...]


def test_a_machine_with_a_gpu_exports_for_other_gpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs triton")
    monkeypatch.setattr(_machine, "compute_capability", lambda: 90)
    export = jax.export.export(jax.jit(copy), platforms=["cuda"], disabled_checks=tk.export.checks())
    (portable,) = opaque(export(X).mlir_module())
    assert b".target sm_80\n" in portable and b"\x7fELF" not in portable
    (here,) = opaque(jax.jit(copy).trace(X).lower(lowering_platforms=("cuda",)).as_text())
    assert b".target sm_90a\n" in here and b"\x7fELF" in here


def test_a_machine_with_a_tpu_exports_for_all_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine, "tpu_kind", lambda: "TPU7x")
    assert on_platform("tpu", None) is TARGETS["tpu:7x"]
    assert on_platform("tpu", None, exporting=True) == replace(TARGETS["tpu:v5e"], portable=True)
