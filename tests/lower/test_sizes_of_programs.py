"""The warning about programs that take compilers minutes."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tilekern.errors import LargeProgramWarning
from tilekern.lower import sizes


@tk.kernel(out_type=lambda x: x)
def unrolled(x: tk.Ref, out: tk.Ref, *, times: int = 40) -> None:
    """Python's loop, each turn of which is code."""
    i = tk.parallel(x.shape[0], 8)
    y = x[i]
    for _ in range(times):
        y = jnp.sin(y) * 3 + 1
    out[i] = y


@tk.kernel(out_type=lambda x, start: x)
def scattered(x: tk.Ref, start: tk.Ref, out: tk.Ref) -> None:
    """A store at any place of both dims, which TPUs make element by element."""
    out[tk.ds(start[0], 4), tk.ds(start[1], 16)] = x[:4, :16]


@pytest.mark.parametrize("target", ["cpu:xla", "cpu:llvm", "cuda:sm_90", "tpu:v5e"])
def test_a_large_program_is_warned_of(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the line that most of it comes from; and not of one that is small enough."""
    traced = unrolled.trace(jax.ShapeDtypeStruct((64, 128), jnp.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error", LargeProgramWarning)
        traced.lower(target)
    monkeypatch.setattr(sizes, "MOST_OPERATIONS", 100)
    with pytest.warns(
        LargeProgramWarning, match=r"(?s)unrolled becomes \d+ operations for .*\n  fix: take smaller"
    ) as caught:
        traced.lower(target)
    (found,) = caught
    assert found.filename == __file__
    assert _line(found) == "y = jnp.sin(y) * 3 + 1"


def test_elements_written_one_by_one_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "MOST_OPERATIONS", 1000)
    types = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    with pytest.warns(LargeProgramWarning, match="scattered becomes") as caught:
        scattered.trace(*types).lower("tpu:v5e")
    assert _line(caught[0]).startswith("out[tk.ds(start[0]")


def _line(found: Any) -> str:
    with open(found.filename) as file:
        return file.read().splitlines()[found.lineno - 1].strip()
