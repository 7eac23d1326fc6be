"""Values that XLA computes from constants: fusions, loops, words that kernels store; and kernels compiled once."""

from typing import Any

import numpy as np
import pytest

from tilekern.estimate.tpu import hlo
from tilekern.estimate.tpu.bundles import DumpError, parse
from tilekern.estimate.tpu.chips import CHIPS
from tilekern.estimate.tpu.evaluate import Values, iterations
from tilekern.estimate.tpu.simulate import SimulationError, simulate

TABLE = """
%region (a: s32[], b: s32[]) -> s32[] {
  %b = s32[] parameter(1)
  %a = s32[] parameter(0)
  ROOT %add.9 = s32[] add(%a, %b)
}

%counted (p.0: s32[3], p.1: s32[4]) -> (s32[4], pred[4]) {
  %p.0 = s32[3]{0:T(128)} parameter(0)
  %p.1 = s32[4]{0:T(128)} parameter(1)
  %every = s32[4,3]{1,0:T(8,128)} broadcast(%p.0), dimensions={1}
  %each = s32[4,3]{1,0:T(8,128)} broadcast(%p.1), dimensions={0}
  %le = pred[4,3]{1,0:T(8,128)} compare(%every, %each), direction=LE
  %one = s32[] constant(1)
  %ones = s32[4,3]{1,0:T(8,128)} broadcast(%one), dimensions={}
  %zero = s32[] constant(0)
  %zeros = s32[4,3]{1,0:T(8,128)} broadcast(%zero), dimensions={}
  %chosen = s32[4,3]{1,0:T(8,128)} select(%le, %ones, %zeros)
  %sums = s32[4]{0:T(128)} reduce(%chosen, %zero), dimensions={1}, to_apply=%region
  %odd = pred[4]{0:T(128)} constant({true, false, true, false})
  ROOT %both = (s32[4]{0:T(128)}, pred[4]{0:T(128)}) tuple(%sums, %odd)
}

ENTRY %main (x: s32[4]) -> s32[4] {
  %ends = s32[3]{0:T(128)} constant({2, 5, 9})
  %places = s32[4]{0:T(128)} iota(), iota_dimension=0
  %three = s32[] constant(3)
  %threes = s32[4]{0:T(128)} broadcast(%three), dimensions={}
  %starts = s32[4]{0:T(128)} multiply(%places, %threes)
  %fusion = (s32[4]{0:T(128)}, pred[4]{0:T(128)}) fusion(%ends, %starts), kind=kLoop, calls=%counted
  %counts = s32[4]{0:T(128)} get-tuple-element(%fusion), index=0
  %x = s32[4]{0:T(128)} parameter(0)
  %moved = s32[4]{0:T(128)} add(%counts, %x)
  %part = s32[2]{0:T(128)} slice(%counts), slice={[1:3]}
  %joined = s32[5]{0:T(128)} concatenate(%part, %ends), dimensions={0}
  %held = s32[5]{0:T(128)} clamp(%one, %joined, %three)
  %one = s32[] constant(2)
  %large = s32[2]{0:T(128)} constant({65536, 3})
  %wrapped = s32[2]{0:T(128)} multiply(%large, %large)
  ROOT %sine = f32[4]{0:T(128)} sine(%counts)
}
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("counts", [0, 1, 2, 3]),
        ("wrapped", [0, 9]),
        ("joined", [1, 2, 2, 5, 9]),
        ("held", [2, 2, 2, 3, 3]),
        ("moved", None),
        ("sine", None),
    ],
)
def test_tables_of_constants_have_values(name: str, expected: list[int] | None) -> None:
    values = Values(hlo.entry(TABLE), TABLE)
    found = values.of(name)
    assert found is None if expected is None else np.asarray(found).tolist() == expected
    words = values.words(name)
    assert words is None if expected is None else words == expected + [0] * (128 - len(expected))


LOOP = """
%more (s: (s32[], f32[8])) -> pred[] {
  %limit = s32[] constant(5)
  %s = (s32[], f32[8]) parameter(0)
  %k = s32[] get-tuple-element(%s), index=0
  ROOT %lt = pred[] compare(%k, %limit), direction=LT
}

