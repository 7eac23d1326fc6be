"""The cycle model of GPU kernels: units, the multiprocessor, and the estimate."""

import doctest
from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import pytest

from bench.gpu import estimates
from bench.gpu.item import lowerings_of
from tests.estimate.gpu.listings import EXPONENTIALS, ONE, PRODUCT, WAIT, loop, sass
from tests.lower.triton.gluon.samples import needs_clusters
from tilekern.estimate.gpu import LINES, Launch, estimate, estimation, shorten
from tilekern.estimate.gpu.machine import Machine, Run
from tilekern.estimate.gpu.rates import GPUS
from tilekern.estimate.gpu.sass import parse
from tilekern.estimate.gpu.work import work
from tilekern.kernels.matmul import matmul
from tilekern.lower.target import resolve

# --- units ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gpu", "unit", "cycles"),
    [
        ("FFMA R1, R2, R3, R4", "H100", "fma", 1),
        ("FFMA R1, R2, R3, R4", "A100", "fma", 2),
        ("LOP3.LUT R1, R2, R3, R4, 0xc0, !PT", "H100", "alu", 2),
        ("MUFU.EX2 R1, R2", "H100", "mufu", 8),
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", "A100", "tensor", 8),
        ("LDS.128 R4, [R2]", "H100", "shared", 1),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", "H100", "issue", 1),
    ],
)
def test_cycles_of_units(text: str, gpu: str, unit: str, cycles: float) -> None:
    found = work(parse(sass(text)).code[0], GPUS[gpu])
    assert found.known and (found.unit, found.cycles) == (unit, cycles)


@pytest.mark.parametrize(
    ("text", "cycles"),
    [
        ("HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24", 128),
        ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24", 32),
        ("HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8], R24", 24),  # its operands take longer than the product
        ("HGMMA.64x32x16.F32.BF16 R24, R4, gdesc[UR8], R24", 16),
        ("HGMMA.64x128x8.F32.TF32 R24, gdesc[UR8], R24", 64),
        ("QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24", 64),
    ],
)
def test_cycles_of_products_of_warpgroups(text: str, cycles: float) -> None:
    assert 4 * work(parse(sass(text)).code[0], GPUS["H100"]).tensor == cycles


def test_the_published_peak_follows_from_the_rates() -> None:
    for name, peak in (("A100", 312e12), ("H100", 989e12), ("B200", 2250e12)):
        assert GPUS[name].peak == pytest.approx(peak, rel=0.005)  # of data sheets, with three digits


# --- the estimate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead", "target", "assumed"),
    [
        ("NOP", "HMMA.16816.F32.BF16 R4, R8, R12, R4", "taken"),
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", "NOP", "not taken"),
        ("NOP", "LDG.E.128 R4, desc[UR4][R2.64]", "taken"),
        ("LDG.E.128 R4, desc[UR4][R2.64]", "HMMA.16816.F32.BF16 R4, R8, R12, R4", "taken"),
        ("NOP", "MUFU.RCP R2, R3", "not taken"),  # the slow path of a division
        ("NOP", "BRX R2 -0x10", "not taken"),  # cannot be followed
    ],
)
def test_a_branch_by_unknown_data_goes_the_way_with_more_products_or_bytes(
    ahead: str, target: str, assumed: str
) -> None:
    decide = "LDG.E R0, desc[UR4][R2.64]\nISETP.GT.AND P0, PT, R0, RZ, PT\n@P0 BRA `(.L_x_3)"
    found = estimate(sass(f"{decide}\n{ahead}\nEXIT\n.L_x_3:\n{target}\nEXIT"), ONE)
    assert found.assumed == {"BRA at 0x20": assumed}
    assert (found.flops > 0) == (ahead if assumed == "not taken" else target).startswith("HMMA")


def test_work_behind_a_false_guard_does_not_count() -> None:
    text = sass("S2R R0, SR_TID.X\nISETP.LT.AND P0, PT, R0, 0x20, PT\n@P0 MUFU.EX2 R1, R2\nMUFU.EX2 R3, R4\nEXIT")
    assert estimate(text, ONE).lines["mufu"] == 5 * 8 / 4  # of the first warp two, of the others one


