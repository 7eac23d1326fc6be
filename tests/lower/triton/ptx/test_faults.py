"""Faults of programs in PTX that are refused: each program here is right but for one instruction."""

from __future__ import annotations

import numpy as np
import pytest

from tests.lower.triton.ptx.assembly import run
from tests.lower.triton.ptx.test_instructions import COPY, TENSOR
from tilekern.lower.triton.ptx.copies import TensorMap
from tilekern.lower.triton.ptx.parse import ConflictError, OutsideError, PtxError, parse
from tilekern.lower.triton.ptx.run import BASE

pytestmark = pytest.mark.sweep(1)

X = np.arange(128, dtype=np.uint32)


def refused(
    body: str, *arrays: np.ndarray, error: type[PtxError] = PtxError, threads: int = 32, **options: object
) -> str:
    """The message of the error."""
    with pytest.raises(error) as caught:
        run(body, *arrays, threads=threads, **options)
    assert type(caught.value) is error and "PTX line" in caught.value.at
    return str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.u32 %r2, [%d0+512];", "4 bytes at offset 768 of global memory, outside"),
        ("ld.global.u32 %r2, [%d0+2];", "or out of alignment"),
        ("ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%d0+504];", "16 bytes at offset 760"),
        ("st.global.u32 [%d0+-4], %r0;", "at offset 252"),
        (
            "mov.u32 %r2, global_smem; st.shared.u32 [%r2+4096], %r0;",
            "4 bytes at 4096 of shared memory, which has 4096",
        ),
        ("mov.u32 %r2, global_smem; ld.shared.u64 %d20, [%r2+4];", "8 bytes at 4 of shared memory"),
    ],
)
def test_accesses_outside_of_arrays_and_of_shared_memory(body: str, message: str) -> None:
    assert message in refused(body, X, error=OutsideError)


def test_an_access_of_local_memory_outside_of_it() -> None:
    assert "64 bytes" in refused("mov.u64 %d20, stack; st.local.b32 [%d20+64], %r0;", X)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("setp.lt.u32 %p1, %r0, 32; @%p1 bar.sync 0;", "deadlock: threads wait"),
        ("bar.sync 1, 32;", "64 threads meet at barrier 1, which is for 32"),
        ("mov.u32 %r2, global_smem; mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0;", "no mbarrier at 0"),
        ("mov.u32 %r2, 0; div.u32 %r3, %r0, %r2;", "an integer is divided by 0"),
        ("trap;", "the program traps"),
        ("tcgen05.fence::after_thread_sync;", "this instruction is not known"),
        ("add.f128 %r2, %r2, %r2;", "not known"),
        ("again: bra again;", "more than 1000 steps"),
        ("setp.lt.u32 %p1, %r0, 3; @%p1 shfl.sync.idx.b32 %r2, %r0, 9, 31, -1;", "of a thread that takes no part"),
        ("setp.lt.u32 %p1, %r0, 3; mov.u32 %r2, global_smem; "
         "@%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r2];", "not all threads of a warp"),
    ],
)  # fmt: skip
def test_programs_that_do_not_end_or_have_no_meaning(body: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilekern.lower.triton.ptx.machine.MOST_STEPS", 1000)
    assert message in refused(body, X, threads=64)


def test_two_blocks_that_store_to_one_place() -> None:
    body = "st.global.u32 [%d0], %r1;"
    assert "two blocks store to one place" in refused(body, X, error=ConflictError, blocks=2)
    later = "setp.eq.u32 %p1, %r1, 1; @%p1 st.global.u32 [%d0], %r1; @!%p1 st.global.u32 [%d0], %r1;"
    assert "block 0 stores where block 1 has stored" in refused(later, X, error=ConflictError, blocks=2)
    same = "mul.wide.u32 %d31, %r1, 4; add.s64 %d30, %d0, %d31; st.global.u32 [%d30], %r1;"
    (out,) = run(same, X, blocks=2)
    np.testing.assert_array_equal(out[:2], [0, 1])


# --- races ---

SHARED = "mov.u32 %r2, global_smem; mad.lo.u32 %r3, %r0, 4, %r2; mad.lo.u32 %r4, %r0, -4, %r2; add.u32 %r4, %r4, 252; "


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("st.shared.u32 [%r3], %r0;", "ld.shared.u32 %r5, [%r4];", "reads the word at"),
        ("ld.shared.u32 %r5, [%r3];", "st.shared.u32 [%r4], %r0;", "writes the word at"),
        ("st.shared.u32 [%r3], %r0;", "st.shared.u32 [%r4], %r0;", "writes the word at"),
    ],
)
def test_accesses_of_two_warps_need_a_barrier(first: str, second: str, message: str) -> None:
    found = refused(SHARED + first + second, X, threads=64, races=True)
    assert "race: warp" in found and message in found and "with no barrier between" in found
    run(f"{SHARED}{first} bar.sync 0; {second}", X, threads=64, races=True)
    run(SHARED + first + second, X, threads=32, races=True)  # lanes of one warp run together


