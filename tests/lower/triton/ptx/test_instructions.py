"""Each instruction of the interpreter of PTX computes what NumPy does, in programs written by hand."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.lower.triton.ptx.assembly import computed, run
from tilekern.ir.core import Array
from tilekern.lower.triton.ptx.copies import TensorMap
from tilekern.lower.triton.ptx.run import BASE

pytestmark = pytest.mark.sweep(1)

RANDOM = np.random.default_rng(0)
A, B = (RANDOM.integers(0, 2**32, 32, np.uint32) for _ in range(2))
A[:6], B[:6] = (0, 1, 2**31, 2**32 - 1, 2**31 - 1, 7), (1, 2**32 - 1, 2**31, 2**32 - 1, 3, 2)
WIDE_A, WIDE_B = (RANDOM.integers(0, 2**64, 32, np.uint64) for _ in range(2))
SIGNED_A, SIGNED_B = A.view(np.int32), B.view(np.int32)
SMALL = np.arange(32, dtype=np.uint32)
ONE = np.uint32(1)
MORE = ONE * (SMALL > 6)
X, Y = (RANDOM.standard_normal(32).astype(np.float32) * 10 for _ in range(2))
SPECIAL = X.copy()
SPECIAL[:6] = np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38
THIRD = RANDOM.standard_normal(32).astype(np.float32)
HALF_A, HALF_B = (x.astype(np.float16) for x in (X, Y))


def high(a: Array, b: Array, bits: int) -> Array:
    """The high halves of products."""
    products = [int(x) * int(y) >> bits for x, y in zip(a, b, strict=True)]
    return np.array([p & ((1 << bits) - 1) for p in products], f"u{bits // 8}")


def fused(a: Array, b: Array, c: Array) -> Array:
    """A product and a sum with one rounding."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


BOTH = B.astype(np.uint64) << np.uint64(32) | A
SOME = np.array([np.nan, 1e20, -1e20, -1.5] * 8, np.float32)

