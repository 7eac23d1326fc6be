"""The static estimate without a compiler: parsers and simulation on small texts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from tilekern.estimate.tpu import hlo, scalar, slots
from tilekern.estimate.tpu.bundles import Bundle, DumpError, Instruction, parse
from tilekern.estimate.tpu.chips import CHIPS, chip
from tilekern.estimate.tpu.estimate import read
from tilekern.estimate.tpu.evaluate import Values
from tilekern.estimate.tpu.scalar import Unknown, rule
from tilekern.estimate.tpu.simulate import GRANULE, SimulationError, simulate

V5E = CHIPS["v5e"]
int32 = st.integers(-(2**31), 2**31 - 1)


# --- chips ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHIPS)
def test_the_rates_are_those_that_jax_knows(name: str) -> None:
    info = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion(name), 1)
    machine = chip(name)
    assert machine.bandwidth == info.mem_bw_bytes_per_second
    assert machine.peak == pytest.approx(info.bf16_ops_per_second, rel=0.005)
    assert machine.mxus == info.num_mxus
    for dtype, known in (("int8", info.int8_ops_per_second), ("float8_e4m3fn", info.fp8_ops_per_second)):
        # 0: not told; products are as fast as those of bfloat16 there
        assert machine.rate(dtype) == pytest.approx(known or info.bf16_ops_per_second, rel=0.005)


def test_an_unknown_chip_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"chip = 'v9'; expected one of v5e, v5p, v6e, 7x"):
        chip("v9")


# --- bundles ----------------------------------------------------------------------------------------------------------


def bundle(*instructions: str) -> Bundle:
    return parse(f"  0 : {{ {' ;; '.join(instructions)} }}")[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("%s99_s27 = sshll.u32 %s97_s26, 4 /* why */", Instruction("sshll.u32", "s27", (("s26",), (4,)))),
        ("%s1_s2 = smov.u32 (%p5_p10, %s4_s2), 0", Instruction("smov.u32", "s2", ((0,),), "p10")),
        ("%8 = vsyncpa [#allocation4 + $0x1], 0", Instruction("vsyncpa", "8", (("#allocation4", 1), (0,)))),
        ("%s1_s2 = smul.f32 1.0, -inf", Instruction("smul.f32", "s2", ((0x3F800000,), (0xFF800000 - 2**32,)))),
        (
            "%s96_s6 = sld [smem:[#allocation6 + %s9374_s28]]",
            Instruction("sld", "s6", (("#allocation6", "s28"),)),
        ),
        (
            "%9 = sst [smem:[#allocation8_spill]] %s1_s2",
            Instruction("sst", "9", (("#allocation8_spill",), ("s2",))),
        ),
        (
            "%3 = sbr.rel (!%p9_p3) target bundleno = 5 (0x5), region = 69",
            Instruction("sbr.rel", "", ((5,),), "p3", True),
        ),
        (
            "%s0_s4 = inlined_call_operand.hbm [shape: f32[8,128], index: 3, kind: input, shape index: {}]",
            Instruction("inlined_call_operand.hbm", "s4", ((3,),)),
        ),
        (
            "%64 = dma.hbm_to_vmem [thread:$0]  (!%p8_p12), /*hbm=*/%s9_s27, 16384, %s1_s29, %s8_s2, 512, 512, 32",
            Instruction(
                "dma.hbm_to_vmem",
                "64",
                (("s27",), (16384,), ("s29",), ("s2",), (512,), (512,), (32,)),
                "p12",
                True,
                ("hbm", "vmem"),
            ),
        ),
    ],
)
def test_an_instruction_is_read(text: str, expected: Instruction) -> None:
    assert bundle(text) == (expected,)


def test_vector_instructions_and_names_for_registers_are_dropped() -> None:
    assert not bundle(
        "%v1_v0 = vadd.f32 1.0, %v0_v1",
        "%vm3_vm0 = vcmp.eq.s32.totalorder %v1_v1, 1",
        "%5 = vst [vmem:[%s6_s0] sm:$0xff] %v3_v1",
        "%s7_s9 = sphi %s1_s9, %s2_s9",
        "%s8_s2 = int_to_ptr.hbm [resolvable:$true] %s6_s2",
    )


def test_a_general_dma_reads_and_writes_where_its_pointers_point() -> None:
    made = bundle(
        "%s1_s1 = int_to_ptr.vmem [resolvable:$true] %s0_s1",
        "%s2_s2 = scalar_lea.hbm %s3_s3, 64",
        "%9 = dma.general %s1_s1, 128, %s2_s2, [#allocation2], [#allocation3], [#allocation5], %s6_s6, 0",
    )
    assert made[-1].spaces == ("vmem", "hbm")


def test_comments_may_span_lines_and_labels_stand_before_bundles() -> None:
    text = "LB: loop body\n\n     0   :  { %4 = sfence /* hlo: {\n x */ }\n  0x1 LB: > > { %5 = sfence } /* End */\n"
    assert [[i.op for i in b] for b in parse(text)] == [["sfence"], ["sfence"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "no bundles in: 'nothing'"),
        ("  0x1 : { %5 = sfence }", "expected bundle 0, got 0x1"),
        ("  0 ; { %5 = sfence }", r"not a bundle: 0 ; \{ %5 = sfence \}"),
        ("  0 : { 17 = sadd }", "not an instruction: 17 = sadd"),
        ("  0 : { %s1_s1 = sadd.s32 ?x, 1 }", r"an operand of unknown form, '\?x': %s1_s1 = sadd"),
        ("  0 : { %3 = sbr.rel target far }", "an instruction of unknown form: %3 = sbr.rel target far"),
        ("  0 : { %s1_s1 = smov.u32 (%p1_p1, %s2_s2), 0 }", "a false predicate should leave the register as it is"),
    ],
)
def test_other_text_is_an_error(text: str, message: str) -> None:
    with pytest.raises(DumpError, match=message):
        parse(text)


# --- scalar instructions ----------------------------------------------------------------------------------------------


@given(int32, int32)
def test_integers_wrap_at_32_bits(a: int, b: int) -> None:
    x, y = np.int64(a), np.int64(b)
    for op, exact in {"sadd.s32": x + y, "ssub.s32": x - y, "sand.u32": x & y, "sor.u32": x | y}.items():
        assert rule(op)(a, b) == np.int64(exact).astype(np.int32)  # pyright: ignore[reportOptionalCall]
    assert rule("smul.u32")(a, b) == (a * b + 2**31) % 2**32 - 2**31  # pyright: ignore[reportOptionalCall]
    high = (a % 2**32) * (b % 2**32) >> 32
    assert rule("smulhi.u32")(a, b) == (high + 2**31) % 2**32 - 2**31  # pyright: ignore[reportOptionalCall]
    assert rule("sadd.s32")(a, b % 2**32) == rule("sadd.s32")(a, b)  # pyright: ignore[reportOptionalCall]


@given(int32, st.integers(0, 31))
def test_shifts(a: int, n: int) -> None:
    assert rule("sshra.s32")(a, n) == np.int32(a) >> n  # pyright: ignore[reportOptionalCall]
    assert rule("sshrl.u32")(a, n) == np.uint32(a % 2**32) >> n  # pyright: ignore[reportOptionalCall]
    assert rule("sshll.u32")(a, n) == (np.int64(a) << n).astype(np.int32)  # pyright: ignore[reportOptionalCall]


@given(int32, int32)
def test_comparisons(a: int, b: int) -> None:
    assert rule("scmp.lt.s32.totalorder")(a, b) == (a < b)  # pyright: ignore[reportOptionalCall]
    assert rule("scmp.ge.u32.totalorder")(a, b) == (a % 2**32 >= b % 2**32)  # pyright: ignore[reportOptionalCall]
    assert rule("smax.u32")(a, b) == max(a % 2**32, b % 2**32)  # pyright: ignore[reportOptionalCall]


def test_pointers_survive_shifts() -> None:
    pointer = 3 << 44
    shifted = rule("sshll.u32")(pointer, 4)  # pyright: ignore[reportOptionalCall]
    assert rule("sshra.s32")(shifted, 4) == pointer  # pyright: ignore[reportOptionalCall]
    assert scalar.signed(pointer) == pointer


def test_what_comes_from_the_unknown_is_unknown_unless_the_known_decides() -> None:
    x = Unknown("x")
    known = {("por", 1): 1, ("pand", 0): 0, ("pnand", 0): 1}
    for op in ("por", "pand", "pnand", "pxor", "sadd.s32"):
        for value in (0, 1):
            for operands in ((value, x), (x, value)):
                assert rule(op)(*operands) == known.get((op, value), x)  # pyright: ignore[reportOptionalCall]
    assert rule("scalar_select")(1, 5, x) == 5  # pyright: ignore[reportOptionalCall]
    assert rule("scalar_select")(x, 5, 5) == x  # pyright: ignore[reportOptionalCall]


@given(st.floats(width=32), st.floats(width=32))
def test_float32_is_in_the_bits_of_words(a: float, b: float) -> None:
    x, y = np.float32(a), np.float32(b)
    with np.errstate(all="ignore"):
        for op, exact in {"sadd.f32": x + y, "ssub.f32": x - y, "smul.f32": x * y}.items():
            word: Any = rule(op)(scalar.bits(a), scalar.bits(b))  # pyright: ignore[reportOptionalCall]
            got = np.int32(word).view(np.float32)
            np.testing.assert_array_equal(got, exact)
    assert rule("scmp.lt.f32.partialorder")(scalar.bits(a), scalar.bits(b)) == (x < y)  # pyright: ignore[reportOptionalCall]


@given(int32)
def test_integers_become_floats(a: int) -> None:
    assert rule("scvt.s32.f32")(a) == np.float32(a).view(np.int32)  # pyright: ignore[reportOptionalCall]


def test_other_dtypes_and_news_have_no_rule() -> None:
    assert all(rule(op) is None for op in ("sadd.bf16", "scmp.lt.f64.partialorder", "srcp.f32", "snew.s32"))


# --- simulation -------------------------------------------------------------------------------------------------------


def program(*lines: str) -> tuple[Bundle, ...]:
    return parse("\n".join(f"  {i:#x} : {{ {line} }}" for i, line in enumerate(lines)))


def loop(trips: int, body: int, slots_: int) -> tuple[Bundle, ...]:
    """A bundle, `trips` times (one that counts, `body` empty ones, two of the branch, delay slots), a bundle."""
    return program(
        "%s1_s1 = smov.u32 0",
        "%s2_s1 = sadd.s32 1, %s3_s1",
        *[""] * body,
        f"%p1_p0 = scmp.ge.s32.totalorder %s2_s1, {trips}",
        "%4 = sbr.rel (!%p1_p0) target bundleno = 1 (0x1)",
        *[""] * slots_,
        "%5 = sfence",
    )


@given(st.integers(1, 30), st.integers(0, 5), st.sampled_from(sorted(CHIPS)))
def test_a_loop_takes_its_trips_times_its_bundles(trips: int, body: int, name: str) -> None:
    machine = CHIPS[name]
    run = simulate(loop(trips, body, machine.delay_slots), machine)
    assert run.bundles == 2 + trips * (3 + body + machine.delay_slots)
    assert run.executed == (1, *[trips] * (3 + body + machine.delay_slots), 1)
    assert run.stall == 0


def test_registers_change_at_the_end_of_a_bundle() -> None:
    """Two registers change places; then the branch is taken or not, by the value of one."""
    for taken in (0, 1):
        run = simulate(
            program(
                f"%p1_p1 = smov.u32 {taken} ;; %p2_p2 = smov.u32 {1 - taken}",
                "%p3_p1 = pmov %p2_p2 ;; %p4_p2 = pmov %p1_p1",
                "%5 = sbr.rel (%p4_p2) target bundleno = 8 (0x8)",
                *[""] * (V5E.delay_slots + 2),
            ),
            V5E,
        )
        assert run.bundles == (8 if taken else 9)


def copies(n: int, granules: int) -> tuple[Bundle, ...]:
    """Reads by n DMAs, then a wait for all of them."""
    starts = [f"%{10 + i} = dma.hbm_to_vmem %s1_s1, {granules}, %s2_s2, [#allocation1]" for i in range(n)]
    return program(
        "%s1_s1 = inlined_call_operand.hbm [shape: f32[8,128], index: 0] ;; %s2_s2 = smov.u32 [#allocation3]",
        "%9 = vsyncpa [#allocation1], 0",
        *starts,
        f"%3 = dma.done.wait [#allocation1], {n * granules}",
        f"%4 = vsyncadd [#allocation1], {2**32 - n * granules}",
    )


@given(st.integers(1, 5), st.integers(1, 10_000), st.sampled_from(sorted(CHIPS)))
def test_dmas_share_the_bandwidth(n: int, granules: int, name: str) -> None:
    machine = CHIPS[name]
    run = simulate(copies(n, granules), machine)
    assert (run.read, run.written, run.dmas, run.bundles) == (n * granules * GRANULE, 0, n, n + 4)
    # The last bytes arrive a latency after the HBM has sent all, begun at the first request (cycle 2).
    arrival = 2 + n * granules * GRANULE / machine.bytes_per_cycle + machine.latency
    assert run.stall == pytest.approx(arrival - (n + 2), abs=n + 2)


def test_the_words_of_an_operand_decide() -> None:
    text = program(
        "%s1_s1 = inlined_call_operand.hbm [shape: s32[4], index: 2] ;; %s2_s2 = smov.u32 [#allocation3]",
        "%s3_s1 = sshll.u32 %s1_s1, 4",
        "%5 = dma.hbm_to_smem %s3_s1, 16, %s2_s2, [#allocation1]",
        "%6 = dma.done.wait [#allocation1], 16",
        "%s4_s4 = sld [smem:[#allocation3 + $0x2]]",
        "%p5_p0 = scmp.eq.s32.totalorder %s4_s4, 7",
        "%7 = sbr.rel (%p5_p0) target bundleno = 13 (0xd)",
        *[""] * (V5E.delay_slots + 2),
        "%8 = sfence",
    )
    assert simulate(text, V5E, {2: [1, 2, 7]}).executed[-3:] == (0, 0, 1)
    assert simulate(text, V5E, {2: [1, 2, 8]}).executed[-3:] == (1, 1, 1)
    with pytest.raises(SimulationError, match=r"bundle 0x6: sbr\.rel depends on an unknown value: operand 2: pass its"):
        simulate(text, V5E, {1: [7, 7, 7]})


def test_quotients_are_popped_before_remainders() -> None:
    text = program(
        "%9 = sdivrem.u32 17, 5",
        "%s1_s1 = spop.drf %9",
        "%s2_s2 = spop.drf %9",
        "%3 = dma.hbm_to_vmem 0, %s1_s1, 0, [#allocation1]",
        "%4 = dma.vmem_to_hbm 0, %s2_s2, 0, [#allocation1]",
    )
    run = simulate(text, V5E)
    assert (run.read, run.written) == (3 * GRANULE, 2 * GRANULE)


@pytest.mark.parametrize(
    ("lines", "error", "message"),
    [
        (
            ["%3 = dma.done.wait [#allocation1], 8"],
            SimulationError,
            "bundle 0x0: a wait for a DMA that was never started",
        ),
        (["%3 = snew.thing 1"], DumpError, "no rule for the instruction 'snew.thing'"),
        (
            ["%s1_s1 = snew.s32 1", "%p1_p1 = scmp.eq.s32 %s1_s1, 1", "%3 = sbr.rel (%p1_p1) target bundleno = 0"],
            SimulationError,
            "bundle 0x2: sbr.rel depends on an unknown value: s1 of snew.s32",
        ),
        (["%3 = sbr.rel (%p1_p1) target bundleno = 0"], SimulationError, "register p1 before it is set"),
        (
            ["%s1_s1 = sld [smem:[#allocation7]]", "%3 = dma.hbm_to_vmem 0, %s1_s1, 0, 0"],
            SimulationError,
            "a word of SMEM that nothing has set, in #allocation7",
        ),
        (["%9 = sdivrem.u32 17, 0"], SimulationError, "a division by zero"),
        (
            ["%3 = sbr.rel target bundleno = 0", "%4 = sbr.rel target bundleno = 0"],
            SimulationError,
            "a branch in the delay slots of another",
        ),
    ],
)
def test_what_cannot_be_followed_is_an_error(lines: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        simulate(program(*lines), V5E)


def test_words_that_the_runtime_sets() -> None:
    text = program("%s1_s1 = sld [smem:[#allocation0]]", "%3 = dma.hbm_to_vmem 0, %s1_s1, 0, 0")
    assert simulate(text, V5E, smem={"#allocation0": 5}).read == 5 * GRANULE


# --- slots, HLO -------------------------------------------------------------------------------------------------------

SLOTS = "== CAPACTIY:\nMATMUL, VALU, VSTORE:SPILL\n    4    4    1\n== UTILIZATION:\n1 2 0\n0 4 1\n"


def test_slots_are_weighted_by_executions() -> None:
    made = slots.parse(SLOTS)
    assert made.capacity == {"MATMUL": 4, "VALU": 4, "VSTORE:SPILL": 1}
    assert made.used((10, 3)) == {"MATMUL": 10, "VALU": 32, "VSTORE:SPILL": 3}
    with pytest.raises(DumpError, match="a table of 2 bundles for a program of 5"):
        made.used((1,) * 5)


@pytest.mark.parametrize("text", ["", SLOTS.replace("0 4 1", "0 4"), SLOTS.replace("UTILIZATION", "ELSE")])
def test_a_table_of_another_form_is_an_error(text: str) -> None:
    with pytest.raises(DumpError, match="table"):
        slots.parse(text)


HLO = """
%fused (p: f32[8]) -> f32[8] {
  ROOT %p = f32[8]{0} parameter(0)
}

