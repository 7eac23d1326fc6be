"""Programs for clusters of two thread blocks compute what their Funcs mean, and their machine code shares loads."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

import tilekern as tk
from tests.lower.triton.gluon.samples import (
    SM_90,
    assert_computes,
    attention,
    fused,
    gradient,
    inputs,
    like,
    needs_clusters,
    product,
    program,
)
from tilekern.errors import InterpreterError, TargetError
from tilekern.ir.core import Func
from tilekern.kernels.matmul.kernel import matmul
from tilekern.lower.triton.compile import toolchain
from tilekern.lower.triton.compile.compile_program import compile_program
from tilekern.lower.triton.compile.resources import measure
from tilekern.lower.triton.gluon.simulator.run import simulate
from tilekern.lower.triton.program import Program


@pytest.fixture(autouse=True)
def any_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are emitted and simulated, whatever Triton is installed."""
    monkeypatch.setattr(toolchain, "has_clusters", lambda: True)


FUNCS: dict[str, Any] = {
    "product": lambda: product(300, 200, 136, tall=True),
    "product of one tile": lambda: product(64, 64, 64, tall=True),
    "product of both transposed": lambda: product(136, 200, 136, tall=True, transpose_lhs=True, transpose_rhs=True),
    "product of halves": lambda: product(72, 136, 64, dtype="float16", tall=True),
    "epilogue with a bias": lambda: fused(136, 72, 136, 1, 136, tall=True),
    "epilogue with a residual": lambda: fused(136, 72, 136, 136, 136, tall=True),
    "epilogue with a scale of rows": lambda: fused(136, 72, 136, 136, 1, tall=True),
    "attention": lambda: attention(200, heads=2, groups=2, tall=True),
    "attention with groups of heads": lambda: attention(136, heads=6, groups=2, batch=2, tall=True),
    "causal attention": lambda: attention(330, causal=True, tall=True),
    "attention with segments": lambda: attention(200, heads=4, groups=2, batch=2, extras="segments", tall=True),
    "query gradient": lambda: gradient("query", 200, heads=4, groups=2, tall=True),
    "key gradient": lambda: gradient("key", 200, heads=2, groups=2, causal=True, tall=True),
}


@pytest.mark.parametrize("name", FUNCS)
def test_a_program_computes_what_its_func_means(name: str) -> None:
    """In several orders, on one cluster that takes several groups and on two."""
    func = FUNCS[name]()
    made = program(func, num_ctas=2, num_stages=2)
    assert made.cluster == 2 and "multicast=True" in made.text and "cluster.barrier()" in made.text
    assert_computes(made, func, seeds=(0, 1))
    assert_computes(made, func, blocks=1)


@pytest.mark.parametrize(("warps", "stages"), [(4, 2), (8, 1), (8, 3), (12, 2)])
def test_any_number_of_warpgroups_and_of_stages(warps: int, stages: int) -> None:
    func = FUNCS["product"]()
    assert_computes(program(func, num_ctas=2, num_warps=warps, num_stages=stages), func, seeds=range(2))


# --- synchronisation --------------------------------------------------------------------------------------------------

SYNCHRONISES = re.compile(
    r"(mbarrier\.(wait|arrive|expect)|fence_async_shared|tma\.store_wait|load_tile|cluster\.barrier)\("
)
SMALL: dict[str, Func] = {
    "product": product(300, 200, 72, tall=True),
    "attention": attention(330, causal=True, tall=True),
}


