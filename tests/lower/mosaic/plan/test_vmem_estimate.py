"""The values that the estimate puts into VMEM; test_library compares their bytes with the compiler's."""

from __future__ import annotations

import pytest

from tilekern.ir.control import Fold
from tilekern.ir.parse import parse
from tilekern.lower.mosaic.chip import CHIPS
from tilekern.lower.mosaic.legalize.sines import expand_sines
from tilekern.lower.mosaic.plan.plan_kernel import plan_kernel as plan
from tilekern.lower.mosaic.plan.unroll import Unrolling
from tilekern.lower.mosaic.plan.vmem_estimate import spilled_bytes
from tilekern.passes.cse import cse

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program

V5E, V6E = CHIPS["tpu:v5e"], CHIPS["tpu:v6e"]
TILE = 512 * 512 * 4
HELD = 124 << 10  # stays in registers


def spilled(body: str) -> int:
    """Of a program on x, f32[512, 512]."""
    func = parse(f"""func @f(%x: ref<f32[512, 512], in>, %o: ref<f32[512, 512], out>) {{
  grid %i in i[1 by 1]
  %0 = load %x[0 +: 512!, 0 +: 512!] : f32[512, 512]
  %1 = mul(%0, %0) : f32[512, 512]
{body}
}}
""")
    return spilled_bytes(func.body, V5E, {}, {})


def test_elementwise_chains_stay_in_registers() -> None:
    assert spilled("  %2 = exp(%1) : f32[512, 512]\n  store %2 to %o[0 +: 512!, 0 +: 512!]") == 0


def test_what_follows_a_reduction_of_it_is_kept() -> None:
    maximum = '  %2 = reduce(%1) {monoid="max", dims=[1]} : f32[512]\n'
    maximum += "  %3 = broadcast(%2) {dims=[0]} : f32[512, 512]\n"
    shifted = maximum + "  %4 = sub(%1, %3) : f32[512, 512]\n  store %4 to %o[0 +: 512!, 0 +: 512!]"
    assert spilled(shifted) == TILE - HELD
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
    assert spilled_bytes(func.body, V5E, {}, {}) == kept * (2048 * width * 4 - HELD)


@pytest.mark.parametrize("rows", [512, 2048])
def test_a_reduction_of_reduced_rows_waits_as_a_column_of_registers(rows: int) -> None:
    func = parse(f"""func @f(%x: ref<f32[{rows}, 128], in>, %o: ref<f32[{rows}, 128], out>) {{
  %0 = load %x[0 +: {rows}!, 0 +: 128!] : f32[{rows}, 128]
  %1 = reduce(%0) {{monoid="max", dims=[1]}} : f32[{rows}]
  %2 = broadcast(%1) {{dims=[0]}} : f32[{rows}, 128]
  %3 = reduce(%2) {{monoid="sum", dims=[1]}} : f32[{rows}]
  %4 = broadcast(%3) {{dims=[0]}} : f32[{rows}, 128]
  store %4 to %o[0 +: {rows}!, 0 +: 128!]
}}
""")
    assert spilled_bytes(func.body, V5E, {}, {}) == rows * 128 * 4 - HELD


@pytest.mark.parametrize(("width", "kept"), [(2048, 0), (4096, 1)])
def test_most_of_long_rows_is_not_loaded_again_behind_a_reduction(width: int, kept: int) -> None:
    func = parse(f"""func @f(%x: ref<f32[64, {width}], in>, %o: ref<f32[64, {width}], out>) {{
  %0 = load %x[0 +: 64!, 0 +: {width}!] : f32[64, {width}]
  %1 = reduce(%0) {{monoid="max", dims=[1]}} : f32[64]
  %2 = broadcast(%1) {{dims=[0]}} : f32[64, {width}]
  %3 = sub(%0, %2) : f32[64, {width}]
  store %3 to %o[0 +: 64!, 0 +: {width}!]
}}
""")
    assert spilled_bytes(func.body, V5E, {}, {}) == kept * (3 * 64 * width - HELD)


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
        ("bf16", 1024, 256, 1, 0),
        ("bf16", 1280, 512, 1, 0),  # rows of ten tiles
        ("f32", 512, 512, 4, 4),
    ],
)
def test_loaded_left_operands_are_copied(dtype: str, depth: int, width: int, v5e: int, v6e: int) -> None:
    func = parse(PRODUCT.format(dtype=dtype, depth=depth, width=width, also="", left="%0"))
    size = 512 * depth * (2 if dtype == "bf16" else 4)
    assert spilled_bytes(func.body, V5E, {}, {}) == v5e * size
    assert spilled_bytes(func.body, V6E, {}, {}) == v6e * size


