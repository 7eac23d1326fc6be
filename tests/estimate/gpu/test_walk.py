"""The cycle model of GPU kernels: the text of the disassembler, the values of integers, and the way of a warp."""

import doctest
from collections import Counter
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.estimate.gpu.listings import loop, sass
from tilekern.estimate.gpu import sass as listings
from tilekern.estimate.gpu.rules import RULES, Rule, evaluate
from tilekern.estimate.gpu.sass import parse
from tilekern.estimate.gpu.scalar import MASK, Registers, Thread, Value
from tilekern.estimate.gpu.walk import Walk, Walker

WORD = st.integers(0, MASK)
LONG = st.integers(0, (1 << 64) - 1)


def thread(**registers: Value) -> Thread:
    made = Thread({}, {"SR_CTAID.X": 5, "SR_TID.X": 32})
    made.registers.update(registers)
    return made


def run(text: str, **registers: Value) -> Registers:
    """Registers behind some instructions."""
    made = thread(**registers)
    for instruction in parse(sass(text)).code:
        evaluate(instruction, made)
    return made.registers


def halves(value: int) -> tuple[int, int]:
    return value & MASK, value >> 32


# --- the text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "writes", "reads"),
    [
        ("FFMA R3, R4.reuse, R5, -R6", ("R3",), ("R4", "R5", "R6")),
        ("@!P2 IADD3 R3, P1, R4, 0x30, RZ", ("R3", "P1"), ("P2", "R4")),
        ("IADD3.X R6, RZ, R5, RZ, P2, !PT", ("R6",), ("R5", "P2")),
        ("LOP3.LUT P6, R2, R0, 0xff, RZ, 0xc0, !PT", ("P6", "R2"), ("R0",)),
        ("ISETP.GE.U32.AND P0, PT, R1, UR3, P2", ("P0",), ("R1", "UR3", "P2")),
        ("PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0", ("P0",), ("UP0",)),
        ("SHFL.BFLY PT, R5, R4, 0x2, 0x1f", ("R5",), ("R4",)),
        ("IMAD.WIDE.U32 R2, R4, 0x8, R6", ("R2", "R3"), ("R4", "R6")),
        ("LDG.E.128 R8, desc[UR4][R2.64+0x10]", ("R8", "R9", "R10", "R11"), ("UR4", "R2", "R3")),
        ("STG.E.64 desc[UR4][R2.64], R8", (), ("UR4", "R2", "R3", "R8", "R9")),
        ("LDSM.16.M88.4 R4, [R2+UR5]", ("R4", "R5", "R6", "R7"), ("R2", "UR5")),
        ("STSM.16.M88.4 [R2+0x4000], R4", (), ("R2", "R4", "R5", "R6", "R7")),
        ("VOTEU.ANY UP1, P1", ("UP1",), ("P1",)),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR25], R3", ("P0",), ("UR25", "R3")),
        ("UTMALDG.2D [UR24], [UR6]", (), ("UR25", "UR26", "UR27", "UR24", "UR6")),
        ("HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8].tnspB, R24", (), ("R4", "R5", "R6", "R7", "UR8")),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", (), ()),
    ],
)
def test_registers_of_instructions(text: str, writes: tuple[str, ...], reads: tuple[str, ...]) -> None:
    (instruction,) = parse(sass(text)).code
    assert instruction.writes == writes and instruction.reads == reads


def test_labels_and_addresses_are_targets() -> None:
    listing = parse(sass("NOP\n.L_x_7:\nMOV R1, R2\n@P0 BRA `(.L_x_7)\nBRA 0x10\nEXIT"))
    assert [i.target for i in listing.code] == ["", "", ".L_x_7", "0x10", ""]
    assert [listing.destination(listing.code[n]) for n in (2, 3)] == [1, 1]
    lost = replace(listing.code[2], target=".L_x_8")
    with pytest.raises(ValueError, match=r"BRA at 0x20 leads to '.L_x_8'; expected a label"):
        listing.destination(lost)


def test_one_of_several_functions_is_read() -> None:
    text = "".join(f".text.{name}:\n{sass(op)}\n" for name, op in (("first", "NOP"), ("second", "EXIT")))
    assert parse(text, "second").code[0].opcode == "EXIT"
    for function, found in (("", "first, second"), ("third", "first, second")):
        with pytest.raises(ValueError, match=f"function='{function}', and in the text: {found}"):
            parse(text, function)
    with pytest.raises(ValueError, match="in the text: none"):
        parse("no code")


