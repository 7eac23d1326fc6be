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


def _interrupt(*_: Any, **__: Any) -> None:
    raise InterruptedError


@pytest.mark.parametrize(
    ("target", "legalize"),
    [
        ("cpu:xla", "tilekern.lower.xla.lowering.legalize"),
        ("cpu:llvm", "tilekern.lower.llvm.lowering.legalize"),
        ("cuda:sm_90", "tilekern.lower.triton.build.legalize"),
        ("tpu:v5e", "tilekern.lower.mosaic.lowering.legalize"),
    ],
)
def test_the_warning_comes_before_the_passes_of_a_target(
    target: str, legalize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take long, too, and count the operations again: there is one warning of both counts."""
    traced = unrolled.trace(jax.ShapeDtypeStruct((64, 128), jnp.float32))
    monkeypatch.setattr(sizes, "MOST_OPERATIONS", 100)
    with pytest.warns(LargeProgramWarning) as caught:
        traced.lower(target)
    assert len(caught) == 1
    monkeypatch.setattr(legalize, _interrupt)
    with pytest.warns(LargeProgramWarning, match="unrolled becomes"), pytest.raises(InterruptedError):
        unrolled.trace(jax.ShapeDtypeStruct((72, 128), jnp.float32)).lower(target)


def test_elements_that_are_written_out_are_counted_before_code_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "MOST_OPERATIONS", 1000)
    monkeypatch.setattr("tilekern.lower.mosaic.lowering.call", _interrupt)
    types = jax.ShapeDtypeStruct((200, 256), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    with pytest.warns(LargeProgramWarning, match="scattered becomes"), pytest.raises(InterruptedError):
        scattered.trace(*types).lower("tpu:v5e")


def test_elements_written_one_by_one_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "MOST_OPERATIONS", 1000)
    types = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    with pytest.warns(LargeProgramWarning, match="scattered becomes") as caught:
        scattered.trace(*types).lower("tpu:v5e")
    assert _line(caught[0]).startswith("out[tk.ds(start[0]")


def _line(found: Any) -> str:
    with open(found.filename) as file:
        return file.read().splitlines()[found.lineno - 1].strip()
