"""The candidate plans of a Func, in order, and the first one that fits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lower.mosaic.every_plan import kind_of_plan
from tilekern.errors import ResourceError
from tilekern.ir.core import Func, cdiv
from tilekern.ir.parse import parse
from tilekern.ir.types import F32
from tilekern.lower.mosaic.chip import CHIPS, padded_bytes
from tilekern.lower.mosaic.emit.index_maps import decode_step, live_step
from tilekern.lower.mosaic.plan import plan_kernel as planner
from tilekern.lower.mosaic.plan.kernel_plan import KernelPlan
from tilekern.lower.mosaic.plan.plan_kernel import plan_kernel as plan

V5E = CHIPS["tpu:v5e"]


def product(rows: int, inner: int, columns: int, stop: str = "%1", before: str = "") -> Func:
    """A product of bfloat16 matrices in tiles of 512."""
    return parse(f"""
        func @product(%x: ref<bf16[{rows}, {inner}], in>, %w: ref<bf16[{inner}, {columns}], in>,
                      %t: ref<i32[64], in>, %o: ref<f32[{rows}, {columns}], out>) {{
          grid %i in i[{rows} by 512], %j in j[{columns} by 512]
          %0 = constant 0 : i32[]
          %1 = constant {inner} : i32[]
          {before}
          %2 = constant 0.0 : f32[512, 512]
          %3 = fold %k in k[{inner} by 512] from %0 to {stop} with %c = %2 do {{
            %4 = load %x[512*%i +: 512!, 512*%k +: 512!] : bf16[512, 512]
            %5 = load %w[512*%k +: 512!, 512*%j +: 512!] : bf16[512, 512]
            %6 = dot(%4, %5) {{contract=[[1], [0]], batch=[[], []], precision="ieee"}} : f32[512, 512]
            %7 = add(%6, %c) : f32[512, 512]
            yield %7
          }} : f32[512, 512]
          store %3 to %o[512*%i +: 512!, 512*%j +: 512!]
        }}
    """)


CAUSAL = """
  %block = constant 512 : i32[]
  %row = mul(%i, %block) : i32[]
  %end = add(%row, %block) : i32[]