def test_listings_of_cuobjdump_are_read() -> None:
    text = """
                Function : add
        .headerflags    @"EF_CUDA_SM90"
        /*0000*/                   S2R R0, SR_TID.X ;    /* 0x0000000000007919 */
                                                         /* 0x000e220000002100 */
        /*0010*/               @P0 EXIT ;                /* 0x000000000000094d */
    """
    listing = parse(text)
    assert listing.name == "add" and [i.opcode for i in listing.code] == ["S2R", "EXIT"]


# --- values -----------------------------------------------------------------------------------------------------------


@given(LONG, LONG)
def test_sums_of_64_bits(a: int, b: int) -> None:
    (a0, a1), (b0, b1) = halves(a), halves(b)
    found = run(
        "IADD3 R4, P0, R0, R2, RZ\nIADD3.X R5, R1, R3, RZ, P0, !PT\n"
        "IADD3 R6, P1, R0, -R2, RZ\nIADD3.X R7, R1, ~R3, RZ, P1, !PT",
        R0=a0, R1=a1, R2=b0, R3=b1,
    )  # fmt: skip
    assert (found["R4"], found["R5"]) == halves(a + b & (1 << 64) - 1)
    assert (found["R6"], found["R7"]) == halves(a - b & (1 << 64) - 1)


@given(WORD, WORD, LONG)
def test_products(a: int, b: int, c: int) -> None:
    low, high = halves(c)
    found = run(
        "IMAD.WIDE.U32 R4, R0, R1, R2\nIMAD R6, R0, R1, R2\nIMAD.HI.U32 R7, R0, R1, RZ\nIMAD.SHL.U32 R8, R0, 0x8, RZ",
        R0=a, R1=b, R2=low, R3=high,
    )  # fmt: skip
    assert (found["R4"], found["R5"]) == halves(a * b + c & (1 << 64) - 1)
    assert found["R6"] == a * b + low & MASK and found["R7"] == a * b >> 32 and found["R8"] == a * 8 & MASK


@given(LONG, LONG, st.sampled_from(["LT", "LE", "GT", "GE", "EQ", "NE"]))
def test_comparisons_of_64_bits(a: int, b: int, name: str) -> None:
    (a0, a1), (b0, b1) = halves(a), halves(b)
    text = f"ISETP.{name}.U32.AND P0, PT, R0, R2, PT\nISETP.{name}.U32.AND.EX P1, P2, R1, R3, PT, P0"
    holds = {"LT": a < b, "LE": a <= b, "GT": a > b, "GE": a >= b, "EQ": a == b, "NE": a != b}[name]
    found = run(text, R0=a0, R1=a1, R2=b0, R3=b1)
    assert found["P1"] == holds and found["P2"] == (not holds)


@given(WORD, WORD, WORD, st.integers(0, 255))
def test_logic_of_three_words(a: int, b: int, c: int, table: int) -> None:
    found = run(f"LOP3.LUT P0, R3, R0, R1, R2, {table:#x}, !PT", R0=a, R1=b, R2=c)
    bits = (table >> ((a >> n & 1) << 2 | (b >> n & 1) << 1 | (c >> n & 1)) & 1 for n in range(32))
    expected = sum(bit << n for n, bit in enumerate(bits))
    assert found["R3"] == expected and found["P0"] == (expected != 0)


@given(LONG, st.integers(0, 31))
def test_shifts(value: int, by: int) -> None:
    low, high = halves(value)
    signed = value - (1 << 64) if value >> 63 else value
    found = run(
        "SHF.R.U64 R4, R0, R2, R1\nSHF.R.U32.HI R5, RZ, R2, R1\nSHF.L.U32 R6, R0, R2, RZ\nSHF.L.U64.HI R7, R0, R2, R1\n"
        "SHF.R.S32.HI R8, RZ, R2, R1\nSHF.L.W.U32.HI R9, R0, R2, R0\nLEA R10, P0, R0, R1, 0x3\n"
        "LEA.HI.X R11, R0, R1, RZ, 0x3, P0",
        R0=low, R1=high, R2=by,
    )  # fmt: skip
    assert found["R4"] == value >> by & MASK and found["R5"] == high >> by and found["R6"] == low << by & MASK
    assert found["R7"] == value << by >> 32 & MASK and found["R8"] == signed >> 32 >> by & MASK
    assert found["R9"] == (low << by | low << by >> 32) & MASK
    assert found["R10"] == (low << 3) + high & MASK
    assert found["R11"] == (low << 3 >> 32) + high + (((low << 3 & MASK) + high) >> 32) & MASK