def made_of(name: str) -> Program:
    """The program of one of these Funcs, whatever Triton is installed: tests are collected by it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "has_clusters", lambda: True)
        return program(SMALL[name], num_ctas=2, num_stages=2)


def statements(name: str) -> list[int]:
    """The numbers of the lines that synchronise.

    As in simulator/test_run.py without those whose lack shows in some orders only, and without waits that only keep the
    order of the assembler's instructions.
    """
    lines = made_of(name).text.splitlines()
    found = [n for n, line in enumerate(lines) if SYNCHRONISES.match(line.strip())]
    return [
        n
        for n in found
        if "wait(turns" not in lines[n]
        and "last_of_all" not in "".join(lines[n - 11 : n])
        and not ("wait" in lines[n] and "warpgroup_mma_wait(0" in "".join(lines[n + 1 : n + 3]))
    ]


def outcome(made: Program, name: str) -> str:
    """The error of the simulator, in words; "" if there is none."""
    for seed in range(3):
        try:
            simulate(made, inputs(SMALL[name]), seed=seed, blocks=1)
        except InterpreterError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(("name", "number"), [(name, number) for name in SMALL for number in statements(name)])
def test_no_statement_that_synchronises_can_go(name: str, number: int) -> None:
    made = made_of(name)
    lines = made.text.splitlines()
    without = re.sub(r"\S.*", "pass", lines[number])
    found = outcome(replace(made, text="\n".join([*lines[:number], without, *lines[number + 1 :]])), name)
    assert found, lines[number]


def test_the_program_as_it_is_has_no_fault() -> None:
    assert not any(outcome(made_of(name), name) for name in SMALL)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("released.index(slot), phase ^ 1)", "released.index(slot), phase)"),
        ("lhs_rhs_released.index(place), count=2", "lhs_rhs_released.index(place), count=1"),
        ("[2, 1], mbarrier.MBarrierLayout([[0]])", "[2, 2], mbarrier.MBarrierLayout([[1]])"),
        ("mbarrier.expect(lhs_rhs_filled.index(slot), 24576)", "mbarrier.expect(lhs_rhs_filled.index(slot), 40960)"),
    ],
)
def test_wrong_barriers_of_clusters_are_found(old: str, new: str) -> None:
    made = made_of("product")
    assert old in made.text
    assert outcome(replace(made, text=made.text.replace(old, new)), "product")


def test_the_end_of_a_role_is_no_place_to_meet() -> None:
    made = made_of("product")
    inside = made.text.replace("    tma.store_wait(0)\n\n", "    tma.store_wait(0)\n    cluster.barrier()\n\n")
    assert inside != made.text and "outside of roles" in outcome(replace(made, text=inside), "product")


# --- refusals ---------------------------------------------------------------------------------------------------------


@tk.kernel(out_type=lambda x, w: like(x.shape[0], w.shape[1]))
def of_itself(x, w, y):
    """A product of tiles with the tiles of the same array, one of which is both sides."""
    i, j = tk.parallel(x.shape[0], 128), tk.parallel(w.shape[1], 128)
    acc = tk.fold(
        tk.serial(x.shape[1], 128),
        lambda k, acc: tk.dot(tile := x[i, k], tile, acc) + tk.dot(tile, w[k, j]),
        tk.zeros((i, j)),
    )
    y[i, j] = acc.astype(y.dtype)


@tk.kernel(out_type=lambda x, w: (like(x.shape[0], w.shape[1]), like(tk.cdiv(x.shape[0], 128), w.shape[1])))
def column_sums(x, w, y, sums):
    """A product, and the sums of its columns in each tile."""
    i, j = tk.parallel(x.shape[0], 128), tk.parallel(w.shape[1], 64)
    acc = tk.fold(tk.serial(x.shape[1], 64), lambda k, acc: tk.dot(x[i, k], w[k, j], acc), tk.zeros((i, j)))
    y[i, j] = acc.astype(y.dtype)
    sums[i.index, j] = acc.sum(0).astype(sums.dtype)


@tk.kernel(out_type=lambda x, w: like(x.shape[0], w.shape[1]))
def cast(x, w, y):
    """A product with weights of 8 bits."""
    i, j = tk.parallel(x.shape[0], 128), tk.parallel(w.shape[1], 64)
    axis = tk.serial(x.shape[1], 64)
    y[i, j] = tk.fold(axis, lambda k, acc: tk.dot(x[i, k], w[k, j].astype(x.dtype), acc), tk.zeros((i, j))).astype(
        y.dtype
    )


REFUSED: dict[str, tuple[Any, str, int]] = {
    "a size": (lambda: product(128, 64, 64, tall=True), "num_ctas = 1 or 2", 4),
    "both sides": (lambda: of_itself.trace(like(128, 128), like(128, 128)).ir, "tiles for one side", 2),
    "casts": (lambda: cast.trace(like(128, 128), like(128, 64, dtype=jnp.int8)).ir, "a load without a mask", 2),
    "sums of columns": (lambda: column_sums.trace(like(128, 128), like(128, 64)).ir, "reductions of single rows", 2),
    "lengths": (lambda: attention(200, batch=2, extras="lengths", tall=True), "a load without a mask", 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_clusters_do_not_take_is_refused(name: str) -> None:
    func, expected, blocks = REFUSED[name]
    with pytest.raises(TargetError, match=re.escape(expected)) as info:
        program(func(), num_ctas=blocks)
    assert info.value.loc is not None and "num_ctas" in str(info.value)


def test_few_rows_stay_on_one_thread_block() -> None:
    """A call may give smaller blocks than the schedule that asks for clusters."""
    assert program(product(128, 64, 64), num_ctas=2) == program(product(128, 64, 64))
    made = matmul.trace(like(4096, 4096), like(4096, 4096), block_m=64).lower("cuda:sm_90", emitter="gluon")
    assert "multicast" not in made.text


def test_the_schedule_takes_clusters_where_waves_allow() -> None:
    large = matmul.trace(like(8192, 8192), like(8192, 8192)).lower("cuda:sm_90", emitter="gluon")
    assert "multicast=True" in large.text and "66 clusters of 2 thread blocks" in large.plan
    few = matmul.trace(like(128, 8192), like(8192, 8192)).lower("cuda:sm_90", emitter="gluon")
    assert "multicast=True" not in few.text
    assert tk.device("cuda:sm_90").cluster == 1 and tk.device("cuda:sm_90+gluon").cluster == 2


def test_a_triton_without_multicast_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "has_clusters", lambda: False)
    with pytest.raises(TargetError, match=r"triton >= 3\.9") as info:
        program(product(128, 64, 64, tall=True), num_ctas=2)
    assert "num_ctas" in info.value.fix


# --- machine code -----------------------------------------------------------------------------------------------------


@needs_clusters
@pytest.mark.parametrize("name", ["epilogue with a residual", "attention with groups of heads", "key gradient"])
def test_machine_code_copies_to_all(name: str) -> None:
    """Copies by multicast, arrivals at the other thread block; all threads of a cluster meet outside of roles only."""
    pytest.importorskip("triton", reason="needs triton")
    made = program(FUNCS[name](), num_ctas=2)
    binary = compile_program(made, SM_90)
    resources = measure(binary, SM_90)
    assert binary.num_ctas == 2 and resources.spills == 0 and resources.serialized is False
    assert "UTMALDG.2D.MULTICAST" in binary.sass or "UTMALDG.4D.MULTICAST" in binary.sass
    assert re.search(r"mbarrier\.arrive\.shared::cluster", binary.text("ptx"))
    entry = made.text.splitlines().index(f"def {made.name}({', '.join(a.name for a in made.arguments)}):")
    meetings = re.findall(r"inlined_at 1 (\d+)(?:(?!\.loc).)*?barrier\.cluster", binary.text("ptx"), re.DOTALL)
    assert meetings and all(int(line) > entry for line in meetings), meetings