"""
TABLE = "%end = load %t[%i] : i32[]"


@pytest.mark.parametrize(
    ("before", "forms"),
    [
        ("", ["resident", "grid_loop", "pipelined"]),
        (CAUSAL, ["resident", "step_table", "grid_loop", "pipelined"]),
        (TABLE, ["resident", "pipelined", "grid_loop"]),  # steps that nobody needs are many, perhaps
    ],
)
def test_the_order_of_plans(before: str, forms: list[str]) -> None:
    func = product(2048, 2048, 1024, "%end" if before else "%1", before)
    assert [kind_of_plan(found) for found in planner.candidates(func, V5E)] == forms


def test_loops_stay_inside_of_the_kernel_as_long_as_that_fits() -> None:
    small, large = product(2048, 2048, 1024), product(2048, 1 << 16, 1024)
    assert kind_of_plan(plan(small, V5E)) == "resident" and plan(small, V5E).grid == (4, 2)
    assert kind_of_plan(plan(large, V5E)) == "grid_loop" and plan(large, V5E).grid == (4, 2, 128)
    assert plan(large, V5E).semantics == ("parallel", "parallel", "arbitrary")
    pairs = plan(product(1 << 16, 1 << 16, 1024, "%end", CAUSAL), V5E)
    assert kind_of_plan(pairs) == "step_table" and pairs.grid == (2, 128 * 129 // 2)
    assert kind_of_plan(plan(product(2048, 1 << 16, 1024, "%end", TABLE), V5E)) == "pipelined"


def test_of_two_sums_the_smaller_one_is_opened() -> None:
    """Whatever the order of the grid, one of them is not written in consecutive steps; only its dims may be opened."""

    def sums(rows: int, columns: int) -> KernelPlan:
        return plan(
            parse(f"""
                func @sums(%x: ref<f32[4, {rows}, {columns}], in>,
                           %s: ref<f32[4, {rows}], sum>, %t: ref<f32[4, {columns}], sum>) {{
                  grid %g in g[4 by 1], %i in i[{rows} by 128], %j in j[{columns} by 128]
                  %0 = load %x[%g, 128*%i +: 128!, 128*%j +: 128!] : f32[128, 128]
                  %1 = reduce(%0) {{monoid="sum", dims=[1]}} : f32[128]
                  atomic %1 to %s[%g!, 128*%i +: 128!] {{kind="add"}}
                  %2 = reduce(%0) {{monoid="sum", dims=[0]}} : f32[128]
                  atomic %2 to %t[%g!, 128*%j +: 128!] {{kind="add"}}
                }}
            """),
            V5E,
        )

    for found, order, kinds in (
        (sums(1024, 512), (4, 8, 4), {"s": ["at", "tiled"], "t": ["at", "aligned"]}),
        (sums(512, 1024), (4, 8, 4), {"s": ["at", "aligned"], "t": ["at", "tiled"]}),
    ):
        assert found.grid == order and found.semantics == ("parallel", "arbitrary", "arbitrary")
        assert {p.name: [r.kind for r in seen.window.dims] for p, seen in found.outputs.items()} == kinds


def test_a_chip_with_less_memory_takes_another_plan() -> None:
    func = product(2048, 1 << 14, 1024)
    forms = {name: kind_of_plan(plan(func, chip)) for name, chip in CHIPS.items()}
    assert forms == {"tpu:v5e": "resident", "tpu:v5p": "grid_loop", "tpu:v6e": "resident", "tpu:7x": "grid_loop"}


def test_the_bill() -> None:
    found = plan(product(2048, 1 << 16, 1024), V5E)
    block, whole = padded_bytes((512, 512), np.dtype("bfloat16")), padded_bytes((512, 512), np.dtype("float32"))
    bill = dict(found.vmem_buffers)
    assert (bill["x"], bill["w"], bill["o"], bill["carries"]) == (2 * block, 2 * block, 2 * whole, whole)
    # An input whose block never changes is fetched once, to one buffer.
    one = plan(product(512, 2048, 512), V5E)
    assert dict(one.vmem_buffers)["x"] == padded_bytes((512, 2048), np.dtype("bfloat16"))
    assert found.vmem_bytes == sum(size for _, size in found.vmem_buffers) <= found.vmem_limit <= V5E.vmem_limit


def test_a_core_with_one_step_fetches_once() -> None:
    """Of two steps each of the two cores of a v5p runs one, so no block follows another."""
    func = product(1024, 512, 512)
    one, two = (dict(plan(func, CHIPS[name]).vmem_buffers) for name in ("tpu:v5p", "tpu:v5e"))
    assert two["x"] == 2 * one["x"] and two["o"] == 2 * one["o"]
    assert dict(plan(product(2048, 512, 512), CHIPS["tpu:v5p"]).vmem_buffers)["x"] == two["x"]


def test_a_loop_that_runs_once_has_no_buffers() -> None:
    once, twice = (plan(product(1024, inner, 512), V5E) for inner in (512, 1024))
    assert not once.scratch and not once.scratch_index
    assert [s.shape for s in twice.scratch] == [(512, 512)]
    # As an axis of the grid it has, for its steps are Pallas'.
    steps = next(p for p in planner.candidates(product(1024, 512, 512), V5E) if kind_of_plan(p) == "grid_loop")
    assert [s.shape for s in steps.scratch] == [(512, 512)]


@pytest.mark.parametrize(("depth", "width", "carries"), [(1024, 512, []), (1024, 64, ["sums"]), (4096, 512, ["sums"])])
def test_carries_of_loops_that_are_written_out_take_nothing(depth: int, width: int, carries: list[str]) -> None:
    """The compiler sees what is read where it was written, if all lanes are: of two iterations, but not of eight."""
    func = parse(f"""
        func @f(%x: ref<bf16[512, {depth}], in>, %w: ref<bf16[512, {width}], in>, %o: ref<f32[512, {width}], out>) {{
          %0 = constant 0 : i32[]
          %1 = constant {depth} : i32[]
          %2 = constant 0.0 : f32[512, {width}]
          %w0 = load %w[0 +: 512!, 0 +: {width}!] : bf16[512, {width}]
          %3 = fold %k in k[{depth} by 512] from %0 to %1 with %c = %2 do {{
            %4 = load %x[0 +: 512!, 512*%k +: 512!] : bf16[512, 512]
            %5 = dot(%4, %w0) {{contract=[[1], [0]]}} : f32[512, {width}]
            %6 = convert(%5) : bf16[512, {width}]
            %7 = dot(%6, %w0) {{contract=[[1], [1]]}} : f32[512, 512]
            %8 = convert(%7) : bf16[512, 512]
            %9 = dot(%8, %w0) {{contract=[[1], [0]]}} : f32[512, {width}]
            %10 = add(%9, %c) : f32[512, {width}]
            yield %10
          }} : f32[512, {width}]
          store %3 to %o[0 +: 512!, 0 +: {width}!]
        }}
    """)
    found = plan(func, V5E)
    assert len(found.scratch) == 1
    sizes = [size for name, size in found.vmem_buffers if name == "carries"]
    assert sizes == [padded_bytes((512, width), F32) for _ in carries]


@pytest.mark.parametrize("name", CHIPS)
def test_what_does_not_fit_is_refused_with_the_smallest_bill(name: str) -> None:
    """A planted overflow: tiles of 512 rows and all columns."""
    func = parse("""
        func @wide(%x: ref<f32[2048, 65536], in>, %o: ref<f32[2048, 65536], out>) {
          grid %i in i[2048 by 512]
          %0 = load %x[512*%i +: 512!, 0 +: 65536!] : f32[512, 65536]
          store %0 to %o[512*%i +: 512!, 0 +: 65536!]
        }
    """)
    with pytest.raises(ResourceError) as caught:
        plan(func, CHIPS[name])
    text = str(caught.value)
    assert f"wide needs more VMEM than a core of {name} has" in text
    assert "x 256.00 MiB, o 256.00 MiB" in text


# --- steps -----------------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_every_step_fetches_a_tile_that_is_there(data: st.DataObject) -> None:
    """A step of a tile that runs fetches it; the one before the first does too, and one behind the last the next."""
    extent, block = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 5))
    start, stop = (data.draw(st.integers(-3, 24)) for _ in range(2))
    reverse = data.draw(st.booleans())
    found = _stepping(extent, block, start, stop, "reverse" if reverse else "")
    first, last = (min(max(n, 0), extent) for n in (start, stop))
    run = list(range(first // block, cdiv(last, block)))[:: -1 if reverse else 1]
    assert found.grid_loop is not None
    steps = [decode_step(found, [place], {}, None) for place in range(found.grid_loop.steps)]
    order = [int(step.tile) for step in steps]
    assert sorted(order) == list(range(cdiv(extent, block))) and order == sorted(order, reverse=reverse)
    fetched = [int(live_step(step).tile) for step in steps]
    assert all(0 <= tile < found.grid_loop.steps for tile in fetched)
    assert all(fetched[order.index(tile)] == tile for tile in run)
    if run:
        assert set(fetched[: order.index(run[0])]) <= {run[0]}
        assert set(fetched[order.index(run[-1]) + 1 :]) <= {order[0]}


def _stepping(extent: int, block: int, start: int, stop: int, reverse: str) -> KernelPlan:
    func = parse(f"""
        func @f(%x: ref<f32[{extent}, 128], in>, %o: ref<f32[{block}, 128], out>) {{
          %0 = constant {start} : i32[]
          %1 = constant {stop} : i32[]
          %2 = constant 0.0 : f32[{block}, 128]
          %3 = fold %k in k[{extent} by {block}] from %0 to %1 {reverse} with %c = %2 do {{
            %4 = load %x[{block}*%k +: {block}, 0 +: 128!] : f32[{block}, 128]
            yield %4
          }} : f32[{block}, 128]
          store %3 to %o[0 +: {block}!, 0 +: 128!]
        }}
    """)
    (found,) = (p for p in planner.candidates(func, V5E) if kind_of_plan(p) == "grid_loop")
    return found