def test_words_of_which_halves_are_known() -> None:
    found = run(
        """
        PRMT R3, R0, 0x5410, R2
        VIADD.16x2 R4, R0, 0x1ffff
        PRMT R5, R0, 0x7632, R9
        PRMT R6, R5, 0x9910, RZ
        PRMT R7, R5, 0xbb32, RZ
        IADD3 R8, R5, 0x1, RZ
        MOV R5, R0
        IADD3 R10, R5, 0x1, RZ
        """,
        R0=0x80020001, R2=0x30004, R9=None,
    )  # fmt: skip
    assert (found["R3"], found["R4"], found["R6"]) == (0x40001, 0x80030000, 0xFFFF8002)
    assert (found["R7"], found["R8"]) == ((None,) * 4, None)
    assert found["R10"] == 0x80020002


def test_predicates_in_three_values() -> None:
    found = run(
        """
        ISETP.LT.AND P0, PT, R0, 0x20, P5
        ISETP.GE.AND P1, PT, R0, 0x20, P5
        ISETP.GE.OR P2, PT, R0, 0x20, P5
        PLOP3.LUT P3, PT, P5, PT, P0, 0x80, 0x0
        LOP3.LUT R1, R9, RZ, RZ, 0xc0, !PT
        LOP3.LUT R2, R9, 0x1, RZ, 0xc0, !PT
        SEL R3, R0, R9, P2
        """,
        R0=64, R9=None, P5=None,
    )  # fmt: skip
    assert (found["P0"], found["P1"], found["P2"], found["P3"]) == (0, None, 1, 0)
    assert (found["R1"], found["R2"], found["R3"]) == (0, None, 64)


def test_special_registers_packed_predicates_and_division() -> None:
    found = run(
        """
        S2R R0, SR_CTAID.X
        S2UR UR4, SR_TID.X
        HFMA2.MMA R1, -RZ, RZ, 0, 4.76837158203125e-07
        ISETP.EQ.AND P1, PT, R0, 0x5, PT
        P2R R2, PR, RZ, 0x7f
        R2P PR, R2, 0x7f
        I2F.U32.RP R4, R1
        MUFU.RCP R5, R4
        F2I.FTZ.U32.TRUNC.NTZ R6, R5
        SGXT R7, R3, 0x4
        PRMT R8, R3, 0x5410, R0
        VIADDMNMX R9, R0, R1, 0x7, PT
        """,
        R3=0xF,
    )
    assert (found["R0"], found["UR4"], found["R1"], found["R2"], found["P1"]) == (5, 32, 8, 2, 1)
    assert found["R6"] == 0 and found["R7"] == MASK and found["R8"] == 0x5000F and found["R9"] == 7


def test_a_false_guard_and_an_unknown_operation() -> None:
    found = run("@P0 MOV R1, 0x2\n@!P0 MOV R2, 0x3\nTRICK R3, R2", P0=0, R1=1, R3=4)
    assert (found["R1"], found["R2"], found["R3"]) == (1, 3, None)


# --- the way ----------------------------------------------------------------------------------------------------------


def walked(text: str, trips: dict[str, int] | None = None, **registers: int | None) -> Walk:
    return Walker(parse(text), trips or {}).walk(thread(**registers))


def test_loops_run_as_often_as_their_bounds_say() -> None:
    assert walked(loop("NOP", 7)).visits[1] == 7
    of_program = (
        "S2R R0, SR_CTAID.X\n.L_x_1:\nIADD3 R0, R0, -0x1, RZ\nISETP.GT.AND P0, PT, R0, RZ, PT\n@P0 BRA `(.L_x_1)\nEXIT"
    )
    walker = Walker(parse(sass(of_program)), {})
    assert walker.depends_on_program and not Walker(parse(loop("NOP", 7)), {}).depends_on_program
    assert walker.walk(thread()).visits[1] == 5


def test_registers_that_are_spilled_keep_their_values() -> None:
    """Also in pairs, of which another access may load one half."""
    found = run("STL.64 [R1+0x8], R2\nMOV R2, RZ\nLDL R4, [R1+0xc]\nLDL.64 R6, [R1+0x8]", R2=5, R3=7)
    assert (found["R4"], found["R6"], found["R7"]) == (7, 5, 7)
    text = """
        MOV R2, 0x4
        STL [R1], R2
        .L_x_0:
        LDL R2, [R1]
        IADD3 R2, R2, -0x1, RZ
        STL [R1], R2
        ISETP.NE.U32.AND P0, PT, R2, RZ, PT
        @P0 BRA `(.L_x_0)
        EXIT
    """
    walk = Walker(parse(sass(text)), {}).walk(thread())
    assert not walk.assumed and sum(segment.again for segment in walk.segments) == 3


