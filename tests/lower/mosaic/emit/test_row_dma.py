"""Rows at any place of arrays that do not fit VMEM."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import tilekern as tk
from tests.lower.mosaic.every_plan import every_plan, kind_of_plan
from tests.lower.mosaic.test_races import Call, on_two_cores
from tilekern.ir.interpret import interpret
from tilekern.lower.mosaic.lowering import MosaicLowering
from tilekern.lower.target import TARGETS
from tilekern.lower.xla.emit import emit_xla

ROWS = 40


@tk.kernel(out_type=lambda ids, table: jax.ShapeDtypeStruct((ids.shape[0], table.shape[1]), table.dtype))
def embed(ids: tk.Ref, table: tk.Ref, out: tk.Ref, *, rows: tk.Block = 8, columns: tk.Block = 128) -> None:
    """Rows of a table; zeros where there is no such row."""
    i = tk.parallel(ids.shape[0], rows)
    j = tk.parallel(table.shape[1], columns)
    out[i, j] = table.load((ids.load(i, fill=0), j), fill=0)


@tk.kernel(out_type=lambda ids, table: jax.ShapeDtypeStruct((ids.shape[0], 3, table.shape[1]), table.dtype))
def neighbours(ids: tk.Ref, table: tk.Ref, out: tk.Ref) -> None:
    """A row and the two behind it."""
    n = tk.parallel(ids.shape[0])
    out[n] = table.load((tk.ds(ids[n] * 1, 3), slice(None)), fill=0)


def arrays(dtype: Any, count: int, width: int, low: int = 0, high: int = ROWS) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    table = random.integers(-100, 100, (ROWS, width)).astype(dtype)
    return random.integers(low, high, count).astype(np.int32), table


def types(*given: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given]


def fetched(lowering: Any) -> MosaicLowering:
    """The form that fetches rows."""
    (found,) = [form for form in every_plan(lowering.ir) if kind_of_plan(form.planned) == "row_dma"]
    return found


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.float16, ml_dtypes.bfloat16, np.int8, np.bool_])
@pytest.mark.parametrize(("count", "width", "columns"), [(16, 256, 128), (13, 128, 128), (5, 200, 200)])
def test_rows_are_those_of_the_table(dtype: Any, count: int, width: int, columns: int) -> None:
    """Numbers of rows that do not exist, too."""
    ids, table = arrays(dtype, count, width, -5, ROWS + 5)
    traced = embed.trace(*types(ids, table), columns=columns)
    found = fetched(traced)
    np.testing.assert_array_equal(found.interpret(ids, table)[0], interpret(traced.ir, ids, table)[0])
    assert "copied by itself" in found.plan


def test_infinities_and_nan_stay_in_their_rows() -> None:
    ids, table = arrays(ml_dtypes.bfloat16, 8, 128)
    table[::2], table[1::4] = np.nan, np.inf
    found = fetched(embed.trace(*types(ids, table)))
    np.testing.assert_array_equal(np.float32(found.interpret(ids, table)[0]), np.float32(table[ids]))


def test_neighbouring_rows_at_any_place() -> None:
    ids, table = arrays(np.float32, 7, 128, -2, ROWS + 2)
    traced = neighbours.trace(*types(ids, table))
    np.testing.assert_array_equal(fetched(traced).interpret(ids, table)[0], interpret(traced.ir, ids, table)[0])


def test_copies_do_not_race() -> None:
    ids, table = arrays(np.float32, 13, 256)
    traced = embed.trace(*types(ids, table))
    on_two_cores(fetched(traced), Call(traced.ir, (ids, table)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_a_table_that_does_not_fit_stays_in_hbm(dtype: Any) -> None:
    pytest.importorskip("libtpu", reason="needs libtpu")
    ids = jax.ShapeDtypeStruct((4096,), jnp.int32)
    for chip in ("tpu:v5e", "tpu:7x"):
        small, large = (
            MosaicLowering(embed.trace(ids, jax.ShapeDtypeStruct((n, 1024), dtype)).ir, TARGETS[chip], emit_xla.run)
            for n in (1024, 1 << 18)
        )
        assert kind_of_plan(small.planned) == "resident" and kind_of_plan(large.planned) == "row_dma"
        assert large.compile().resources.vmem_bytes < 1 << 20


def test_what_cannot_be_fetched_is_refused() -> None:
    """Rows of which a copy would have part of a register."""
    shapes = jax.ShapeDtypeStruct((4096,), jnp.int32), jax.ShapeDtypeStruct((1 << 18, 1000), jnp.float32)
    with pytest.raises(tk.errors.ResourceError, match=r"needs more VMEM") as caught:
        embed.trace(*shapes).lower("tpu:v5e")
    assert re.search(r"; table is there as a whole for its access at line \d+, at any place", str(caught.value))
