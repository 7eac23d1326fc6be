"""Which values are counted as going through VMEM; test_library holds the count against the compiler's."""

from __future__ import annotations

import pytest

from tilekern.ir.control import Fold
from tilekern.ir.parse import parse
from tilekern.lower.mosaic.chip import CHIPS
from tilekern.lower.mosaic.spills import spilled_bytes
from tilekern.lower.mosaic.unroll import Rounds

V5E, V6E = CHIPS["tpu:v5e"], CHIPS["tpu:v6e"]
TILE = 512 * 512 * 4


def spilled(body: str) -> int:
    """Of a program on x, f32[512, 512]."""
    func = parse(f"""func @f(%x: ref<f32[512, 512], in>, %o: ref<f32[512, 512], out>) {{
  grid %i in i[1 by 1]
  %0 = load %x[0 +: 512!, 0 +: 512!] : f32[512, 512]
  %1 = mul(%0, %0) : f32[512, 512]
{body}
}}
""")
    return spilled_bytes(func.body, V5E, {})


def test_elementwise_chains_stay_in_registers() -> None:
    assert spilled("  %2 = exp(%1) : f32[512, 512]\n  store %2 to %o[0 +: 512!, 0 +: 512!]") == 0


def test_what_follows_a_reduction_of_it_is_kept() -> None:
    maximum = '  %2 = reduce(%1) {monoid="max", dims=[1]} : f32[512]\n'
    maximum += "  %3 = broadcast(%2) {dims=[0]} : f32[512, 512]\n"
    shifted = maximum + "  %4 = sub(%1, %3) : f32[512, 512]\n  store %4 to %o[0 +: 512!, 0 +: 512!]"
    assert spilled(shifted) == TILE
    assert spilled(maximum + "  store %3 to %o[0 +: 512!, 0 +: 512!]") == 0


@pytest.mark.parametrize(("width", "kept"), [(128, 0), (256, 1)])
def test_rows_of_a_register_are_done_one_after_the_other(width: int, kept: int) -> None:
    func = parse(f"""func @f(%x: ref<bf16[2048, {width}], in>, %o: ref<bf16[2048, {width}], out>) {{
  %0 = load %x[0 +: 2048!, 0 +: {width}!] : bf16[2048, {width}]
  %1 = convert(%0) : f32[2048, {width}]
  %2 = reduce(%1) {{monoid="max", dims=[1]}} : f32[2048]
  %3 = broadcast(%2) {{dims=[0]}} : f32[2048, {width}]
  %4 = sub(%1, %3) : f32[2048, {width}]
  %5 = convert(%4) : bf16[2048, {width}]
  store %5 to %o[0 +: 2048!, 0 +: {width}!]
}}
""")
    assert spilled_bytes(func.body, V5E, {}) == kept * 2048 * width * 4


@pytest.mark.parametrize(("width", "kept"), [(2048, 0), (4096, 1)])
def test_long_rows_are_not_loaded_again_behind_a_reduction(width: int, kept: int) -> None:
    func = parse(f"""func @f(%x: ref<f32[64, {width}], in>, %o: ref<f32[64, {width}], out>) {{
  %0 = load %x[0 +: 64!, 0 +: {width}!] : f32[64, {width}]
  %1 = reduce(%0) {{monoid="max", dims=[1]}} : f32[64]
  %2 = broadcast(%1) {{dims=[0]}} : f32[64, {width}]
  %3 = sub(%0, %2) : f32[64, {width}]
  store %3 to %o[0 +: 64!, 0 +: {width}!]
}}
""")
    assert spilled_bytes(func.body, V5E, {}) == kept * 64 * width * 4


PRODUCT = """func @f(%x: ref<{dtype}[512, {depth}], in>, %w: ref<{dtype}[{depth}, {width}], in>,
           %o: ref<f32[512, {width}], out>) {{
  %0 = load %x[0 +: 512!, 0 +: {depth}!] : {dtype}[512, {depth}]
  {also}
  %1 = load %w[0 +: {depth}!, 0 +: {width}!] : {dtype}[{depth}, {width}]
  %2 = dot({left}, %1) {{contract=[[1], [0]]}} : f32[512, {width}]
  store %2 to %o[0 +: 512!, 0 +: {width}!]
}}
"""


