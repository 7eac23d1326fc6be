"""Values that the threads of a program exchange: against sums, maxima and lanes of NumPy."""

import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.estimate.gpu.listings import sass
from tilekern.estimate.gpu.lanes import exchanged, is_exchange, origins
from tilekern.estimate.gpu.rates import WARP
from tilekern.estimate.gpu.sass import parse
from tilekern.estimate.gpu.scalar import MASK, Thread, Value
from tilekern.estimate.gpu.walk import Walker

ADDRESS = 1 << 40
WORDS = st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=2 * WARP, max_size=2 * WARP)
LOAD = """
    S2R R0, SR_TID.X
    UMOV UR4, URZ
    UMOV UR5, 0x100
    LEA R2, P0, R0, UR4, 0x2
    LEA.HI.X R3, R0, UR5, RZ, 0x2, P0
    LDG.E R4, desc[UR6][R2.64]
"""
"""R4: the word of the thread's number."""

ACROSS_WARPS = """
    REDUX.SUM.S32 UR8, R4
    MOV R6, UR8
    SHF.R.U32.HI R5, RZ, 0x5, R0
    SHF.L.U32 R5, R5, 0x2, RZ
    STS [R5+0x40], R6
    BAR.SYNC.DEFER_BLOCKING 0x0
    LOP3.LUT R7, R0, 0x1, RZ, 0xc0, !PT
    SHF.L.U32 R7, R7, 0x2, RZ
    {between}
    LDS R8, [R7+0x40]
    LOP3.LUT R9, R0, 0x1f, RZ, 0xc0, !PT
    ISETP.GT.U32.AND P1, PT, R9, 0x1, PT
    SEL R8, RZ, R8, P1
    REDUX.SUM.S32 UR9, R8
"""
"""UR9: the sum of the words of two warps, through shared memory at 0x40."""


def threads(words: list[int], known: bool = True) -> Callable[[int, int], Thread]:
    memory = {ADDRESS: struct.pack(f"<{len(words)}i", *words)} if known else {}
    return lambda warp, lane: Thread({}, {"SR_TID.X": WARP * warp + lane, "SR_LANEID": lane}, memory)


def last(text: str, words: list[int], known: bool = True) -> list[tuple[Value, ...]]:
    """For each of two warps what the last exchange of a text gives its first thread."""
    code = parse(sass(LOAD + text)).code
    at = max(n for n, instruction in enumerate(code) if is_exchange(instruction))
    needed = [code[n] for n in origins(code, [at])]
    return [values[code[at].address] for values in exchanged(needed, threads(words, known), 2)]


@given(WORDS)
def test_reductions_of_a_warp(words: list[int]) -> None:
    array = np.array(words, np.int64).reshape(2, WARP)
    unsigned = array & MASK
    for operation, expected in (
        ("SUM.S32", array.sum(1)),
        ("MIN.S32", array.min(1)),
        ("MAX.S32", array.max(1)),
        ("MIN", unsigned.min(1)),
        ("MAX", unsigned.max(1)),
        ("OR", np.bitwise_or.reduce(unsigned, 1)),
        ("XOR", np.bitwise_xor.reduce(unsigned, 1)),
    ):
        assert last(f"REDUX.{operation} UR8, R4", words) == [(int(v) & MASK,) for v in expected], operation


@given(WORDS, st.integers(0, WARP - 1))
def test_shuffles(words: list[int], by: int) -> None:
    array = np.array(words, np.int64).reshape(2, WARP) & MASK
    expected = {"BFLY": array[:, by], "DOWN": array[:, by]}
    for mode, of_first in expected.items():
        found = last(f"SHFL.{mode} PT, R5, R4, {by:#x}, 0x1f", words)
        assert found == [(1, int(value)) for value in of_first]
    # No lane is before the first one, which keeps its own value.
    assert last(f"SHFL.UP P2, R5, R4, {by:#x}, 0x0", words) == [(int(by == 0), int(v)) for v in array[:, 0]]


