"""The cycle model of GPU kernels whose warps wait for one another at barriers."""

from dataclasses import replace

import pytest

from tests.estimate.gpu.listings import EXPONENTIALS, ONE, PRODUCT, WAIT, loop, sass
from tilekern.estimate.gpu import Launch, estimate, estimation, shorten


def specialised(
    stages: int, trips: int = 48, init: str = "SYNCS.EXCH.64 URZ, [UR20], UR4", rounds: int = 1, epilogue: str = ""
) -> str:
    """A warpgroup that copies tiles of 16 KiB, and one that multiplies them, over a ring of barriers, in rounds."""
    ring = f"""
        UIADD3 UR21, UR21, 0x8, URZ
        UISETP.EQ.U32.AND UP1, UPT, UR21, {8 * stages:#x}, UPT
        USEL UR21, URZ, UR21, UP1
        USEL UR23, 0x1, URZ, UP1
        LOP3.LUT R9, R9, UR23, RZ, 0x3c, !PT
    """
    step = f"""
        UIADD3 UR22, UR22, 0x1, URZ
        UISETP.NE.U32.AND UP0, UPT, UR22, {trips:#x}, UPT
        PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0
    """
    again = f"""
        UIADD3 UR24, UR24, 0x1, URZ
        UISETP.NE.U32.AND UP0, UPT, UR24, {rounds:#x}, UPT
        PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0
    """
    return sass(f"""
        S2R R0, SR_TID.X
        ISETP.EQ.U32.AND P2, PT, R0, RZ, PT
        ISETP.GE.U32.AND P1, PT, R0, 0x80, PT
        UMOV UR21, URZ
        UMOV UR22, URZ
        @P2 {init}
        BAR.SYNC.DEFER_BLOCKING 0x0
        @P1 BRA `(.L_consumer)
        MOV R9, 0x1
        MOV R8, 0x4000
        .L_copies:
        UMOV UR22, URZ
        .L_producer:
        SHF.L.U32 R3, R9, 0x1f, RZ
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR21+0x1000], R3
        @P2 SYNCS.ARRIVE.TRANS64 RZ, [UR21], R8
        UMOV UR31, UR21
        VOTEU.ANY UP2, P2
        @UP2 UTMALDG.2D [UR30], [UR40]
        {ring}
        {step}
        @P0 BRA `(.L_producer)
        {again}
        @P0 BRA `(.L_copies)
        EXIT
        .L_consumer:
        MOV R9, RZ
        LOP3.LUT R1, R0, 0x7f, RZ, 0xc0, !PT
        ISETP.EQ.U32.AND P3, PT, R1, RZ, PT
        .L_products:
        UMOV UR22, URZ
        .L_multiply:
        SHF.L.U32 R3, R9, 0x1f, RZ
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR21], R3
        {PRODUCT}
        {WAIT}
        @P3 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR21+0x1000], RZ
        {ring}
        {step}
        @P0 BRA `(.L_multiply)
        {epilogue}
        {again}
        @P0 BRA `(.L_products)
        EXIT
    """)


def test_a_warpgroup_that_copies_for_another_one() -> None:
    launch = Launch(programs=132, warps=8, nbytes=1e6)
    found = {stages: estimate(specialised(stages), launch) for stages in (1, 2, 4)}
    assert all(not e.assumed and e.flops == 132 * 48 * 8 * 2 * 64 * 128 * 16 for e in found.values())
    assert all(e.lines["memory"] == found[1].lines["memory"] > 0 for e in found.values())
    assert found[1].cycles > 1.5 * found[4].cycles  # no copy runs beside a product
    assert 512 < found[4].cycles / 48 < 1.25 * 512  # what remains is the way around the ring
    assert found[2].cycles < found[1].cycles


def test_one_copy_serves_the_thread_blocks_of_a_cluster() -> None:
    text = specialised(2)
    to_all = text.replace("UTMALDG.2D [UR30], [UR40]", "UTMALDG.2D.MULTICAST [UR30], [UR40], UR44")
    alone = Launch(programs=132, warps=8, nbytes=1e6)
    pair = replace(alone, cluster=2)
    traffic = [estimate(t, launch).traffic for t in (text, to_all) for launch in (alone, pair)]
    assert traffic == [132 * 48 * 0x4000] * 3 + [132 * 48 * 0x4000 / 2]