CASES: list[tuple[str, tuple[Array, ...], Array]] = [
    ("add.s32 out, a, b;", (A, B), A + B),
    ("sub.u32 out, a, b;", (A, B), A - B),
    ("add.s64 out, a, b;", (WIDE_A, WIDE_B), WIDE_A + WIDE_B),
    ("mul.lo.s32 out, a, b;", (A, B), A * B),
    ("mul.hi.u32 out, a, b;", (A, B), high(A, B, 32)),
    ("mul.hi.s32 out, a, b;", (A, B), high(SIGNED_A, SIGNED_B, 32)),
    ("mul.hi.u64 out, a, b;", (WIDE_A, WIDE_B), high(WIDE_A, WIDE_B, 64)),
    ("mul.wide.u32 out, a, b;", (A, B), A.astype(np.uint64) * B),
    ("mul.wide.s32 out, a, b;", (A, B), (SIGNED_A.astype(np.int64) * SIGNED_B).view(np.uint64)),
    ("mad.lo.s32 out, a, b, c;", (A, B, SMALL), A * B + SMALL),
    ("div.u32 out, a, b;", (A, B), A // B),
    ("rem.u32 out, a, b;", (A, B), A % B),
    ("div.s32 out, a, b;", (A, B), np.trunc(SIGNED_A / SIGNED_B).astype(np.int64).astype(np.uint32)),
    ("neg.s32 out, a;", (A,), -A),
    ("abs.s32 out, a;", (A,), np.abs(SIGNED_A).view(np.uint32)),
    ("min.s32 out, a, b;", (A, B), np.minimum(SIGNED_A, SIGNED_B).view(np.uint32)),
    ("max.u32 out, a, b;", (A, B), np.maximum(A, B)),
    ("and.b32 out, a, b;", (A, B), A & B),
    ("or.b32 out, a, b;", (A, B), A | B),
    ("xor.b32 out, a, b;", (A, B), A ^ B),
    ("not.b32 out, a;", (A,), ~A),
    ("shl.b32 out, a, b;", (A, SMALL), A << SMALL),
    ("shl.b32 out, a, b;", (A, SMALL + 32), np.zeros_like(A)),
    ("shr.u32 out, a, b;", (A, SMALL), A >> SMALL),
    ("shr.s32 out, a, b;", (A, SMALL + 5), (SIGNED_A >> np.minimum(SMALL + 5, 31).astype(np.int32)).view(np.uint32)),
    ("shf.l.wrap.b32 out, a, b, c;", (A, B, SMALL), (BOTH << SMALL.astype(np.uint64) >> 32).astype(np.uint32)),
    ("shf.r.clamp.b32 out, a, b, c;", (A, B, SMALL), (BOTH >> SMALL.astype(np.uint64)).astype(np.uint32)),
    ("bfe.u32 out, a, 5, 7;", (A,), A >> 5 & 127),
    ("bfe.s32 out, a, 5, 7;", (A,), ((SIGNED_A << 20) >> 25).view(np.uint32)),
    ("bfi.b32 out, a, b, 8, 4;", (A, B), B & 0xFFFFF0FF | (A & 15) << 8),
    ("popc.b32 out, a;", (A,), np.array([int(v).bit_count() for v in A], np.uint32)),
    ("clz.b32 out, a;", (A,), np.array([32 - int(v).bit_length() for v in A], np.uint32)),
    ("brev.b32 out, a;", (A,), np.array([int(f"{v:032b}"[::-1], 2) for v in A], np.uint32)),
    ("bfind.u32 out, a;", (A,), np.array([int(v).bit_length() - 1 & 0xFFFFFFFF for v in A], np.uint32)),
    ("prmt.b32 out, a, b, 0x6420;", (A, B), A & 255 | (A >> 16 & 255) << 8 | (B & 255) << 16 | (B >> 16 & 255) << 24),
    ("lop3.b32 out, a, b, c, 0xca;", (A, B, SMALL), A & B | ~A & SMALL),
    ("setp.lt.s32 %p1, a, b; selp.b32 out, a, b, %p1;", (A, B), np.minimum(SIGNED_A, SIGNED_B).view(np.uint32)),
    ("setp.lt.u32 %p1, a, b; @%p1 add.u32 out, a, 1; @!%p1 mov.b32 out, 9;", (A, B), np.where(A < B, A + 1, ONE * 9)),
    ("setp.gt.f32 %p1, a, b; selp.u32 out, 1, 0, %p1;", (SPECIAL, Y), (SPECIAL > Y).astype(np.uint32)),
    ("setp.leu.f32 %p1, a, b; selp.u32 out, 1, 0, %p1;", (SPECIAL, Y), (~(SPECIAL > Y)).astype(np.uint32)),
    ("setp.nan.f32 %p1, a, a; selp.u32 out, 1, 0, %p1;", (SPECIAL,), np.isnan(SPECIAL).astype(np.uint32)),
    ("setp.ne.u32 %p2, a, -1; setp.lt.and.s32 %p1|%p3, a, 7, %p2; selp.u32 out, 1, 0, %p3;", (SMALL,), MORE),
    ("add.cc.u32 out, a, b; addc.u32 out, 0, 0;", (A, B), (A.astype(np.uint64) + B >> 32).astype(np.uint32)),
    ("sub.cc.u32 out, a, b; subc.u32 out, 0, 0;", (A, B), np.where(A < B, 2**32 - 1, 0).astype(np.uint32)),
    ("add.f32 out, a, b;", (X, Y), X + Y),
    ("fma.rn.f32 out, a, b, c;", (X, Y, THIRD), fused(X, Y, THIRD)),
    ("div.full.f32 out, a, b;", (X, Y), X / Y),
    ("copysign.f32 out, a, b;", (SPECIAL, Y), np.copysign(Y, SPECIAL)),
    ("min.f32 out, a, b;", (SPECIAL, Y), np.fmin(SPECIAL, Y)),
    ("max.NaN.f32 out, a, b;", (SPECIAL, Y), np.maximum(SPECIAL, Y)),
    ("ex2.approx.ftz.f32 out, a;", (X,), np.exp2(X)),
    ("sqrt.rn.f32 out, a;", (np.abs(X),), np.sqrt(np.abs(X))),
    ("cvt.rni.s32.f32 out, a;", (X,), np.rint(X).astype(np.int32).view(np.uint32)),
    ("cvt.rzi.s32.f32 out, a;", (SOME,), np.array([0, 2**31 - 1, 2**31, 2**32 - 1] * 8, np.uint32)),
    ("cvt.rn.f32.s32 out, a;", (A,), SIGNED_A.astype(np.float32)),
    ("cvt.rn.f32.u64 out, a;", (WIDE_A,), WIDE_A.astype(np.float32)),
    ("cvt.u64.u32 out, a;", (A,), A.astype(np.uint64)),
    ("cvt.s64.s32 out, a;", (A,), SIGNED_A.astype(np.int64).view(np.uint64)),
    ("cvt.f64.f32 out, a;", (X,), X.astype(np.float64)),
    ("cvt.rn.f32.f64 out, a;", (X.astype(np.float64) / 3,), (X.astype(np.float64) / 3).astype(np.float32)),
    ("cvt.rmi.f32.f32 out, a;", (X,), np.floor(X)),
    ("mov.b32 %r20, a; mov.b32 {%h1, %h2}, %r20; mov.b32 out, {%h2, %h1};", (A,), A >> 16 | A << 16),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "operands", "expected"), CASES, ids=[f"{n} {case[0]}" for n, case in enumerate(CASES)]
)
def test_results_in_registers(text: str, operands: tuple[Array, ...], expected: Array) -> None:
    found = computed(text, *operands, result=expected.dtype)
    np.testing.assert_array_equal(found, expected)
    if expected.dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(found[found == 0]), np.signbit(expected[expected == 0]))