def test_bounds_from_memory_are_assumed_and_listed() -> None:
    branch = "LDG.E R0, desc[UR4][R2.64]\nISETP.GT.AND P0, PT, R0, RZ, PT\n@P0 BRA `(.L_x_3)"
    text = sass(f".L_x_3:\n{branch}\nEXIT")
    for trips, rounds in (({}, 1), ({"": 4}, 4), ({"": 4, ".L_x_3": 6}, 6)):
        walk = walked(text, trips)
        assert walk.visits[0] == rounds
        assert walk.assumed == {"BRA at 0x20": f"loop .L_x_3 runs {rounds} times"}
    skipped = walked(sass(f"{branch}\nMUFU.EX2 R1, R0\n.L_x_3:\nEXIT"))
    assert skipped.assumed == {"BRA at 0x20": "not taken"}
    left = walked(sass("LDG.E R0, desc[UR4][R2.64]\nISETP.GT.AND P0, PT, R0, RZ, PT\n@P0 EXIT\nEXIT"))
    assert left.assumed == {"EXIT at 0x20": "not taken"}


def test_calls_return_and_what_cannot_be_followed_is_refused() -> None:
    call = "CALL.REL.NOINC `(.L_x_1)\nMOV R1, 0x1\nEXIT\n.L_x_1:\nMUFU.RCP R2, R3\nRET.REL.NODEC R4 `(f)"
    assert [(s.start, s.stop) for s in walked(sass(call)).segments] == [(0, 1), (3, 5), (1, 3)]
    with pytest.raises(ValueError, match="BRX at 0x0: branches to unknown addresses"):
        walked(sass("BRX R2 -0x10\nEXIT"))
    with pytest.raises(ValueError, match="RET at 0x0 without a call"):
        walked(sass("RET.REL.NODEC R4 `(f)\nEXIT"))


def test_the_examples_of_docstrings() -> None:
    found = doctest.testmod(listings)
    assert found.attempted > 0 and found.failed == 0


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ("LDG.E R4, desc[UR4][R2.64]", [0x03020100]),
        ("LDG.E R4, [R2.64+0x4]", [0x07060504]),
        ("LDG.E.64 R4, desc[UR4][R2.64+0x8]", [0x0B0A0908, 0x0F0E0D0C]),
        ("LDG.E.U8 R4, [R2.64+0x5]", [5]),
        ("LDG.E.S8 R4, [R2.64+0xf0]", [0xFFFFFFF0]),
        ("LDG.E R4, [R2.64+0xfe]", [None]),
        ("LDG.E R4, [R2.64+-0x4]", [None]),
        ("LDG.E R4, [R2.64+UR6]", [None]),
    ],
)
def test_known_memory_is_loaded(load: str, words: list[Value]) -> None:
    address = 3 << 40
    state = Thread({}, {}, {address: bytes(range(256))})
    state.registers.update(R2=address & MASK, R3=address >> 32)
    (instruction,) = parse(sass(load)).code
    evaluate(instruction, state)
    assert [state.registers[f"R{4 + n}"] for n in range(len(words))] == words


def test_loops_that_end_at_unknown_values_are_undecided() -> None:
    text = "LDG.E R1, [R2.64]\nMOV R3, RZ\nIADD3 R3, R3, 0x1, RZ\nISETP.LT.AND P0, PT, R3, R1, PT\n@P0 BRA 0x20\nEXIT"
    listing = parse(sass(text))
    for memory, undecided, visits in (({}, 1, 1), ({1 << 40: (5).to_bytes(4, "little")}, 0, 5)):
        state = Thread({}, {}, memory)
        state.registers.update(R2=0, R3=1 << 8)
        walk = Walker(listing, {}).walk(state)
        assert len(walk.undecided) == undecided and max(walk.visits.values()) == visits


def test_bytes_that_no_warp_stored_are_not_known() -> None:
    """Another warp's byte comes from its address alone, each time the next one."""
    listing = parse(
        sass("USETMAXREG.DEALLOC.CTAPOOL 0x18\nLDS.U8 R1, [0x10]\nLDS.U8 R2, [0x20]\nLDS.U8 R3, [0x10]\nEXIT")
    )
    state = Thread({}, {})
    Walker(listing, {}).walk(state, tasks={0x10: [7, 9]})
    assert [state.registers[register] for register in ("R1", "R2", "R3")] == [7, None, 9]


# --- loops that are passed again --------------------------------------------------------------------------------------

