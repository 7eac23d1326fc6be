"""Pallas' interpreter runs programs of TPUs on any machine."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from tilekern.ir.parse import parse
from tilekern.lower.lowering import lower
from tilekern.lower.target import resolve


def test_xla_does_not_optimize_the_program_of_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[Any] = []
    jit = jax.jit

    def recorded(function: Any, **keywords: Any) -> Any:
        options.append(keywords.get("compiler_options"))
        return jit(function, **keywords)

    monkeypatch.setattr(jax, "jit", recorded)
    func = parse("""
        func @f(%x: ref<f32[8, 128], in>, %o: ref<f32[8, 128], out>) {
          %v = load %x[0 +: 8!, 0 +: 128!] : f32[8, 128]
          store %v to %o[0 +: 8!, 0 +: 128!]
        }
    """)
    x = np.arange(1024, dtype=np.float32).reshape(8, 128)
    (out,) = lower(func, resolve("tpu:v5e"), {}).interpret(x)
    np.testing.assert_array_equal(out, x)
    # Optimized, the random bits of a tile of 32 numbers compile without end.
    assert {"xla_backend_optimization_level": 0} in options