@pytest.mark.parametrize(
    ("dtype", "name"), [(np.float16, "f16x2"), (ml_dtypes.bfloat16, "bf16x2")], ids=["f16", "bf16"]
)
def test_pairs(dtype: Any, name: str) -> None:
    """The first source is the upper half; products of pairs are rounded once."""
    pairs = computed(f"cvt.rn.{name}.f32 out, a, b;", X, Y, result=np.uint32)
    halves = pairs.view(dtype).reshape(-1, 2)
    np.testing.assert_array_equal(halves[:, 1], X.astype(dtype))
    np.testing.assert_array_equal(halves[:, 0], Y.astype(dtype))
    large = computed(f"set.gt.{name}.{name} out, a, b;", pairs, pairs[::-1].copy(), result=np.uint32)
    np.testing.assert_array_equal(large.view(dtype).reshape(-1, 2), (halves > halves[::-1]).astype(dtype))
    tests = computed(
        f"setp.gt.{name} %p1|%p2, a, b; selp.u32 %r20, 1, 0, %p1; selp.u32 %r21, 2, 0, %p2; or.b32 out, %r20, %r21;",
        pairs,
        pairs[::-1].copy(),
        result=np.uint32,
    )
    np.testing.assert_array_equal(tests, (halves > halves[::-1]) @ np.uint32([1, 2]))
    squares = computed(f"fma.rn.{name} out, a, a, a;", pairs, result=np.uint32).view(dtype).reshape(-1, 2)
    wide = halves.astype(np.float64)
    np.testing.assert_array_equal(squares, (wide * wide + wide).astype(dtype))


def test_roundings_to_narrow_floats() -> None:
    down = computed("cvt.rz.f16.f32 out, a;", X, result=np.uint16).view(np.float16)
    assert (np.abs(down.astype(np.float32)) <= np.abs(X)).all()
    assert (np.abs(np.nextafter(down, np.copysign(np.float16(np.inf), down)).astype(np.float32)) > np.abs(X)).all()
    large = np.array([1e6, -1e6, np.nan, 1.0] * 8, np.float32)
    pair = computed("cvt.rn.satfinite.e4m3x2.f32 out, a, b;", large, -large, result=np.uint16)
    halves = pair.view(ml_dtypes.float8_e4m3fn).reshape(-1, 2).astype(np.float32)
    np.testing.assert_array_equal(halves[:, 1], [448, -448, np.nan, 1] * 8)
    np.testing.assert_array_equal(halves[:, 0], [-448, 448, np.nan, -1] * 8)
    back = computed("cvt.rn.f16x2.e4m3x2 out, a;", pair, result=np.uint32).view(np.float16).reshape(-1, 2)
    np.testing.assert_array_equal(back.astype(np.float32), halves)
    rounded = computed("cvt.rna.tf32.f32 out, a;", X, result=np.uint32)
    assert not (rounded & 0x1FFF).any()
    assert (np.abs(rounded.view(np.float32) - X) <= np.abs(X) * 2.0**-11).all()