@given(WORDS)
def test_sums_by_shuffles(words: list[int]) -> None:
    steps = "\n".join(f"SHFL.BFLY PT, R5, R4, {n:#x}, 0x1f\nIADD3 R4, R4, R5, RZ" for n in (16, 8, 4, 2))
    sums = np.array(words, np.int64).reshape(2, WARP)[:, 1::2].sum(1)  # what the last step adds to lane 0
    assert last(f"{steps}\nSHFL.BFLY PT, R5, R4, 0x1, 0x1f", words) == [(1, int(v) & MASK) for v in sums]


@given(WORDS)
def test_sums_across_warps_go_through_shared_memory(words: list[int]) -> None:
    assert last(ACROSS_WARPS.format(between=""), words) == [(sum(words) & MASK,)] * 2


@pytest.mark.parametrize("between", ["STSM.16.M88.4 [R2], R12", "UTMALDG.2D [UR8], [UR4]", "LDGSTS.E [R2], [R2.64]"])
def test_shared_memory_is_unknown_after_stores_to_unknown_places(between: str) -> None:
    assert last(ACROSS_WARPS.format(between=between), [1] * 64) == [(None,)] * 2


@pytest.mark.parametrize(
    "text",
    [
        "REDUX.SUM.S32 UR8, R10\nREDUX.UNHEARD.S32 UR9, R4",
        "@P3 IADD3 R4, R4, R4, RZ\nSHFL.DOWN P2, R5, R4, 0x1, 0x181f",
        "LDS R5, [0x80]",
    ],
)
def test_what_no_rule_tells_is_unknown(text: str) -> None:
    assert all(value is None for values in last(text, [1] * 64) for value in values)


def test_values_of_unknown_memory_are_unknown() -> None:
    assert last("REDUX.SUM.S32 UR8, R4", [1] * 64, known=False) == [(None,)] * 2


def test_one_thread_is_run_where_no_value_is_known() -> None:
    """Of the estimate of a step of AdamW on 50,257 rows, the other threads took 13 of 15 seconds, and told nothing."""
    code, started = parse(sass(LOAD + ACROSS_WARPS.format(between="NOP"))).code, list[tuple[int, int]]()

    def thread(warp: int, lane: int) -> Thread:
        started.append((warp, lane))
        return threads([], known=False)(warp, lane)

    exchanges = [n for n, instruction in enumerate(code) if is_exchange(instruction)]
    needed = [code[n] for n in origins(code, exchanges)]
    first, second = exchanged(needed, thread, 2)
    assert started == [(0, 0)]
    assert first == second and first.keys() == {code[n].address for n in exchanges}
    assert all(value is None for values in first.values() for value in values)


def test_what_another_thread_stores_is_known() -> None:
    """The first thread stores nothing, and what it loads is the number of thread 32."""
    text = """
        ISETP.NE.U32.AND P3, PT, R0, 0x20, PT
        @!P3 STS [RZ+0x40], R0
        BAR.SYNC.DEFER_BLOCKING 0x0
        LDS R5, [RZ+0x40]
    """
    assert last(text, [], known=False) == [(32,)] * 2


def test_the_first_lane_is_shifted_up_from_nowhere() -> None:
    text = """
        SHFL.UP P2, R5, R4, 0x1, RZ
        SEL R6, R4, RZ, P2
        SHFL.UP P2, R7, R6, 0x1, RZ
    """
    assert last(text, [1] * 64, known=False) == [(0, 0)] * 2


def test_a_loop_runs_as_often_as_the_sum_of_a_program_says() -> None:
    text = (
        LOAD
        + ACROSS_WARPS.format(between="")
        + "MOV R10, RZ\n.L_x_0:\nIADD3 R10, R10, 0x1, RZ\n"
        + "ISETP.NE.U32.AND P2, PT, R10, UR9, PT\n@P2 BRA `(.L_x_0)\nEXIT"
    )
    walker = Walker(parse(sass(text)), {})
    words = [0] * 60 + [1, 2, 3, 4]
    for thread in walker.start(threads(words), 2):
        walk = walker.walk(thread)
        assert max(walk.visits.values()) == 10 and not walk.undecided and not walk.assumed
    assert walker.walk(threads(words)(0, 0)).undecided
