"""The XLA rules of pure ops on numbers where things go wrong, one tile at a time and batched over programs."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.ir.funcs import assert_same, edges
from tilekern.ir.compute import Bitcast, Reduce
from tilekern.ir.core import Op, Value
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.ordering import ArgReduce, Scan, Sort, TopK
from tilekern.ir.types import BOOL, DTYPES, DType, TileType, kind_of
from tilekern.lower.xla.emit.ops import function_of

BATCH = 5
PLACES = np.array([0, 2, -1, 99, -(2**31), 2**31 - 1, 3], np.int32)


def cases(dtype: DType) -> list[tuple[Op, list[np.ndarray]]]:
    """Ops with a batch of arrays for each operand."""
    rng, values = np.random.default_rng(3), edges(dtype, 64)
    if kind_of(dtype) == "float":  # XLA takes subnormals for 0
        values = values[~(np.abs(values) < ml_dtypes.finfo(dtype).smallest_normal) | (values == 0)]

    def tiles(*shape: int) -> np.ndarray:
        few = rng.choice(values, 12)
        if kind_of(dtype) == "float":
            few[:3] = np.nan, 0.0, -0.0
        return rng.choice(few, (BATCH, *shape))

    def places(*shape: int) -> np.ndarray:
        return rng.choice(PLACES, (BATCH, *shape))

    def case(kind: Any, *operands: np.ndarray, **fields: Any) -> tuple[Op, list[np.ndarray]]:
        types = (TileType(x.shape[1:], x.dtype) for x in operands)
        return kind(operands=tuple(map(Value, types)), **fields), list(operands)

    found = [
        *(case(ArgReduce, tiles(3, 40), extreme=e, dim=d) for e in ("max", "min") for d in (0, 1)),
        case(Sort, tiles(4, 9), dim=1),
        case(Sort, tiles(4, 9), places(4, 9), tiles(4, 9), dim=0, num_keys=2, pick=2),
        case(Sort, places(4, 9), tiles(4, 9), dim=1, pick=1),
        *(case(TopK, tiles(4, 9), dim=d, k=3) for d in (0, 1)),
        case(DynamicSlice, tiles(4, 5), places(), places(), sizes=(2, 5)),
        case(DynamicUpdateSlice, tiles(4, 5), tiles(2, 3), places(), places()),
        case(Take, tiles(4, 5), places(2, 3), dim=1),
        case(Take, tiles(4, 5), places(6, 5), dim=0, along=True),
    ]
    if dtype != BOOL:
        found += [case(Scan, tiles(3, 9), monoid=m, dim=1, reverse=r) for m in ("max", "min") for r in (True, False)]
        found.append(case(Bitcast, tiles(4), dtype=np.dtype(f"u{dtype.itemsize}")))
    if kind_of(dtype) in ("signed", "unsigned"):
        found += [case(Scan, tiles(9), monoid=m, dim=0) for m in ("sum", "prod")]
        found += [case(Elementwise, tiles(9), function="clz"), case(Reduce, tiles(3, 4), monoid="xor", dims=(0, 1))]
    return found


@pytest.mark.parametrize("name", DTYPES)
def test_the_rules_compute_what_the_ops_mean(name: str) -> None:
    many = cases(DTYPES[name])

    def run(arrays: list[list[Any]], batched: bool) -> list[Any]:
        functions = [function_of(op) for op, _ in many]
        functions = [jax.vmap(f) if batched else f for f in functions]
        return [f(*xs) for f, xs in zip(functions, arrays, strict=True)]

    with jax.enable_x64(True):
        batch = jax.jit(run, static_argnums=1)([arrays for _, arrays in many], True)
        first = jax.jit(run, static_argnums=1)([[x[0] for x in arrays] for _, arrays in many], False)
    for (op, arrays), got, one in zip(many, batch, first, strict=True):
        wanted = [np.asarray(op.evaluate(*(x[n] for x in arrays))) for n in range(BATCH)]
        if isinstance(op, Bitcast):
            keep = ~np.isnan(arrays[0].astype(np.float64))  # the payload of NaN may change on the way
            assert_same(np.asarray(got)[keep], np.stack(wanted)[keep])
            continue
        assert_same(np.asarray(got), np.stack(wanted), zeros=False)
        assert_same(np.asarray(one), wanted[0], zeros=False)