@pytest.mark.parametrize(
    ("text", "lanes"),
    [
        ("bfly.b32 out, a, 5, 31", np.arange(32) ^ 5),
        ("down.b32 out, a, 3, 31", np.where(np.arange(32) < 29, np.arange(32) + 3, np.arange(32))),
        ("up.b32 out, a, 3, 0", np.where(np.arange(32) >= 3, np.arange(32) - 3, np.arange(32))),
        ("idx.b32 out, a, 7, 31", np.full(32, 7)),
        ("bfly.b32 out, a, 8, 0x181f", np.arange(32) & ~8),
    ],
)
def test_shuffles(text: str, lanes: Array) -> None:
    two_warps = np.concatenate([A, B])
    found = computed(f"shfl.sync.{text}, -1;", two_warps, result=np.uint32)
    np.testing.assert_array_equal(found, np.concatenate([A[lanes], B[lanes]]))


def test_votes_and_reductions_of_warps() -> None:
    values = np.concatenate([A, B])
    odd = (values & 1).astype(bool).reshape(2, 32)
    test = "and.b32 %r20, a, 1; setp.eq.u32 %p1, %r20, 1;"
    bits = computed(f"{test} vote.sync.ballot.b32 out, %p1, -1;", values, result=np.uint32)
    np.testing.assert_array_equal(bits, np.repeat(odd @ (1 << np.arange(32, dtype=np.uint64)), 32))
    some = computed(f"{test} vote.sync.any.pred %p2, %p1, -1; selp.u32 out, 1, 0, %p2;", values, result=np.uint32)
    every = computed(f"{test} vote.sync.all.pred %p2, %p1, -1; selp.u32 out, 1, 0, %p2;", values, result=np.uint32)
    np.testing.assert_array_equal(some, np.repeat(odd.any(1), 32))
    np.testing.assert_array_equal(every, np.repeat(odd.all(1), 32))
    least = computed("redux.sync.min.s32 out, a, -1;", values, result=np.uint32)
    np.testing.assert_array_equal(least.view(np.int32), np.repeat(values.view(np.int32).reshape(2, 32).min(1), 32))
    total = computed("redux.sync.add.s32 out, a, -1;", values, result=np.uint32)
    np.testing.assert_array_equal(total, np.repeat(values.reshape(2, 32).sum(1, dtype=np.uint32), 32))
    exclusive = computed("redux.sync.xor.b32 out, a, -1;", values, result=np.uint32)
    np.testing.assert_array_equal(exclusive, np.repeat(np.bitwise_xor.reduce(values.reshape(2, 32), 1), 32))
    chosen = computed("elect.sync _|%p1, -1; selp.u32 out, 1, 0, %p1;", values, result=np.uint32)
    np.testing.assert_array_equal(np.flatnonzero(chosen), [0, 32])
    active = "mov.u32 out, 0; setp.lt.u32 %p1, a, 5; @!%p1 bra done; activemask.b32 out; done:"
    np.testing.assert_array_equal(computed(active, SMALL, result=np.uint32), [31] * 5 + [0] * 27)