@pytest.mark.parametrize(
    ("dtype", "width", "expected"), [("f32", 512, 4 * TILE), ("f32", 128, TILE), ("bf16", 512, TILE // 2)]
)
def test_computed_operands_are_kept_and_of_float32_three_parts_too(dtype: str, width: int, expected: int) -> None:
    also = f"%9 = mul(%0, %0) : {dtype}[512, 512]"
    func = parse(PRODUCT.format(dtype=dtype, depth=512, width=width, also=also, left="%9"))
    assert spilled_bytes(func.body, V5E, {}, {}) == expected


@pytest.mark.parametrize(("whole", "copied"), [(5120, 1), (3840, 0)])
def test_rows_of_the_block_count_not_those_of_the_tile(whole: int, copied: int) -> None:
    func = parse(f"""func @f(%x: ref<bf16[512, {whole}], in>, %w: ref<bf16[{whole}, 512], in>,
           %o: ref<f32[512, 512], out>) {{
  %a = constant 0 : i32[]
  %b = constant {whole} : i32[]
  %c = constant 0.0 : f32[512, 512]
  %r = fold %k in k[{whole} by 1280] from %a to %b with %s = %c do {{
  %0 = load %x[0 +: 512!, 1280*%k +: 1280!] : bf16[512, 1280]
  %1 = load %w[1280*%k +: 1280!, 0 +: 512!] : bf16[1280, 512]
  %2 = dot(%0, %1) {{contract=[[1], [0]]}} : f32[512, 512]
  %3 = add(%s, %2) : f32[512, 512]
  yield %3
  }} : f32[512, 512]
  store %r to %o[0 +: 512!, 0 +: 512!]
}}
""")
    assert dict(plan(func, V6E).vmem_buffers)["values"] == copied * 512 * 1280 * 2


@pytest.mark.parametrize(
    ("chip", "rows", "columns", "expected"),
    [
        ("tpu:v5e", 512, 128, 3 * (512 + 128) * 128 * 4),
        ("tpu:v5e", 512, 256, 4 * TILE),
        ("tpu:v6e", 512, 256, 3 * (512 + 256) * 256 * 4),
        ("tpu:7x", 512, 512, 3 * (512 + 256) * 256 * 4),
        ("tpu:7x", 2048, 512, 3 * (2048 + 256) * 256 * 4),
        ("tpu:7x", 2048, 640, 16 * TILE),
    ],
)
def test_one_stretch_of_columns_needs_parts_of_one_pass(chip: str, rows: int, columns: int, expected: int) -> None:
    func = parse(f"""func @f(%x: ref<f32[{rows}, 512], in>, %w: ref<f32[512, {columns}], in>,
           %o: ref<f32[{rows}, {columns}], out>) {{
  %0 = load %x[0 +: {rows}!, 0 +: 512!] : f32[{rows}, 512]
  %1 = load %w[0 +: 512!, 0 +: {columns}!] : f32[512, {columns}]
  %2 = dot(%0, %1) {{contract=[[1], [0]]}} : f32[{rows}, {columns}]
  store %2 to %o[0 +: {rows}!, 0 +: {columns}!]
}}
""")
    assert spilled_bytes(func.body, CHIPS[chip], {}, {}) == expected


LOGITS = """  %2 = reduce(%1) {monoid="max", dims=[1]} : f32[512]
  %3 = broadcast(%2) {dims=[0]} : f32[512, 512]
  %4 = sub(%1, %3) : f32[512, 512]
  %5 = exp2(%4) : f32[512, 512]
  %6 = convert(%5) : bf16[512, 512]
  %7 = dot(%6, %6) {contract=[[1], [0]]} : f32[512, 512]
"""


def summed(after: str = "") -> str:
    """Products of weights, summed over 4096 columns of logits."""
    return f"""func @f(%x: ref<f32[512, 4096], in>, %o: ref<f32[512, 512], out>) {{
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
  {after}
  store %r to %o[0 +: 512!, 0 +: 512!]
}}
"""


@pytest.mark.parametrize(
    ("rounds", "tiles"),
    [
        (Unrolling(1, False), 1.0),  # each in the place of the one before
        (Unrolling(4, False), 2.5),
        (Unrolling(), 1.5),  # logits are there until all weights are
        (Unrolling(2), 2.0),
        (Unrolling(4), 3.0),
    ],
)
def test_weights_of_all_iterations_of_a_round_are_there(rounds: Unrolling, tiles: float) -> None:
    func = parse(summed())
    (fold,) = (op for op in func.walk() if isinstance(op, Fold))
    assert spilled_bytes(func.body, V5E, {fold: rounds}, {}) == tiles * TILE


AGAIN = """%d = constant 512 : i32[]
  %q = fold %i in i[512 by 512] from %a to %d with %t = %c do {
  %20 = load %x[0 +: 512!, 512*%i +: 512!] : f32[512, 512]
  %21 = mul(%20, %20) : f32[512, 512]
  %22 = reduce(%21) {monoid="max", dims=[1]} : f32[512]
  %23 = broadcast(%22) {dims=[0]} : f32[512, 512]
  %24 = sub(%21, %23) : f32[512, 512]
  %25 = convert(%24) : bf16[512, 512]
  %26 = dot(%25, %25) {contract=[[1], [0]]} : f32[512, 512]
  yield %26
  } : f32[512, 512]
"""


@pytest.mark.parametrize(
    ("rounds", "tiles"), [(Unrolling(1, False), 1.5), (Unrolling(2, False), 2.0), (Unrolling(2), 3.0)]
)
def test_code_around_a_loop_has_values_of_its_own(rounds: Unrolling, tiles: float) -> None:
    """Unrolled code is one stretch, whose weights all count; a loop has a stretch of its own."""
    func = parse(summed(after=AGAIN))
    first, second = (op for op in func.walk() if isinstance(op, Fold))
    assert spilled_bytes(func.body, V5E, {first: rounds, second: Unrolling(1, False)}, {}) == tiles * TILE


def attention(dtype: str, rows: int, keys: int, before: str = "", masked: str = "") -> int:
    """Of attention of one tile, without the division."""
    func = parse(f"""func @f(%q: ref<{dtype}[{rows}, 64], in>, %k: ref<{dtype}[{keys}, 64], in>,
           %v: ref<{dtype}[{keys}, 64], in>, %o: ref<f32[{rows}, 64], out>) {{
  {before}
  %0 = load %q[0 +: {rows}!, 0 +: 64!] : {dtype}[{rows}, 64]
  %1 = load %k[0 +: {keys}!, 0 +: 64!] : {dtype}[{keys}, 64]
  %s = dot(%0, %1) {{contract=[[1], [1]]}} : f32[{rows}, {keys}]
  {masked or f"%2 = mul(%s, %s) : f32[{rows}, {keys}]"}
  %3 = reduce(%2) {{monoid="max", dims=[1]}} : f32[{rows}]
  %4 = broadcast(%3) {{dims=[0]}} : f32[{rows}, {keys}]
  %5 = sub(%2, %4) : f32[{rows}, {keys}]
  %6 = convert(%5) : {dtype}[{rows}, {keys}]
  %w = load %v[0 +: {keys}!, 0 +: 64!] : {dtype}[{keys}, 64]
  %7 = dot({"%5" if dtype == "f32" else "%6"}, %w) {{contract=[[1], [0]]}} : f32[{rows}, 64]
  store %7 to %o[0 +: {rows}!, 0 +: 64!]
}}
""")
    return spilled_bytes(func.body, V6E, {}, {})


def test_rows_of_a_register_that_dots_give_are_kept() -> None:
    assert attention("bf16", 1024, 128) == 1024 * 128 * 4


@pytest.mark.parametrize(("rows", "keys"), [(512, 512), (200, 256)])
def test_weights_of_float32_take_the_place_of_logits_with_their_parts(rows: int, keys: int) -> None:
    assert attention("f32", rows, keys) == 2 * rows * keys * 4


@pytest.mark.parametrize(("start", "kept"), [("constant 0", 2 / 3), ("broadcast(%i) {dims=[]}", 1)])
def test_only_a_known_triangle_is_kept(start: str, kept: float) -> None:
    before = f"""grid %i in i[4 by 1]
  %n = iota() {{dim=0}} : i32[512]
  %start = {start} : i32[512]
  %row = add(%n, %start) : i32[512]
  %rows = broadcast(%row) {{dims=[0]}} : i32[512, 512]
  %columns = broadcast(%n) {{dims=[1]}} : i32[512, 512]
  %mask = ge(%rows, %columns) : bool[512, 512]
  %none = constant -inf : f32[512, 512]"""
    assert attention("bf16", 512, 512, before, "%2 = select(%mask, %s, %none) : f32[512, 512]") == int(kept * TILE)


def test_what_a_switch_takes_and_gives_is_kept() -> None:
    """An angle, its sine and its cosine, however small."""
    func = parse("""func @f(%x: ref<f32[256, 128], in>, %o: ref<f32[256, 128], out>) {
  %0 = load %x[0 +: 256!, 0 +: 128!] : f32[256, 128]
  %1 = mul(%0, %0) : f32[256, 128]
  %2 = sin(%1) : f32[256, 128]
  %3 = cos(%1) : f32[256, 128]
  %4 = mul(%2, %3) : f32[256, 128]
  store %4 to %o[0 +: 256!, 0 +: 128!]
}
""")
    assert spilled_bytes(expand_sines(func).body, V5E, {}, {}) == 3 * 256 * 128 * 4 - HELD


def test_constants_that_a_switch_takes_are_not() -> None:
    body = """  %0 = load %x[0 +: 512!, 0 +: 128!] : f32[512, 128]
  %1 = constant 0.5 : f32[512, 128]
  %2 = mul(%0, %1) : f32[512, 128]
  %3 = sin(%2) : f32[512, 128]"""
    head = "func @f(%x: ref<f32[512, 128], in>, %o: ref<f32[512, 128], out>) {"
    func = cse(expand_sines(parse(f"{head}\n{body}\n  store %3 to %o[0 +: 512!, 0 +: 128!]\n}}\n")))
    assert spilled_bytes(func.body, V5E, {}, {}) == 3 * 512 * 128 * 4 - HELD


def test_rows_that_are_repeated_take_a_register_each() -> None:
    body = """  %9 = load %x[0 +: 256!, 0 +: 128!] : f32[256, 128]
  %2 = mul(%9, %9) : f32[256, 128]
  %3 = broadcast(%2) {dims=[0, 2]} : f32[256, 32, 128]
  %4 = reshape(%3) : f32[8192, 128]
  store %4 to %o[0 +: 8192!, 0 +: 128!]"""
    assert spilled(body) == 256 * 8 * 128 * 4 - HELD


def test_what_gathers_along_the_lanes_take_and_give_is_kept() -> None:
    body = """  %9 = load %x[0 +: 512!, 0 +: 128!] : f32[512, 128]
  %2 = mul(%9, %9) : f32[512, 128]
  %3 = iota() {dim=1} : i32[512, 128]
  %4 = take(%2, %3) {dim=1, along=true} : f32[512, 128]
  %5 = mul(%4, %4) : f32[512, 128]
  store %5 to %o[0 +: 512!, 0 +: 128!]"""
    assert spilled(body) == 2 * 512 * 128 * 4 - HELD


@pytest.mark.parametrize(
    ("dtype", "start", "kept"), [("bf16", 0, 0), ("bf16", 128, 1), ("f32", 64, 0), ("f32", 128, 0)]
)
def test_narrow_halves_of_heads_are_kept(dtype: str, start: int, kept: int) -> None:
    func = parse(f"""func @f(%x: ref<{dtype}[128, 8, 256], in>, %o: ref<{dtype}[128, 8, 256], out>) {{
  %0 = load %x[0 +: 128!, 0 +: 8!, {start} +: 128!] : {dtype}[128, 8, 128]
  store %0 to %o[0 +: 128!, 0 +: 8!, 0 +: 128!]
}}
""")
    assert spilled_bytes(func.body, V5E, {}, {}) == kept * (128 * 8 * 128 * 4 - HELD)


def test_transposed_lanes_take_whole_registers() -> None:
    body = """  %9 = load %x[0 +: 512!, 0 +: 2!] : f32[512, 2]
  %2 = mul(%9, %9) : f32[512, 2]
  %3 = reshape(%2) : f32[512, 1, 2]
  %4 = transpose(%3) {permutation=[0, 2, 1]} : f32[512, 2, 1]
  %5 = reshape(%4) : f32[1024, 1]
  %6 = reshape(%5) : f32[2, 512]
  store %6 to %o[0 +: 2!, 0 +: 512!]"""
    assert spilled(body) == 512 * 8 * 128 * 4 - HELD


@pytest.mark.parametrize(("chip", "rows", "registers"), [("tpu:v5e", 1, 4), ("tpu:v6e", 1, 2), ("tpu:v5e", 8, 1)])
def test_a_packed_row_fills_a_part_of_its_registers(chip: str, rows: int, registers: int) -> None:
    width = 65536
    func = parse(f"""func @f(%x: ref<bf16[{rows}, {width}], in>, %o: ref<bf16[{rows}, {width}], out>) {{
  %0 = load %x[0 +: {rows}!, 0 +: {width}!] : bf16[{rows}, {width}]
  %1 = convert(%0) : f32[{rows}, {width}]
  %2 = reduce(%1) {{monoid="max", dims=[1]}} : f32[{rows}]
  %3 = broadcast(%2) {{dims=[0]}} : f32[{rows}, {width}]
  %4 = sub(%1, %3) : f32[{rows}, {width}]
  %5 = convert(%4) : bf16[{rows}, {width}]
  store %5 to %o[0 +: {rows}!, 0 +: {width}!]
}}
""")
    expected = 4 * rows * width if rows > 1 else registers * 4 * width
    assert spilled_bytes(func.body, CHIPS[chip], {}, {}) == expected - HELD


@pytest.mark.parametrize(("chip", "sizes"), [("tpu:v6e", 4.0), ("tpu:7x", 2.5)])
def test_parts_of_a_shared_right_operand_are_packed_on_7x(chip: str, sizes: float) -> None:
    """Two dots with the keys on the right, as latent attention has; libtpu takes 4.1 and 2.1 sizes of the keys."""
    func = parse("""func @f(%q: ref<f32[16, 512], in>, %k: ref<f32[256, 512], in>, %o: ref<f32[16, 512], out>) {
  %0 = load %q[0 +: 16!, 0 +: 512!] : f32[16, 512]
  %1 = load %k[0 +: 256!, 0 +: 512!] : f32[256, 512]
  %2 = transpose(%1) {permutation=[1, 0]} : f32[512, 256]
  %3 = dot(%0, %2) {contract=[[1], [0]]} : f32[16, 256]
  %4 = dot(%3, %1) {contract=[[1], [0]]} : f32[16, 512]
  store %4 to %o[0 +: 16!, 0 +: 512!]
}
""")
    assert spilled_bytes(func.body, CHIPS[chip], {}, {}) == int(sizes * 256 * 512 * 4)


def two_products(after: str, dtype: str = "bf16") -> int:
    """Of two sums of products in loops of one iteration, and of ops on their results %s and %t."""
    loops = "\n".join(
        f"""%{name} = fold %k{name} in k{name}[256 by 256] from %a to %b with %c{name} = %c do {{
  %x{name} = load %x[0 +: 512!, 256*%k{name} +: 256!] : {dtype}[512, 256]
  %w{name} = load %w[256*%k{name} +: 256!, 0 +: 512!] : {dtype}[256, 512]
  %d{name} = dot(%x{name}, %w{name}) {{contract=[[1], [0]]}} : f32[512, 512]
  %e{name} = add(%c{name}, %d{name}) : f32[512, 512]
  yield %e{name}
  }} : f32[512, 512]"""
        for name in "st"
    )
    func = parse(f"""func @f(%x: ref<{dtype}[512, 256], in>, %w: ref<{dtype}[256, 512], in>,
           %o: ref<f32[512, 512], out>) {{
  %a = constant 0 : i32[]
  %b = constant 256 : i32[]
  %c = constant 0.0 : f32[512, 512]
  {loops}
  {after}
  store %r to %o[0 +: 512!, 0 +: 512!]
}}
""")
    unrollings = {op: Unrolling(1, False) for op in func.walk() if isinstance(op, Fold)}
    return spilled_bytes(func.body, V5E, unrollings, {})


def test_the_product_of_a_loop_of_one_iteration_waits_for_the_next_product() -> None:
    assert two_products("%r = mul(%s, %t) : f32[512, 512]") == TILE


def test_what_is_computed_again_from_a_waiting_tile_does_not_wait() -> None:
    again = """%p = mul(%s, %t) : f32[512, 512]
  %n = neg(%s) : f32[512, 512]
  %r = mul(%n, %p) : f32[512, 512]"""
    assert two_products(again) == TILE
    assert two_products(again.replace("neg", "exp")) == 2 * TILE


@pytest.mark.parametrize(("functions", "tiles"), [("exp", 0), ("exp log", 1)])
def test_a_product_waits_for_what_two_functions_make_of_it(functions: str, tiles: int) -> None:
    ops, last = list[str](), "%s"
    for n, function in enumerate(functions.split()):
        ops.append(f"%f{n} = {function}({last}) : f32[512, 512]")
        last = f"%f{n}"
    assert two_products("\n".join([*ops, f"%r = mul(%s, {last}) : f32[512, 512]"])) == tiles * TILE


def test_dots_of_loops_of_one_iteration_split_their_operands_one_after_the_other() -> None:
    assert two_products("%r = max(%s, %s) : f32[512, 512]", "f32") == 4 * 512 * 256 * 4


@pytest.mark.parametrize(("rows", "dtype", "kept"), [(256, "f32", 1), (128, "f32", 0), (256, "i32", 0)])
def test_vectors_around_a_loop_wait_as_columns(rows: int, dtype: str, kept: int) -> None:
    """Two columns of 256 rows do not fit the registers together; integers are computed again."""
    shape, square = f"{dtype}[{rows}]", f"{dtype}[{rows}, 128]"
    func = parse(f"""func @f(%v: ref<{shape}, in>, %x: ref<{dtype}[4096, 128], in>, %y: ref<bf16[8, 128], in>,
           %o: ref<{square}, out>, %z: ref<f32[8, 8], out>) {{
  %0 = load %v[0 +: {rows}!] : {shape}
  %1 = mul(%0, %0) : {shape}
  %2 = mul(%1, %0) : {shape}
  %a = constant 0 : i32[]
  %b = constant 4096 : i32[]
  %c = constant {"0.0" if dtype == "f32" else "0"} : {square}
  %r = fold %k in k[4096 by {rows}] from %a to %b with %s = %c do {{
  %3 = load %x[{rows}*%k +: {rows}!, 0 +: 128!] : {square}
  %4 = broadcast(%1) {{dims=[0]}} : {square}
  %5 = broadcast(%2) {{dims=[0]}} : {square}
  %6 = mul(%3, %4) : {square}
  %7 = add(%6, %5) : {square}
  %8 = add(%s, %7) : {square}
  yield %8
  }} : {square}
  store %r to %o[0 +: {rows}!, 0 +: 128!]
  %9 = load %y[0 +: 8!, 0 +: 128!] : bf16[8, 128]
  %10 = dot(%9, %9) {{contract=[[1], [1]]}} : f32[8, 8]
  store %10 to %z[0 +: 8!, 0 +: 8!]
}}
""")
    (fold,) = (op for op in func.walk() if isinstance(op, Fold))
    assert spilled_bytes(func.body, V5E, {fold: Unrolling()}, {}) == kept * 2 * rows * 128 * 4
