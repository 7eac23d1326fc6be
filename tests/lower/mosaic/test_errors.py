"""Kernels that TPUs cannot run are refused before compilation, at the user's line, or run portably, with a warning."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tilekern.errors import FallbackWarning, ResourceError, TargetError
from tilekern.ir.core import Value
from tilekern.ir.types import F32, RefType
from tilekern.lower.mosaic.plan.hbm_layout import LayoutDim, check_blocks, layout_of
from tilekern.lower.mosaic.plan.windows import Window, WindowDim


@tk.kernel(out_type=lambda x: x)
def scaled(x: tk.Ref, out: tk.Ref, *, block: tk.Block = 8) -> None:
    i = tk.parallel(x.shape[0], block)
    out[i] = x[i] * 2


@tk.kernel(out_type=lambda x, at: jax.ShapeDtypeStruct((at.shape[0], x.shape[1]), x.dtype))
def rows(x: tk.Ref, at: tk.Ref, out: tk.Ref, *, block: tk.Block = 8) -> None:
    i = tk.parallel(at.shape[0], block)
    out[i] = x[at[i]]


def like(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def test_a_block_that_does_not_fit_is_refused_with_a_bill() -> None:
    with pytest.raises(ResourceError) as caught:
        scaled.trace(like(4096, 8192), block=4096).lower("tpu:7x")
    message = str(caught.value)
    assert "scaled needs more VMEM than a core of tpu:7x has" in message
    assert "at most 55.9 MiB" in message
    assert "x 128.00 MiB, out 128.00 MiB" in message
    assert "test_errors.py" in message and "def scaled" in message


def test_a_table_that_does_not_fit_and_ends_within_a_tile_of_rows_is_refused() -> None:
    with pytest.raises(ResourceError, match=r"needs more VMEM(.|\n)*: x \d{3}"):
        rows.trace(like(1_000_001, 128, dtype=jnp.bfloat16), like(64, dtype=jnp.int32)).lower("tpu:v5e")


def test_64_bits_are_refused_where_they_are_asked_for() -> None:
    with jax.enable_x64(True), pytest.raises(TargetError) as caught:
        scaled.trace(like(16, 128, dtype="float64")).lower("tpu:v5e")
    message = str(caught.value)
    assert "f64" in message and 'target="cpu:xla"' in message and "test_errors.py" in message


def test_the_portable_backend_serves_what_tpus_refuse() -> None:
    with jax.enable_x64(True), pytest.warns(FallbackWarning, match="scaled runs on tpu by the portable backend"):
        lowered = jax.jit(scaled).trace(like(16, 128, dtype="float64")).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" not in lowered.as_text()


@pytest.mark.parametrize("asked", [None, "tpu:v5e"])
def test_a_block_that_does_not_fit_is_an_error_also_without_a_target(asked: str | None) -> None:
    x = like(4096, 1 << 16)  # a gigabyte: rows of 8 fit, all of it does not
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        jax.jit(scaled).trace(x).lower(lowering_platforms=("tpu",))
        with pytest.raises(ResourceError, match="scaled needs more VMEM"):
            jax.jit(lambda x: scaled(x, block=4096, target=asked)).trace(x).lower(lowering_platforms=("tpu",))


def test_a_block_that_is_not_aligned_is_refused() -> None:
    window = Window(Value(RefType((64, 512), F32, "in"), "x"), (WindowDim("tiled", 8, 0), WindowDim("tiled", 128, 1)))
    found = layout_of(window)
    check_blocks(found)
    planted = replace(found, dims=(found.dims[0], LayoutDim(1, "lane", 512, 120)))
    with pytest.raises(TargetError) as caught:
        check_blocks(planted)
    message = str(caught.value)
    assert "a multiple of 128 elements, or all 512 of the dim" in message
    assert "120 elements, in blocks of [8, 120] of [64, 512]" in message


def test_every_tile_size_is_made_to_fit() -> None:
    for block in (1, 3, 5, 48):
        plan = scaled.trace(like(48, 100), block=block).lower("tpu:v5e").plan
        moved = "rearranges it to" in plan
        assert moved == (block in (1, 3, 5))  # 48 is the whole dim


def test_one_module_for_all_platforms() -> None:
    consent = [jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]
    x = like(64, 256)
    for platforms in (("tpu",), ("cpu", "cuda", "tpu")):
        if "cuda" in platforms:
            pytest.importorskip("triton", reason="needs triton")
        exported = jax.export.export(jax.jit(scaled), platforms=platforms, disabled_checks=consent)(x)
        assert exported.mlir_module().count('"tpu_custom_call"') + exported.mlir_module().count("@tpu_custom_call") == 1
        again = jax.export.deserialize(exported.serialize())
        assert again.platforms == platforms
