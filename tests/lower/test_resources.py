"""The record of a program's resources."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import tilekern as tk


@tk.kernel(out_type=lambda x: x)
def double(x, out, *, block: tk.Block = 64):
    i = tk.parallel(x.shape[0], block)
    out[i] = x[i] * 2


KNOWN = {
    "cpu:xla": ("scratch_bytes",),
    "cpu:llvm": ("scratch_bytes",),
    "cuda:sm_90": ("registers", "spills", "shared_bytes", "threads", "occupancy", "serialized"),
    "cuda:sm_100": ("registers", "spills", "shared_bytes", "threads", "occupancy", "tensor_columns"),
    "rocm:gfx942": ("registers", "spills", "shared_bytes", "threads", "occupancy"),
    "tpu:v5e": ("vmem_bytes", "planned_bytes"),
}
NEEDS = {
    "cpu:llvm": "llvmlite",
    "cuda:sm_90": "triton",
    "cuda:sm_100": "triton",
    "rocm:gfx942": "triton",
    "tpu:v5e": "libtpu",
}


@pytest.mark.parametrize("target", KNOWN)
def test_each_target_reports_its_own(target: str) -> None:
    if target in NEEDS:
        pytest.importorskip(NEEDS[target])
    found = double.trace(jax.ShapeDtypeStruct((256,), np.float32)).lower(target).compile().resources
    assert isinstance(found, tk.Resources)
    assert tuple(name for name, value in vars(found).items() if value is not None) == KNOWN[target]
    assert [part.partition(":")[0] for part in str(found).split(", ")] == list(KNOWN[target])


def test_units() -> None:
    found = tk.Resources(32, 0, 16384, 128, 0.5, 1 << 20, 1000, 64, serialized=True, tensor_columns=256)
    assert str(found) == (
        "registers: 32 a thread, spills: 0 bytes a thread, shared_bytes: 16,384, threads: 128 a program, "
        "occupancy: 50 %, vmem_bytes: 1,048,576, planned_bytes: 1,000, scratch_bytes: 64, serialized: yes, "
        "tensor_columns: 256"
    )
