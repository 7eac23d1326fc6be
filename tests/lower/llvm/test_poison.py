"""`TILEKERN_DEBUG=poison`: a program that reads scratch memory before it writes it computes NaN in every run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lower.llvm.running import run
from tilekern.lower.llvm.element_index import ElementMap, _counters
from tilekern.lower.llvm.lowering import LlvmLowering

pytest.importorskip("llvmlite", reason="needs llvmlite")

X = np.ones((8, 32), np.float32)


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
def relative(x: tk.Ref, out: tk.Ref) -> None:
    i = tk.parallel(x.shape[0], 4)
    v = jnp.exp(x[i])
    out[i] = v - v[:, :1]


def test_scratch_memory_is_filled_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, fills in (("poison", 1), ("", 0)):
        monkeypatch.setenv("TILEKERN_DEBUG", options)
        lowering = LlvmLowering(relative.trace(X).ir)
        assert lowering.text.count("call void @llvm.memset") == fills
        assert f"i8 255, i64 {lowering.program.scratch}" in lowering.text or not fills
        np.testing.assert_array_equal(run(lowering, [X])[0], 0)


def test_memory_that_no_step_wrote_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner is made to forget the shape of a tile; then loops over its first column compute it."""
    monkeypatch.setenv("TILEKERN_DEBUG", "poison")
    monkeypatch.setattr(ElementMap, "is_identity_of", lambda self, _: self.coords == _counters(len(self.domain)))
    lowering = LlvmLowering(relative.trace(X).ir)
    for _ in range(2):
        (found,) = run(lowering, [X])
        assert np.isnan(found[:, 8:]).any(1).all()