def test_every_line_of_a_small_listing() -> None:
    text = "MUFU.EX2 R1, R2\nFFMA R3, R4, R5, R6\nIADD3 R7, R8, R9, RZ\nLDS.128 R12, [R2]"
    text = sass(f"{text}\nLDG.E R16, desc[UR4][R2.64]\nEXIT")
    found = estimate(text, ONE).lines
    assert found == {
        "tensor": 0, "mufu": 8, "fma": 1, "alu": 2, "issue": 6, "shared": 4 * 4 + 4,
        "memory": pytest.approx(4 * 128 * 132 / 3.352e12 * 1.83e9),
    }  # fmt: skip


def test_an_unknown_operation_is_issued_and_listed() -> None:
    known = estimate(sass("MUFU.EX2 R1, R2\nEXIT"), ONE)
    found = estimate(sass("MUFU.EX2 R1, R2\nFLUX.CAPACITOR R3, R4\nFLUX R3, R4\nEXIT"), ONE)
    assert found.unknown == {"FLUX": 2} and not known.unknown
    assert found.lines["issue"] == known.lines["issue"] + 2
    assert {**found.lines, "issue": 0} == {**known.lines, "issue": 0}


def test_an_early_wait_costs_the_overlap() -> None:
    """8 products take 512 cycles, and 48 exponentials of each warp 384: beside each other, or one after the other."""
    early = estimate(loop(f"{PRODUCT}\n{WAIT}\n{EXPONENTIALS}", 64), ONE)
    late = estimate(loop(f"{PRODUCT}\n{EXPONENTIALS}\n{WAIT}", 64), ONE)
    assert early.lines == late.lines and early.flops == late.flops == 132 * 64 * 8 * 2 * 64 * 128 * 16
    assert early.cycles / 64 == pytest.approx(512 + 384, rel=0.1)
    assert late.cycles / 64 == pytest.approx(512, rel=0.1)
    assert (early.bottleneck, late.bottleneck) == ("waits, tensor", "tensor")
    assert late.share == pytest.approx(late.lines["tensor"] / late.cycles)


def test_a_wait_that_leaves_a_group_in_flight() -> None:
    """The exponentials run beside the second group, and the wait at the end is for it."""
    both = f"{PRODUCT}\n{PRODUCT}"
    some = estimate(loop(f"{both}\nWARPGROUP.DEPBAR.LE gsb0, 0x1\n{EXPONENTIALS}\n{WAIT}", 32), ONE)
    none = estimate(loop(f"{both}\n{WAIT}\n{EXPONENTIALS}", 32), ONE)
    assert some.cycles / 32 == pytest.approx(1024, rel=0.1) and none.cycles / 32 == pytest.approx(1408, rel=0.1)


def test_warpgroups_hide_the_exponentials_of_one_another() -> None:
    """Two warpgroups that need no barrier take turns: tensor cores of one, exponentials of the other."""
    text = loop(f"{PRODUCT}\n{WAIT}\n{EXPONENTIALS}", 64)
    one, two = estimate(text, ONE), estimate(text, replace(ONE, warps=8))
    assert two.lines["tensor"] == 2 * one.lines["tensor"]
    assert two.share > 1.5 * one.share
    resident = estimate(text, replace(ONE, programs=264, resident=2))
    assert resident.cycles == pytest.approx(two.cycles, rel=0.1)  # programs do, too
    joined = loop(f"BAR.SYNC.DEFER_BLOCKING 0x0\n{PRODUCT}\n{WAIT}\nBAR.SYNC.DEFER_BLOCKING 0x0\n{EXPONENTIALS}", 64)
    assert estimate(joined, replace(ONE, warps=8)).cycles > 1.2 * two.cycles


@pytest.mark.parametrize(("fewer", "more"), [(1, 2), (7, 8), (8, 30), (30, 31), (30, 200)])
def test_more_iterations_take_longer(fewer: int, more: int) -> None:
    a, b = (estimate(loop("MUFU.EX2 R1, R1\nFADD R2, R1, R2", n), ONE) for n in (fewer, more))
    assert b.cycles - a.cycles == pytest.approx((more - fewer) * (b.cycles / more), abs=0.2 * b.cycles)
    assert all(a.lines[line] <= b.lines[line] for line in LINES)
    assert a.cycles < b.cycles and a.lines["mufu"] < b.lines["mufu"]