REGISTERS = st.sampled_from(["R0", "R1", "R2", "R3"])
PREDICATES = st.sampled_from(["P0", "P1"])
PLAIN = st.one_of(
    st.builds("IADD3 {}, {}, {:#x}, RZ".format, REGISTERS, REGISTERS, st.integers(0, 3)),
    st.builds("LOP3.LUT {}, {}, {:#x}, RZ, 0xc0, !PT".format, REGISTERS, REGISTERS, st.integers(1, 7)),
    st.builds("ISETP.LT.U32.AND {}, PT, {}, {:#x}, PT".format, PREDICATES, REGISTERS, st.integers(0, 5)),
    st.builds("@{} MOV {}, {}".format, PREDICATES, REGISTERS, REGISTERS),
    st.builds("@{} BAR.SYNC.DEFER_BLOCKING {:#x}".format, PREDICATES, st.integers(0, 3)),
    st.builds("LDG.E {}, [R8.64]".format, REGISTERS),
)


@st.composite
def nests(draw: st.DrawFn) -> str:
    """Loops in loops, each of a few iterations, whose bodies skip instructions, leave early, and read anything."""
    labels = count()

    def body(depth: int) -> list[str]:
        inner = loop_of(depth + 1) if depth < 2 and draw(st.booleans()) else []
        return [*draw(st.lists(PLAIN, max_size=2)), *inner, *draw(st.lists(PLAIN, max_size=2))]

    def loop_of(depth: int) -> list[str]:
        start, middle, after = (f".L_x_{next(labels)}" for _ in range(3))
        counter, trips = f"R{10 + depth}", draw(st.integers(1, 4))
        way_out = draw(st.sampled_from([f"@P0 BRA `({middle})", f"@P1 BRA `({after})", "@P1 EXIT", "NOP"]))
        end = [
            f"IADD3 {counter}, {counter}, 0x1, RZ",
            f"ISETP.NE.U32.AND P2, PT, {counter}, {trips:#x}, PT",
            f"@P2 BRA `({start})",
        ]
        reset = draw(st.sampled_from([f"MOV {counter}, RZ", f"LOP3.LUT {counter}, {counter}, 0x0, RZ, 0xc0, !PT"]))
        return [reset, f"{start}:", *body(depth), way_out, *body(depth), f"{middle}:", *end, f"{after}:"]

    return sass("\n".join([*loop_of(0), draw(PLAIN), *loop_of(0), "EXIT"]))


@given(nests(), st.lists(st.tuples(*[st.one_of(st.integers(0, 3), st.none())] * 4), min_size=2, max_size=4))
def test_loops_that_are_passed_again_are_walked_as_if_step_by_step(text: str, starts: list[tuple[Value, ...]]) -> None:
    """The walks, what they assume, and the registers at their ends, also if the walk stops within a loop."""
    listing = parse(text)
    remembers, forgets = Walker(listing, {"": 2}), Walker(listing, {"": 2})
    forgets._loops.clear()  # pyright: ignore[reportPrivateUsage] -- no option of users turns it off
    stops = [None, *((header, 3) for header in sorted(forgets.headers)[:2])]
    for start in starts:
        for stop in stops:
            states = [thread(**{f"R{n}": value for n, value in enumerate(start)}) for _ in range(2)]
            walks = [walker.walk(state, stop) for walker, state in zip((remembers, forgets), states, strict=True)]
            assert walks[0] == walks[1]
            assert states[0].registers == states[1].registers


def test_an_inner_loop_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """600 x 1,000 iterations: only the first 1,000 are evaluated. Another warp evaluates nothing."""
    inner = f"MOV R1, RZ\n.L_x_1:\nIADD3 R1, R1, 0x1, RZ\nISETP.NE.AND P0, PT, R1, {1000:#x}, PT\n@P0 BRA `(.L_x_1)"
    text = f"MOV R0, RZ\n.L_x_0:\n{inner}\nIADD3 R0, R0, 0x1, RZ\nISETP.NE.AND P1, PT, R0, {600:#x}, PT\n"
    listing = parse(sass(f"{text}@P1 BRA `(.L_x_0)\nEXIT"))
    walker, evaluations = Walker(listing, {}, effects=False), Counter[int]()
    rules = {name: _counting(rule, evaluations) for name, rule in RULES.items()}
    monkeypatch.setattr("tilekern.estimate.gpu.rules.RULES", rules)
    assert walker.walk(thread()).visits[2] == 600_000
    assert 2_000 < evaluations.total() < 5_000
    walker.walk(thread())
    assert evaluations.total() < 5_010


def _counting(rule: Rule, evaluations: Counter[int]) -> Rule:
    def counting(state: Thread, instruction: listings.Instruction) -> Any:
        evaluations[instruction.address] += 1
        return rule(state, instruction)

    return counting