def test_branches_and_their_tables() -> None:
    loop = "mov.u32 out, 0; again: add.u32 out, out, a; sub.u32 a, a, 1; setp.ne.u32 %p1, a, 0; @%p1 bra again;"
    np.testing.assert_array_equal(computed(loop, SMALL + 1, result=np.uint32), (SMALL + 1) * (SMALL + 2) // 2)
    table = """
    and.b32 %r20, a, 1;
    ways: .branchtargets even, odd;
    brx.idx %r20, ways;
    even: mov.u32 out, 10; bra done;
    odd: mov.u32 out, 11;
    done:
    """
    np.testing.assert_array_equal(computed(table, SMALL, result=np.uint32), 10 + SMALL % 2)


def test_vectors_of_memory_and_local_memory() -> None:
    x = RANDOM.integers(0, 2**32, 128, np.uint32)
    body = """
    mul.wide.u32 %d31, %r0, 16; add.s64 %d30, %d0, %d31; add.s64 %d29, %d1, %d31;
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%d30];
    mov.u64 %d20, stack;
    st.local.v2.b32 [%d20+56], {%r12, %r13};
    ld.local.v2.b32 {%r14, %r15}, [%d20+56];
    st.global.v4.b32 [%d29], {%r15, %r14, %r11, %r10};
    """
    _, out = run(body, x, np.zeros_like(x))
    np.testing.assert_array_equal(out.reshape(32, 4), x.reshape(32, 4)[:, ::-1])


def test_atomics() -> None:
    total, old = np.zeros(1, np.uint32), np.zeros(64, np.uint32)
    body = """
    atom.global.add.u32 %r10, [%d0], 2;
    mul.wide.u32 %d31, %r0, 4; add.s64 %d30, %d1, %d31; st.global.u32 [%d30], %r10;
    """
    total, old = run(body, total, old, threads=64)
    assert total[0] == 128
    np.testing.assert_array_equal(np.sort(old), np.arange(64) * 2)
    (swapped,) = run("atom.global.cas.b32 %r10, [%d0], 5, 9; red.global.max.s32 [%d0], 3;", np.array([5], np.uint32))
    assert swapped[0] == 9


def test_matrices_of_shared_memory() -> None:
    """`ldmatrix` gives each lane two neighbours of a row; transposed, of a column; `stmatrix` is its inverse."""
    x = np.arange(64, dtype=np.uint16)
    load = """
    mov.u32 %r2, global_smem; mul.lo.u32 %r3, %r0, 4; add.u32 %r4, %r2, %r3;
    mul.wide.u32 %d31, %r0, 4; add.s64 %d30, %d0, %d31; add.s64 %d29, %d1, %d31;
    ld.global.b32 %r5, [%d30]; st.shared.b32 [%r4], %r5; bar.sync 0;
    and.b32 %r6, %r0, 7; mad.lo.u32 %r6, %r6, 16, %r2;
    """
    ends = "st.global.b32 [%d29], %r7;"
    _, plain = run(f"{load} ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r7}}, [%r6]; {ends}", x, np.zeros_like(x))
    np.testing.assert_array_equal(plain, x)
    _, flipped = run(
        f"{load} ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {{%r7}}, [%r6]; {ends}", x, np.zeros_like(x)
    )
    np.testing.assert_array_equal(flipped.reshape(8, 8), x.reshape(8, 8).T)
    back = f"""{load} bar.sync 0;
    stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%r6], {{%r5}}; bar.sync 0; ld.shared.b32 %r7, [%r4]; {ends}"""
    _, stored = run(back, x, np.zeros_like(x))
    np.testing.assert_array_equal(stored.reshape(8, 8), x.reshape(8, 8).T)


def test_a_product_of_a_warp() -> None:
    """`mma` m16n8k16 by the layouts of PTX ISA 9.0, section 9.7.14.5.8."""
    a = RANDOM.integers(-8, 8, (16, 16)).astype(ml_dtypes.bfloat16)
    b = RANDOM.integers(-8, 8, (16, 8)).astype(ml_dtypes.bfloat16)
    c = RANDOM.integers(-8, 8, (16, 8)).astype(np.float32)
    lane = np.arange(32)
    row, pair = lane // 4, lane % 4 * 2
    first = [(row, pair), (row + 8, pair), (row, pair + 8), (row + 8, pair + 8)]
    left = np.stack([np.stack([a[r, k], a[r, k + 1]], 1) for r, k in first], 1)
    right = np.stack([np.stack([b[k, row], b[k + 1, row]], 1) for k in (pair, pair + 8)], 1)
    acc = np.stack([c[row, pair], c[row, pair + 1], c[row + 8, pair], c[row + 8, pair + 1]], 1)
    body = """
    mul.wide.u32 %d31, %r0, 16; add.s64 %d30, %d0, %d31; add.s64 %d29, %d2, %d31;
    mul.wide.u32 %d28, %r0, 8; add.s64 %d27, %d1, %d28;
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%d30]; ld.global.v2.b32 {%r14, %r15}, [%d27];
    ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%d29];
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
        {%r20, %r21, %r22, %r23}, {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%r20, %r21, %r22, %r23};
    st.global.v4.b32 [%d29], {%r20, %r21, %r22, %r23};
    """
    *_, out = run(body, left, right, acc)
    found = np.zeros((16, 8), np.float32)
    found[row, pair], found[row, pair + 1], found[row + 8, pair], found[row + 8, pair + 1] = out.T
    np.testing.assert_array_equal(found, c + a.astype(np.float32) @ b.astype(np.float32))


def test_a_product_of_a_warp_in_float64() -> None:
    """`mma` m8n8k4 by the layouts of PTX ISA 9.0, section 9.7.14.5.1."""
    a, b, c = (RANDOM.integers(-8, 8, shape).astype(np.float64) for shape in ((8, 4), (4, 8), (8, 8)))
    body = """
    mul.wide.u32 %d31, %r0, 8; mul.wide.u32 %d28, %r0, 16;
    add.s64 %d30, %d0, %d31; add.s64 %d29, %d1, %d31; add.s64 %d27, %d2, %d28;
    ld.global.f64 %q10, [%d30]; ld.global.f64 %q11, [%d29]; ld.global.v2.f64 {%q12, %q13}, [%d27];
    mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%q12, %q13}, {%q10}, {%q11}, {%q12, %q13};
    st.global.v2.f64 [%d27], {%q12, %q13};
    """
    # Lane n has A[n // 4, n % 4], B[n % 4, n // 4] and C[n // 4, n % 4 * 2 :].
    *_, out = run(body, a, np.ascontiguousarray(b.T), c)
    np.testing.assert_array_equal(out, c + a @ b)


COPY = """
mov.u32 %r2, global_smem; mad.lo.u32 %r3, %r0, 16, %r2; mul.wide.u32 %d31, %r0, 16;
add.s64 %d30, %d0, %d31; add.s64 %d29, %d1, %d31;
setp.lt.u32 %p1, %r0, 30; selp.u32 %r4, 16, 0, %p1;
cp.async.cg.shared.global [%r3], [%d30], 16, %r4;
cp.async.commit_group;
"""


@pytest.mark.parametrize("late", [False, True])
def test_asynchronous_copies(late: bool) -> None:
    """Lanes whose source has 0 bytes store zeros."""
    x = RANDOM.integers(1, 2**32, (32, 4), np.uint32)
    ends = "ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r3]; st.global.v4.b32 [%d29], {%r10, %r11, %r12, %r13};"
    _, out = run(f"{COPY} cp.async.wait_group 0; {ends}", x, np.zeros_like(x), late=late, races=True)
    np.testing.assert_array_equal(out, np.where(np.arange(32)[:, None] < 30, x, 0))
    if late:
        _, early = run(COPY + ends, x, np.zeros_like(x), late=True)
        assert (early == 2**32 - 1).all()  # nobody waited: memory that nobody wrote


TENSOR = """
mov.u32 %r2, global_smem; setp.eq.u32 %p1, %r0, 0; mov.u64 %d20, f_param_2;
@%p1 mbarrier.init.shared::cta.b64 [%r2+1024], 1; bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2+1024], 256;
@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d20, {4, 6}], [%r2+1024];
wait: mbarrier.try_wait.parity.shared.b64 %p2, [%r2+1024], 0; @!%p2 bra wait;
mul.wide.u32 %d31, %r0, 8; add.s64 %d29, %d1, %d31; mad.lo.u32 %r3, %r0, 8, %r2;
ld.shared.v2.b32 {%r10, %r11}, [%r3]; st.global.v2.b32 [%d29], {%r10, %r11};
"""


@pytest.mark.parametrize("swizzle", [16, 32])
@pytest.mark.parametrize("late", [False, True])
def test_tensor_copies_to_shared_memory(late: bool, swizzle: int) -> None:
    """A box of 8 × 8 from row 6, column 4 of 10 × 24: what is outside is 0, and rows of 32 bytes are swizzled."""
    x, out = np.arange(1, 241, dtype=np.float32).reshape(10, 24), np.zeros((8, 8), np.float32)
    place = BASE + 256  # of the first array
    tensor = TensorMap(place, x.shape, (96, 4), (8, 8), swizzle, 4)
    _, out = run(TENSOR, x, out, parameters=[tensor], late=late, races=True)
    box = np.zeros((8, 8), np.float32)
    box[:4] = x[6:, 4:12]
    if swizzle == 32:  # 16 bytes of rows 4 to 7 change places, as bit 7 of an address goes into bit 4
        box[4:] = np.roll(box[4:], 4, axis=1)
    np.testing.assert_array_equal(out, box)