@pytest.mark.parametrize(("waves", "resident"), [(2, 1), (40, 2), (3, 4)])
def test_lines_of_all_programs_add_up(waves: int, resident: int) -> None:
    text = loop("MUFU.EX2 R1, R1\nLDS R2, [R3]", 20)
    launch = replace(ONE, programs=132 * resident, resident=resident)
    once, often = estimate(text, launch), estimate(text, replace(launch, programs=launch.programs * waves))
    assert often.cycles == pytest.approx(waves * once.cycles)
    assert often.lines == pytest.approx({line: waves * cycles for line, cycles in once.lines.items()})


def test_a_last_wave_of_one_program_takes_a_whole_one() -> None:
    text = loop(EXPONENTIALS, 20)
    full, more = (estimate(text, replace(ONE, programs=n)) for n in (132, 133))
    assert more.cycles == pytest.approx(2 * full.cycles)
    assert more.lines["mufu"] == pytest.approx(full.lines["mufu"] * 133 / 132)  # on average


def test_a_last_wave_of_few_programs_a_multiprocessor_takes_a_part_of_one() -> None:
    """Four programs share the units of a multiprocessor; in the last wave each has one."""
    text = loop(EXPONENTIALS, 20)
    launch = replace(ONE, programs=4 * 132, resident=4)
    full, one, more = (estimate(text, replace(launch, programs=n)).cycles for n in (4 * 132, 132, 5 * 132))
    assert one < 0.5 * full
    assert more == pytest.approx(full + one)


def test_products_in_tensor_memory() -> None:
    """Blackwell: one thread issues them, by a descriptor of 128 rows and columns, and a barrier tells their end."""
    products = "@P2 UTCHMMA gdesc[UR4], gdesc[UR10], tmem[UR23], tmem[UR34], idesc[UR35], UPT\n" * 8
    wait = "SHF.L.U32 R3, R9, 0x1f, RZ\nSYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR26], R3"
    turn = "LOP3.LUT R9, R9, 0x1, RZ, 0x3c, !PT"
    before = "S2R R0, SR_TID.X\nISETP.EQ.U32.AND P2, PT, R0, RZ, PT\nUMOV UR35, 0x8200490\nUMOV UR26, 0x400"
    launch = Launch(programs=148, warps=4, gpu="B200")
    body = f"{products}\n@P2 UTCBAR [UR26], URZ"
    early, late = (
        estimate(loop(f"{body}\n{order}\n{turn}", 32, before=before), launch)
        for order in (f"{wait}\n{EXPONENTIALS}", f"{EXPONENTIALS}\n{wait}")
    )
    assert early.flops == late.flops == 148 * 32 * 8 * 2 * 128 * 128 * 16 and not early.assumed
    assert early.cycles / 32 == pytest.approx(512 + 384, rel=0.15) and late.cycles / 32 == pytest.approx(512, rel=0.2)


def test_products_of_warpgroups_are_unknown_elsewhere() -> None:
    found = estimate(loop(f"{PRODUCT}\n{WAIT}", 2), replace(ONE, gpu="A100"))
    assert found.unknown == {"HGMMA": 8} and not found.flops