@pytest.mark.parametrize(
    ("dtype", "depth", "width", "v5e", "v6e"),
    [
        ("bf16", 512, 512, 1, 0),  # four passes of a unit's depth
        ("bf16", 256, 512, 0, 0),
        ("bf16", 1024, 512, 1, 1),
        ("bf16", 1024, 128, 0, 0),  # multiplied once
        ("f32", 512, 512, 4, 4),
        ("f32", 512, 128, 4, 4),
    ],
)
def test_loaded_left_operands_are_copied(dtype: str, depth: int, width: int, v5e: int, v6e: int) -> None:
    func = parse(PRODUCT.format(dtype=dtype, depth=depth, width=width, also="", left="%0"))
    size = 512 * depth * (2 if dtype == "bf16" else 4)
    assert spilled_bytes(func.body, V5E, {}) == v5e * size
    assert spilled_bytes(func.body, V6E, {}) == v6e * size


@pytest.mark.parametrize(
    ("dtype", "width", "expected"), [("f32", 512, 4 * TILE), ("f32", 128, TILE), ("bf16", 512, TILE // 2)]
)
def test_computed_operands_are_kept_and_of_float32_three_parts_too(dtype: str, width: int, expected: int) -> None:
    also = f"%9 = mul(%0, %0) : {dtype}[512, 512]"
    func = parse(PRODUCT.format(dtype=dtype, depth=512, width=width, also=also, left="%9"))
    assert spilled_bytes(func.body, V5E, {}) == expected


@pytest.mark.parametrize(
    ("rows", "columns", "v5e", "on_7x"), [(512, 512, 4, 4), (2048, 512, 16, 4), (2048, 640, 16, 16)]
)
def test_7x_cuts_rows_into_stretches_for_few_columns(rows: int, columns: int, v5e: int, on_7x: int) -> None:
    func = parse(f"""func @f(%x: ref<f32[{rows}, 512], in>, %w: ref<f32[512, {columns}], in>,
           %o: ref<f32[{rows}, {columns}], out>) {{
  %0 = load %x[0 +: {rows}!, 0 +: 512!] : f32[{rows}, 512]
  %1 = load %w[0 +: 512!, 0 +: {columns}!] : f32[512, {columns}]
  %2 = dot(%0, %1) {{contract=[[1], [0]]}} : f32[{rows}, {columns}]
  store %2 to %o[0 +: {rows}!, 0 +: {columns}!]
}}
""")
    assert spilled_bytes(func.body, V5E, {}) == v5e << 20
    assert spilled_bytes(func.body, CHIPS["tpu:7x"], {}) == on_7x << 20


LOGITS = """  %2 = reduce(%1) {monoid="max", dims=[1]} : f32[512]
  %3 = broadcast(%2) {dims=[0]} : f32[512, 512]
  %4 = sub(%1, %3) : f32[512, 512]
  %5 = exp2(%4) : f32[512, 512]
  %6 = convert(%5) : bf16[512, 512]
  %7 = dot(%6, %6) {contract=[[1], [0]]} : f32[512, 512]
"""


@pytest.mark.parametrize(
    ("rounds", "tiles"),
    [
        (Rounds(1, False), 1.0),  # each in the place of the one before
        (Rounds(4, False), 1.0),
        (Rounds(), 1.5),  # logits are there until all weights are
        (Rounds(2), 2.0),
        (Rounds(4), 3.0),
    ],
)
def test_weights_of_all_iterations_of_a_round_are_there(rounds: Rounds, tiles: float) -> None:
    func = parse(f"""func @f(%x: ref<f32[512, 4096], in>, %o: ref<f32[512, 512], out>) {{
  %a = constant 0 : i32[]
  %b = constant 4096 : i32[]
  %c = constant 0.0 : f32[512, 512]
  %r = fold %k in k[4096 by 512] from %a to %b with %s = %c do {{
  %0 = load %x[0 +: 512!, 512*%k +: 512!] : f32[512, 512]
  %1 = mul(%0, %0) : f32[512, 512]
{LOGITS}
  %8 = add(%s, %7) : f32[512, 512]
  yield %8
  }} : f32[512, 512]
  store %r to %o[0 +: 512!, 0 +: 512!]
}}
""")
    (fold,) = (op for op in func.walk() if isinstance(op, Fold))
    assert spilled_bytes(func.body, V5E, {fold: rounds}) == tiles * TILE


def test_sines_are_kept_and_take_whole_registers() -> None:
    body = """  %9 = load %x[0 +: 256!, 0 +: 128!] : f32[256, 128]
  %2 = reshape(%9) : f32[256, 1, 128]
  %3 = mul(%2, %2) : f32[256, 1, 128]
  %4 = sin(%3) : f32[256, 1, 128]
  %5 = cos(%3) : f32[256, 1, 128]
  %6 = mul(%4, %5) : f32[256, 1, 128]
  %7 = reshape(%6) : f32[256, 128]
  store %7 to %o[0 +: 256!, 0 +: 128!]"""
    assert spilled(body) == 3 * 256 * 8 * 128 * 4
