"""Which values are counted as going through VMEM; test_library holds the count against the compiler's."""

from __future__ import annotations

from tilekern.ir.parse import parse
from tilekern.lower.mosaic.spills import spilled_bytes

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
    return spilled_bytes(func.body)


def test_elementwise_chains_stay_in_registers() -> None:
    assert spilled("  %2 = exp(%1) : f32[512, 512]\n  store %2 to %o[0 +: 512!, 0 +: 512!]") == 0


def test_what_follows_a_reduction_of_it_is_kept() -> None:
    maximum = '  %2 = reduce(%1) {monoid="max", dims=[1]} : f32[512]\n'
    maximum += "  %3 = broadcast(%2) {dims=[0]} : f32[512, 512]\n"
    shifted = maximum + "  %4 = sub(%1, %3) : f32[512, 512]\n  store %4 to %o[0 +: 512!, 0 +: 512!]"
    assert spilled(shifted) == TILE
    assert spilled(maximum + "  store %3 to %o[0 +: 512!, 0 +: 512!]") == 0


def test_what_is_multiplied_is_kept_and_what_is_loaded_is_there() -> None:
    product = "  %2 = dot({a}, %0) {{contract=[[1], [0]]}} : f32[512, 512]\n  store %2 to %o[0 +: 512!, 0 +: 512!]"
    assert spilled(product.format(a="%0")) == 0
    assert spilled(product.format(a="%1")) == TILE


def test_logits_are_there_until_all_weights_are() -> None:
    body = """  %2 = reduce(%1) {monoid="max", dims=[1]} : f32[512]
  %3 = broadcast(%2) {dims=[0]} : f32[512, 512]
  %4 = sub(%1, %3) : f32[512, 512]
  %5 = exp2(%4) : f32[512, 512]
  %6 = convert(%5) {dtype=bf16} : bf16[512, 512]
  %7 = dot(%6, %6) {contract=[[1], [0]]} : f32[512, 512]
  store %7 to %o[0 +: 512!, 0 +: 512!]"""
    assert spilled(body.replace(" {dtype=bf16}", "")) == TILE + TILE // 2