@pytest.mark.parametrize("trips", [20, 37, 100])
def test_repeated_iterations_stand_for_all(trips: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = loop(f"{PRODUCT}\n{EXPONENTIALS}\n{WAIT}\nBAR.SYNC.DEFER_BLOCKING 0x0", trips, before=EXPONENTIALS)
    short = estimate(text, ONE)
    monkeypatch.setattr(shorten, "_cuts", lambda runs: {})
    whole = estimate(text, ONE)
    assert short.lines == pytest.approx(whole.lines) and short.flops == pytest.approx(whole.flops)
    assert short.cycles == pytest.approx(whole.cycles, rel=0.01)


@pytest.mark.parametrize("outer", [40, 61])
def test_long_walks_are_carried_on(outer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of loops in loops, as many iterations of the outer one are simulated as fit."""
    inner = loop(f"{PRODUCT}\n{WAIT}", 5).replace("EXIT", "NOP")
    lines = [line.split("*/", 1)[-1].strip().removesuffix(" ;") for line in inner.splitlines()]
    text = loop("\n".join(lines).replace(".L_x_0", ".L_inner").replace("UR60", "UR50"), outer, after=EXPONENTIALS)
    whole = estimate(text, ONE)
    monkeypatch.setattr(estimation, "LONGEST", 60)
    part = estimate(text, ONE)
    assert part.flops == pytest.approx(whole.flops) == 132 * outer * 5 * 8 * 2 * 64 * 128 * 16
    assert part.cycles == pytest.approx(whole.cycles, rel=0.02)
    assert part.lines["mufu"] < 0.5 * whole.lines["mufu"]  # the end is not simulated


def test_the_examples_of_docstrings() -> None:
    found = doctest.testmod(estimation)
    assert found.attempted > 0 and found.failed == 0


# --- errors, and a compiled program -----------------------------------------------------------------------------------


def test_unknown_gpus_and_targets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one of the GPUs A100, H100, H200, B200; got gpu='V100'"):
        estimate(sass("EXIT"), replace(ONE, gpu="V100"))


def test_faster_memory_helps_where_it_is_the_bottleneck() -> None:
    text = sass("LDG.E.128 R4, desc[UR4][R2.64]\nSTG.E.128 desc[UR4][R2.64], R4\nEXIT")
    launch = Launch(programs=1 << 15, warps=8, resident=8)
    h100, h200 = (estimate(text, replace(launch, gpu=gpu)) for gpu in ("H100", "H200"))
    assert h100.bottleneck == "memory" and h100.cycles / h200.cycles == pytest.approx(4.8 / 3.352, rel=0.02)
    cached = estimate(text, replace(launch, nbytes=1e6))
    assert cached.cycles < h100.cycles


def test_a_compiled_matmul() -> None:
    pytest.importorskip("triton", reason="needs triton")
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    (lowering,) = lowerings_of(matmul, [x, x], resolve("cuda:sm_90"))
    found = estimates.estimated(lowering, lowering.compile())
    x_box, w_box = (argument.descriptor for argument in lowering.program.arguments[:2])
    assert x_box is not None and w_box is not None
    steps = 1024 // x_box.block[1]
    nbytes = 2 * (prod(x_box.block) + prod(w_box.block))  # of one step
    assert found.traffic == lowering.program.programs * steps * nbytes
    assert found.flops == 2 * 1024**3 and not found.unknown and not found.assumed
    assert max(found.lines.values()) <= found.cycles and 0.05 < found.share < 1
    record = estimates.described(lowering, lowering.compile())
    header, row = estimates.rows([("matmul", record)])
    assert dict(zip(header, row, strict=True))["program"] == "matmul" and not estimates.notes([("matmul", record)])


@needs_clusters
@pytest.mark.slow
def test_a_compiled_product_on_clusters() -> None:
    pytest.importorskip("triton", reason="needs triton")
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16)
    (lowering,) = lowerings_of(matmul, x, resolve("cuda:sm_90+gluon"))
    found = estimates.estimated(lowering, lowering.compile())
    # Each thread block loads 128 rows, and half of the 256 columns.
    assert lowering.program.cluster == 2
    tiles = (4096 // 128) * (4096 // 256)
    assert found.traffic == pytest.approx(tiles * 2 * 1024 * (128 + 256 / 2), rel=0.01)
    assert found.flops == pytest.approx(2 * 4096**2 * 1024, rel=0.01) and not found.unknown and not found.assumed


def test_other_targets_have_no_estimate() -> None:
    pytest.importorskip("triton", reason="needs triton")
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    (lowering,) = lowerings_of(matmul, [x, x], resolve("cuda:sm_89"))
    with pytest.raises(ValueError, match="there is no cycle model of cuda:sm_89"):
        estimates.estimated(lowering, lowering.compile())
    assert estimates.described(lowering, lowering.compile()) == {}
    assert estimates.notes([("x", {"unestimated": "f: why"})]) == ["x: no estimate: f: why"]


def test_units_are_idle_before_the_first_instruction() -> None:
    assert Machine(GPUS["H100"], [], [], 1.0, 1.0).run([]) == Run(0.0, 0.0, [])