%step (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%n, %two)
  %y = f32[8] get-tuple-element(%t), index=1
  ROOT %pair = (s32[], f32[8]) tuple(%next, %y)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %begin = s32[] constant(0)
  %x = f32[8] parameter(0)
  %state = (s32[], f32[8]) tuple(%begin, %x)
  ROOT %while = (s32[], f32[8]) while(%state), condition=%more, body=%step
}
"""


def test_the_iterations_of_a_loop_are_counted() -> None:
    def count(text: str) -> int:
        entry = hlo.entry(text)
        return iterations(entry["while"], Values(entry, text).of("state"), text)

    assert count(LOOP) == 3
    with pytest.raises(DumpError, match="XLA's own loop while: how often its kernels run depends on data"):
        count(LOOP.replace("%begin = s32[] constant(0)", "%begin = s32[] parameter(1)"))
    with pytest.raises(DumpError, match="while does not end"):
        count(LOOP.replace("add(%n, %two)", "multiply(%n, %two)"))


def test_kernels_that_differ_by_names_alone_are_twins() -> None:
    (fusion,) = (line for line in TABLE.splitlines() if "%fusion =" in line)
    again = fusion.replace("%fusion", "%again").replace("%counted", "%counted.2")
    text = TABLE.replace(fusion, f"{fusion}\n{again}")
    copied = TABLE[TABLE.index("%counted ") : TABLE.index("ENTRY")].replace("%counted ", "%counted.2 ")
    for body, twins in ((copied.replace("%sums", "%sums.2"), ["again"]), (copied.replace("LE", "LT"), [])):
        whole = text.replace("ENTRY", f"{body}ENTRY")
        assert hlo.twins("fusion", hlo.entry(whole), whole) == twins


def program(*lines: str) -> Any:
    return parse("\n".join(f"  {n} : {{ {line} }}" for n, line in enumerate(lines)))


NUMBER = "%s1_s0 = inlined_call_operand.<no memory space> [shape: s32[1], index: 0, kind: input, shape index: {}]"
RESULT = "%s2_s1 = inlined_call_operand.vmem [shape: s32[9], index: 1, kind: output, shape index: {}]"
STORES = program(
    f"{NUMBER}  ;;  {RESULT}",
    "%3 = sst [smem:[#allocation3]] %s1_s0  ;;  %s4_s3 = sshll.u32 %s2_s1, 4  ;;  %s5_s5 = smov.u32 [#allocation3]",
    "%6 = dma.smem_to_vmem %s5_s5, 16, %s4_s3, [#allocation4]",
)
BRANCHES = program(
    NUMBER,
    "%p1_p0 = scmp.eq.s32.totalorder %s1_s0, 0",
    "%2 = sbr.rel (%p1_p0) target bundleno = 0 (0x0)",
)


def test_a_kernel_stores_words_that_the_next_one_reads() -> None:
    """A number without a memory space comes in the register; XLA's metadata of ragged dots is such a kernel's."""
    assert simulate(STORES, CHIPS["v5e"], {0: [7]}).stored == {1: [7] + [0] * 127}
    assert not simulate(STORES, CHIPS["v5e"]).stored
    with pytest.raises(SimulationError, match="operand 0: pass its values"):
        simulate(BRANCHES, CHIPS["v5e"])
    entry = hlo.entry(
        "ENTRY %main () -> s32[] {\n  %a = s32[8]{0:T(128)} constant({1, 2, 3, 4, 5, 6, 7, 8})\n"
        '  %kernel = (s32[2]{0:T(128)}, f32[4]{0:T(128)}) custom-call(%a), custom_call_target="tpu_custom_call"\n'
        "  ROOT %first = s32[2]{0:T(128)} get-tuple-element(%kernel), index=0\n}\n"
    )
    values = Values(entry, "")
    values.store(entry["kernel"], {1: [4, 6, *[0] * 126]})
    assert values.words("first") == [4, 6, *[0] * 126]
