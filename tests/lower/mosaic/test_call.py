"""Blocks of outputs in the dead steps of a grid loop: each step has its own one, whether its tile runs or not."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from tests.lower.mosaic.two_cores import assert_every_plan_agrees
from tilekern.ir.parse import parse

BOUNDS = {
    "from 0 to 16": ("constant 0", "constant 16", (0, 0)),
    "from 8 to 24": ("constant 8", "constant 24", (0, 0)),
    "from an array": ("load %n[0]", "load %n[1]", (8, 32)),
    "of nothing": ("load %n[0]", "load %n[1]", (32, 8)),
}
WRITES = {
    "store": "store %v to %o[8*%k +: 8!, 0 +: 128!]",
    "add": 'atomic %v to %o[8*%k +: 8!, 0 +: 128!] {kind="add"}',
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize(("role", "write"), [("zeros", "store"), ("inout", "store"), ("sum", "add"), ("zeros", "add")])
def test_a_loop_over_some_tiles_writes_those_and_initialises_all(bounds: str, role: str, write: str) -> None:
    start, stop, numbers = BOUNDS[bounds]
    func = parse(f"""
        func @f(%x: ref<f32[40, 128], in>, %n: ref<i32[2], in>, %o: ref<f32[40, 128], {role}>) {{
          %start = {start} : i32[]
          %stop = {stop} : i32[]
          fold %k in k[40 by 8] from %start to %stop do {{
            %u = load %x[8*%k +: 8!, 0 +: 128!] : f32[8, 128]
            %v = add(%u, %u) : f32[8, 128]
            {WRITES[write]}
          }}
        }}
    """)
    floats = (np.arange(prod(p.ref.shape), dtype=np.float32).reshape(p.ref.shape) for p in func.inputs)
    arrays = [np.asarray(numbers, np.int32) if p.name == "n" else x for p, x in zip(func.inputs, floats, strict=True)]
    assert "grid_loop" in assert_every_plan_agrees(func, *arrays)
