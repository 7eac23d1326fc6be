"""The kernels of the library's gradients at their default configuration, compiled for a GPU and a TPU without any."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench.gpu.item import lowerings_of
from tilekern.kernels.cross_entropy import cross_entropy
from tilekern.kernels.layer_norm import layer_norm
from tilekern.kernels.matmul import matmul
from tilekern.kernels.rms_norm import rms_norm
from tilekern.kernels.rope import rope
from tilekern.kernels.softmax import softmax
from tilekern.kernels.swiglu import swiglu
from tilekern.lower.mosaic.lowering import MosaicLowering
from tilekern.lower.target import resolve
from tilekern.lower.triton.lowering import TritonLowering


def loss(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """Cross entropy as a function of its floats alone."""
    return cross_entropy(hidden, weight, jnp.zeros(hidden.shape[0], jnp.int32))


MATRIX, VECTOR = (4096, 4096), (4096,)
# Functions, the shapes of their arrays, and the dtype: real sizes, long rows, and rows that no copy of 16 bytes fits.
CASES = {
    "rms_norm": (rms_norm, (MATRIX, VECTOR), "bfloat16"),
    "layer_norm_wide": (layer_norm, ((4096, 8192), (8192,), (8192,)), "float32"),
    "layer_norm_long": (layer_norm, ((512, 20000), (20000,), (20000,)), "bfloat16"),
    "softmax_vocabulary": (softmax, ((1024, 50257),), "bfloat16"),
    "swiglu": (swiglu, ((4096, 14336),) * 2, "bfloat16"),
    "rope": (rope, ((1, 4096, 32, 128),), "bfloat16"),
    "matmul": (matmul, (MATRIX, MATRIX), "bfloat16"),
    "cross_entropy": (loss, (MATRIX, (4096, 128256)), "bfloat16"),
    "cross_entropy_odd": (loss, ((1024, 768), (768, 50257)), "bfloat16"),
    "cross_entropy_float32": (loss, ((1024, 768), (768, 50257)), "float32"),
    "matmul_odd": (matmul, ((1024, 768), (768, 50257)), "bfloat16"),
}
all_cases = pytest.mark.parametrize("name", CASES)


def lowered(name: str, target: str) -> list[Any]:
    """The kernels of a case's function and its gradient, each program once."""
    function, shapes, dtype = CASES[name]
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]

    def both(function: Callable[..., Any], cotangent: Any, *arrays: Any) -> Any:
        out, pull = jax.vjp(function, *arrays)
        # Of the others, the tangent is XLA's, or is made of the same kernels.
        tangent = jax.jvp(function, arrays, arrays)[1] if function is loss else None
        return out, pull(cotangent), tangent

    out = jax.eval_shape(function, *arrays)
    found = list(lowerings_of(partial(both, function), [out, *arrays], resolve(target)))
    kinds = {matmul: 3, loss: 5, rope: 1}.get(function, 2)  # rope and its gradient are one program
    assert len(found) == kinds, [lowering.func.name for lowering in found]
    return [lowering for lowering in found if not lowering.func.name.endswith("_forward") or function is rope]


@pytest.mark.sweep(8)
@all_cases
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90", "cuda:sm_100"])
@pytest.mark.slow
def test_no_program_of_a_gpu_spills(name: str, target: str) -> None:
    pytest.importorskip("triton", reason="needs triton")
    for lowering in lowered(name, target):
        assert isinstance(lowering, TritonLowering)
        assert lowering.compile().resources.spills == 0


@pytest.mark.sweep(4)
@all_cases
def test_a_tpu_compiles_them(name: str) -> None:
    pytest.importorskip("libtpu", reason="needs libtpu")
    for lowering in lowered(name, "tpu:v5e"):
        assert isinstance(lowering, MosaicLowering)
        assert 0 < lowering.compile().resources.vmem_bytes <= lowering.planned.vmem_limit