ENTRY %main (x: f32[2048,512]) -> f32[2048,512] {
  %constant.1 = s32[2,3]{1,0:T(2,128)} constant({ { 1, -2, 3 }, { 4, 5, 6 } })
  %x.1 = f32[2048,512]{1,0:T(8,128)} parameter(0), metadata={op_name="x"}
  %copy-start = (s32[2,3]{1,0:T(2,128)S(1)}, s32[2,3]{1,0:T(2,128)}, u32[]{:S(2)}) copy-start(%constant.1)
  %slice-start = ((s32[2,3]{1,0:T(2,128)S(1)}), s32[2,1]{1,0:T(2,128)}, s32[]{:S(2)}) slice-start(%constant.1)
  %copy-done = s32[2,3]{1,0:T(2,128)S(1)} copy-done(%copy-start)
  ROOT %copy.1 = f32[64,512]{1,0} custom-call(%copy-done, /*i=1*/%x.1), custom_call_target="tpu_custom_call", m={{
"a":"b"
}}, backend_config={"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"2883584"}]}
}
"""


def test_the_entry_computation_is_read() -> None:
    made = hlo.entry(HLO)
    assert [(i.name, i.opcode, i.operands) for i in made.values()] == [
        ("constant.1", "constant", ()),
        ("x.1", "parameter", ()),
        ("copy-start", "copy-start", ("constant.1",)),
        ("slice-start", "slice-start", ("constant.1",)),
        ("copy-done", "copy-done", ("copy-start",)),
        ("copy.1", "tpu_custom_call", ("copy-done", "x.1")),
    ]
    assert hlo.vmem(HLO) == {"copy.1": 2883584}
    assert hlo.nbytes(made["x.1"].shape) == 4 * 2048 * 512
    assert hlo.copied(made["copy-start"]) == (2 * 3 * 4, True)
    assert hlo.copied(made["slice-start"]) == (2 * 4, False)


FORMAT = """ENTRY %main (x: bf16[16,8,128]) -> bf16[16,8,128] {
  %x.1 = bf16[16,8,128]{2,0,1:T(8,128)(2,1)} parameter(0)
  %sparse-core-data-format-call.1.call-start = ((), (), (s32[16384]{0:T(1024)}, /*index=1*/s32[0]{0})) \
custom-call-start(), async_execution_thread="sparsecore", custom_call_target="TODO(b/1)", called_computations={%c}
  %sparse-core-data-format-call.1.call-update = ((bf16[16,8,128]{2,0,1:T(8,128)(2,1)}), bf16[16,8,128]{2,1,0:\
T(8,128)(2,1)}, (s32[16384]{0:T(1024)})) custom-call-update(%sparse-core-data-format-call.1.call-start, %x.1)
  ROOT %sparse-core-data-format-call.1.call-done = bf16[16,8,128]{2,1,0:T(8,128)(2,1)} \
custom-call-done(%sparse-core-data-format-call.1.call-update)
}
"""


def test_what_sparse_cores_rearrange_is_read_and_written_once(tmp_path: Path) -> None:
    (tmp_path / "1-TLP-hlo.txt").write_text(FORMAT)
    (tmp_path / "compiled.txt").write_text(FORMAT)
    machine, size = CHIPS["7x"], 16 * 8 * 128 * 2
    (made,) = read(tmp_path, "7x", machine)
    assert (made.name, made.dmas, made.bundles, made.pallas) == ("data formats by SparseCores", 1, 0, False)
    assert made.read == made.written == size
    assert made.stall == int(machine.latency + 2 * size / machine.bytes_per_cycle)


def test_other_asynchronous_calls_are_an_error(tmp_path: Path) -> None:
    text = FORMAT.replace("sparse-core-data-format-call", "gather-offload")
    (tmp_path / "1-TLP-hlo.txt").write_text(text)
    (tmp_path / "compiled.txt").write_text(text)
    with pytest.raises(DumpError, match=r"gather-offload\.1\.call-start: an asynchronous call, of which no dump tells"):
        read(tmp_path, "7x", CHIPS["7x"])


def test_the_words_of_constants_are_found_through_copies() -> None:
    values = Values(hlo.entry(HLO), HLO)
    assert values.words("copy-done") == [1, -2, 3, *[0] * 125, 4, 5, 6, *[0] * 125]
    assert values.words("x.1") is None


@given(st.integers(1, 3), st.integers(1, 20), st.integers(1, 300), st.sampled_from([1, 2, 8]))
def test_words_lie_in_tiles(lead: int, rows: int, columns: int, sublanes: int) -> None:
    values = np.arange(lead * rows * columns).reshape(lead, rows, columns) + 1
    text = "ENTRY %main () -> s32[] {\n" + f"  %c = s32[{lead},{rows},{columns}]{{2,1,0:T({sublanes},128)}} constant("
    whole = f"{text}{{ {', '.join(map(str, values.reshape(-1)))} }})\n}}\n"
    words = Values(hlo.entry(whole), whole).words("c")
    assert words is not None
    tiles, lanes = -(-rows // sublanes), -(-columns // 128)
    assert len(words) == lead * tiles * lanes * sublanes * 128
    for index, value in np.ndenumerate(values):
        k, i, j = index
        tile = (k * tiles + i // sublanes) * lanes + j // 128
        assert words[(tile * sublanes + i % sublanes) * 128 + j % 128] == value


def test_hlo_of_another_form_is_an_error() -> None:
    with pytest.raises(DumpError, match="without an ENTRY"):
        hlo.entry("HloModule x")
    with pytest.raises(DumpError, match="an HLO instruction of unknown form: %a is b"):
        hlo.entry("ENTRY %main {\n  %a is b\n}\n")
    cut = HLO.replace("4, 5, 6", "...")
    with pytest.raises(DumpError, match=r"constant constant\.1 of 6 elements is dumped as 3"):
        Values(hlo.entry(cut), cut).words("copy-done")
