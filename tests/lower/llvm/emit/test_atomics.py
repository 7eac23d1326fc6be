"""Updates in private copies of the tasks, which are merged under a lock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.lower.llvm.machines import here
from tests.lower.llvm.running import Canaries, run
from tilekern.ir.core import Func
from tilekern.ir.parse import parse
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.llvm.plan.task_partition import partition_tasks

pytest.importorskip("llvmlite", reason="needs llvmlite")

LANES, PLACES = 512, 37
FUNCTIONS = {"add": np.add, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or}


def scatter(kind: str, dtype: str) -> Func:
    """Each lane updates an element of a donated array, at a place of its own."""
    return parse(f"""
func @scatter(%o: ref<{dtype}[{PLACES}], inout>, %n: ref<i32[{LANES}], in>, %x: ref<{dtype}[{LANES}], in>) {{
  grid %i in i[{LANES} by 64]
  %0 = load %n[64*%i +: 64!] : i32[64]
  %1 = load %x[64*%i +: 64!] : {dtype}[64]
  atomic %1 to %o[gather(%0, 64)] {{kind="{kind}"}}
}}""")


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["i32", "u32", "i16", "u8", "i64"])
def test_private_copies_begin_with_the_identity_of_the_dtype(kind: str, dtype: str) -> None:
    """Numbers of one sign, on either side of 0: a copy that begins with another number, or is signed, changes some."""
    func = scatter(kind, dtype)
    start, n, x = (p.ref for p in func.inputs)
    assert [copy.kind for copy in partition_tasks(func).private] == [kind]
    random, info = np.random.default_rng(0), np.iinfo(x.dtype)
    where = random.integers(0, PLACES, n.shape).astype(np.int32)
    for low, high in ((info.min, info.min + 100), (info.max - 100, info.max), (1, 100)):
        before, values = (random.integers(low, high, r.shape, x.dtype, endpoint=True) for r in (start, x))
        wanted: Any = before.copy()
        FUNCTIONS[kind].at(wanted, where, values)
        for machine in (None, *here()):
            (found,) = run(LlvmLowering(func, machine), [before, where, values], Canaries())
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", ["max", "min"])
def test_extremes_of_unsigned_integers_by_atomic_instructions(kind: str) -> None:
    """Few updates of an element have no private copy."""
    func = parse(f"""
func @scatter(%o: ref<u32[64], inout>, %n: ref<i32[64], in>, %x: ref<u32[64], in>) {{
  grid %i in i[64 by 8]
  %0 = load %n[8*%i +: 8!] : i32[8]
  %1 = load %x[8*%i +: 8!] : u32[8]
  atomic %1 to %o[gather(%0, 8)] {{kind="{kind}"}}
}}""")
    assert not partition_tasks(func).private
    where = np.arange(64, dtype=np.int32)[::-1].copy()
    before, values = np.full(64, 1 << 30, np.uint32), np.where(where % 2, 5, 3 << 30).astype(np.uint32)
    wanted = before.copy()
    FUNCTIONS[kind].at(wanted, where, values)
    for machine in (None, *here()):
        (found,) = run(LlvmLowering(func, machine), [before, where, values])
        np.testing.assert_array_equal(found, wanted)


def test_one_task_at_a_time_merges_its_copy() -> None:
    """Races are rare: the text shows that the lock is taken by an exchange for 1, and let go behind the merge."""
    text = LlvmLowering(scatter("add", "i32")).text
    taken = text.index("atomicrmw xchg ptr @lock, i32 1 acquire")
    let_go = text.index("store atomic i32 0, ptr @lock release")
    assert taken < let_go and text.count("atomicrmw") == 1
    waits = text[taken:let_go]
    assert "icmp eq i32" in waits and "sched_yield" in waits