def test_a_barrier_of_some_warps_orders_these_alone() -> None:
    """Warps 0 and 1 meet; warp 2 reads what warp 0 wrote."""
    pair = f"{SHARED} st.shared.u32 [%r3], %r0; setp.lt.u32 %p1, %r0, 64; @%p1 bar.sync 1, 64; "
    run(f"{pair} @%p1 ld.shared.u32 %r5, [%r4];", X, threads=96, races=True)
    third = "setp.ge.u32 %p2, %r0, 64; @%p2 ld.shared.u32 %r5, [%r2];"
    assert "warp 2 reads the word at 0" in refused(pair + third, X, threads=96, races=True)


ARRIVALS = f"""{SHARED}
setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [%r2+1024], 32; bar.sync 0;
setp.lt.u32 %p2, %r0, 32; @!%p2 bra reader;
st.shared.u32 [%r3], %r0; mbarrier.arrive.shared::cta.b64 _, [%r2+1024]; bra done;
reader: mbarrier.try_wait.parity.shared.b64 %p3, [%r2+1024], 0; @!%p3 bra reader;
ld.shared.u32 %r5, [%r4];
done:
"""


def test_arrivals_at_an_mbarrier_order_a_reader_behind_a_writer() -> None:
    run(ARRIVALS, X, threads=64, races=True)
    early = ARRIVALS.replace("st.shared.u32 [%r3], %r0;", "").replace(
        "bra done;", "st.shared.u32 [%r3], %r0; bra done;"
    )
    assert "race: warp" in refused(early, X, threads=64, races=True)
    assert "deadlock" in refused(ARRIVALS.replace("[%r2+1024], 32;", "[%r2+1024], 33;"), X, threads=64)


def test_a_copy_must_be_waited_for_before_its_words_are_read() -> None:
    x = np.zeros((32, 4), np.uint32)
    ends = "ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r3]; st.global.v4.b32 [%d29], {%r10, %r11, %r12, %r13};"
    run(f"{COPY} cp.async.wait_group 0; {ends}", x, x, races=True)
    assert "race: warp 0 reads" in refused(COPY + ends, x, x, races=True)
    assert "race: warp 0 reads" in refused(f"{COPY} cp.async.wait_group 1; {ends}", x, x, races=True)


def tensors() -> tuple[np.ndarray, np.ndarray, TensorMap]:
    """The arrays of `TENSOR`, and the descriptor of the first."""
    x = np.arange(1, 241, dtype=np.float32).reshape(10, 24)
    return x, np.zeros((8, 8), np.float32), TensorMap(BASE + 256, x.shape, (96, 4), (8, 8), 16, 4)


def test_a_tensor_copy_must_be_waited_for() -> None:
    x, out, tensor = tensors()
    unwaited = TENSOR.replace("@!%p2 bra wait;", "")
    run(unwaited, x, out, parameters=[tensor], races=True)  # the copy is done, and the test says so
    blind = TENSOR.replace("wait: mbarrier.try_wait.parity.shared.b64 %p2, [%r2+1024], 0; @!%p2 bra wait;", "")
    assert "that a tensor copy wrote" in refused(blind, x, out, parameters=[tensor], races=True)
    short = TENSOR.replace("_, [%r2+1024], 256;", "_, [%r2+1024], 260;")
    assert "deadlock" in refused(short, x, out, parameters=[tensor])
    moved = TENSOR.replace("[%r2], [%d20", "[%r2+64], [%d20")
    assert "no multiple of 128" in refused(moved, x, out, parameters=[tensor])


STORE = """
mov.u32 %r2, global_smem; mad.lo.u32 %r3, %r0, 8, %r2; mov.u64 %d20, f_param_2; setp.eq.u32 %p1, %r0, 0;
st.shared.v2.b32 [%r3], {%r0, %r0};
fence.proxy.async.shared::cta;
bar.sync 0;
@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d20, {4, 6}], [%r2];
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group.read 0;
bar.sync 0;
st.shared.v2.b32 [%r3], {%r1, %r1};
"""


@pytest.mark.parametrize("late", [False, True])
def test_a_tensor_copy_to_global_memory(late: bool) -> None:
    x, out, tensor = tensors()
    after, _ = run(STORE, x, out, parameters=[tensor], races=True, late=late)
    expected = x.view(np.uint32).copy()
    expected[6:, 4:12] = np.repeat(np.arange(16, dtype=np.uint32), 2).reshape(4, 8)
    np.testing.assert_array_equal(after.view(np.uint32), expected)
    unfenced = STORE.replace("fence.proxy.async.shared::cta;", "")
    assert "no proxy fence stands between" in refused(unfenced, x, out, parameters=[tensor], races=True)
    unwaited = STORE.replace("@%p1 cp.async.bulk.wait_group.read 0;", "")
    assert "that warp 0 reads" in refused(unwaited, x, out, parameters=[tensor], races=True)


def test_text_without_an_entry_function() -> None:
    with pytest.raises(PtxError, match="no entry function"):
        parse(".version 8.7\n")