@pytest.mark.parametrize("stages", [2, 3])
def test_copies_that_wait_for_an_epilogue(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copying warpgroup waits in an iteration of its inner loop, once in each iteration of the outer one."""
    text = specialised(stages, trips=40, rounds=8, epilogue=EXPONENTIALS * 4)
    launch = Launch(programs=132, warps=8, nbytes=1e6)
    short = estimate(text, launch)
    monkeypatch.setattr(shorten, "_cuts", lambda runs: {})
    whole = estimate(text, launch)
    assert not short.assumed and short.flops == whole.flops == 132 * 8 * 40 * 8 * 2 * 64 * 128 * 16
    assert short.cycles == pytest.approx(whole.cycles, rel=0.02)


def test_barriers_that_do_not_match_are_told() -> None:
    lost = specialised(2).replace("@UP2 UTMALDG.2D [UR30], [UR40]", "NOP")
    found = estimate(lost, Launch(programs=132, warps=8))
    assert found.assumed == {"barriers": "no warp waits: their arrivals could not be followed"}


@pytest.mark.parametrize(
    "late", ["BAR.SYNC.DEFER_BLOCKING 0x1, 0x100", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR21], R3"]
)
def test_warps_without_work_wait_for_the_end_of_a_long_walk(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Barriers behind the end of a walk are not simulated, but those in shared memory are missed."""
    inner = loop(f"{PRODUCT}\n{WAIT}", 5).replace("EXIT", "NOP")
    lines = [line.split("*/", 1)[-1].strip().removesuffix(" ;") for line in inner.splitlines()]
    body = "\n".join(lines).replace(".L_x_0", ".L_inner").replace("UR60", "UR50")
    idle = "S2R R0, SR_TID.X\nISETP.GE.U32.AND P1, PT, R0, 0x80, PT\n@P1 BRA `(.L_idle)"
    text = loop(body, 40, before=idle, after=f".L_idle:\n{late}")
    monkeypatch.setattr(estimation, "LONGEST", 60)
    found = estimate(text, Launch(programs=132, warps=8))
    assert bool(found.assumed) == late.startswith("SYNCS")
    assert found.flops == pytest.approx(132 * 40 * 5 * 8 * 2 * 64 * 128 * 16)


def test_copies_of_threads_are_awaited() -> None:
    """Asynchronous copies by threads, in groups, of which one may be under way."""
    copy = "LDGSTS.E.128 [R2], desc[UR4][R4.64]\nLDGDEPBAR"
    waiting, ahead = (
        estimate(loop(f"{copy}\nDEPBAR.LE SB0, {left}\n{EXPONENTIALS}", 32), ONE) for left in ("0x0", "0x1")
    )
    assert waiting.cycles > ahead.cycles + 32 * 400 and waiting.lines == ahead.lines


def with_tasks(work: str, uniform: bool = False) -> str:
    """Triton's specialised warps: the first warps store a task for each of the others, and at the end the exit.

    Assemblers keep the task in a register, or in a uniform one.
    """
    task = """
        ISETP.GT.U32.AND P0, PT, R2, 0x3, PT
        SHF.L.U32 R4, R2, 0x2, RZ
        LDC R2, c[0x2][R4]
        BRX R2 -0x190"""
    if uniform:
        task = """
        R2UR UR6, R2
        UISETP.GT.U32.AND UP0, UPT, UR6, 0x3, UPT
        USHF.L.U32 UR6, UR6, 0x2, URZ
        ULDC UR6, c[0x2][UR6]
        BRXU UR6 -0x1a0"""
    return sass(f"""
        S2R R0, SR_TID.X
        SHF.R.U32.HI R2, RZ, 0x5, R0
        R2UR UR13, R2
        ISETP.GE.U32.AND P0, PT, R0, 0x80, PT
        @P0 BRA `(.L_x_0)
        MOV R2, 0x2020100
        STS [UR4+0x40], R2
        BAR.SYNC.DEFER_BLOCKING 0x1
        BAR.SYNC.DEFER_BLOCKING 0x1
        {work}
        BAR.SYNC.DEFER_BLOCKING 0x1
        MOV R2, 0x3030303
        STS [UR4+0x40], R2
        BAR.SYNC.DEFER_BLOCKING 0x1
        EXIT
        .L_x_0:
        BAR.SYNC.DEFER_BLOCKING 0x1
        LDS.U8 R2, [UR13+0x3c]{task} (*"BRANCH_TARGETS .L_x_1,.L_x_2,.L_x_3,.L_x_4"*)
        .L_x_1:
        BAR.SYNC.DEFER_BLOCKING 0x1
        FADD R1, R1, R1
        BAR.SYNC.DEFER_BLOCKING 0x1
        BRA `(.L_x_0)
        .L_x_2:
        BAR.SYNC.DEFER_BLOCKING 0x1
        DADD R6, R6, R6
        BAR.SYNC.DEFER_BLOCKING 0x1
        BRA `(.L_x_0)
        .L_x_3:
        BAR.SYNC.DEFER_BLOCKING 0x1
        BAR.SYNC.DEFER_BLOCKING 0x1
        BRA `(.L_x_0)
        .L_x_4:
        EXIT
    """)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("uniform", [False, True])
def test_warps_that_get_their_tasks_from_shared_memory(uniform: bool) -> None:
    text = with_tasks(EXPONENTIALS, uniform)
    found = estimate(text, replace(ONE, warps=8))
    assert not found.assumed and not found.unknown
    assert found.lines["fma"] == 1 / 4 and found.lines["mufu"] == 4 * 48 * 8 / 4
    with pytest.raises(ValueError, match="branches to unknown addresses"):
        estimate(text.replace("MOV R2, 0x2020100", "LDG.E R2, desc[UR4][R2.64]"), replace(ONE, warps=8))


def test_tasks_that_are_stored_behind_a_long_loop() -> None:
    """Of the first warps the beginning is simulated; the others still get the tasks of the end."""
    turns = 2 * estimation.LONGEST
    text = with_tasks(f"""
        MOV R3, RZ
        .L_x_9:
        MUFU.EX2 R5, R5
        IADD3 R3, R3, 0x1, RZ
        ISETP.LT.AND P1, PT, R3, {turns:#x}, PT
        @P1 BRA `(.L_x_9)
    """)
    assert estimate(text, replace(ONE, warps=8)).lines["mufu"] == 4 * turns * 8 / 4
