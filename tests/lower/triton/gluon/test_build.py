"""Warp-specialised programs compute what their Funcs mean, in any order of their roles, without races or deadlocks."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilekern as tk
from tests.lower.triton.gluon.samples import (
    SM_90,
    assert_computes,
    attention,
    backwards,
    expected,
    extras_of,
    fused,
    gradient,
    grouped_product,
    inputs,
    like,
    limited,
    lower_backwards,
    lower_limited,
    product,
    program,
    scaled_product,
)
from tests.lower.triton.running import assert_neat
from tilekern.ir.core import Func
from tilekern.lower.triton.compile.compile_program import compile_program
from tilekern.lower.triton.compile.resources import measure
from tilekern.lower.triton.gluon import delays
from tilekern.lower.triton.gluon.groups import REGISTERS
from tilekern.lower.triton.gluon.rotation import rotations
from tilekern.lower.triton.gluon.simulator.run import simulate

FUNCS: dict[str, Any] = {
    "product": lambda: product(200, 136, 136),
    "product of one tile": lambda: product(64, 64, 64),
    "product of both transposed": lambda: product(136, 200, 136, transpose_lhs=True, transpose_rhs=True),
    "product of halves": lambda: product(72, 136, 64, dtype="float16"),
    "product from the end": lambda: backwards.trace(like(72, 200), like(200, 64)).ir,
    "epilogue with a bias": lambda: fused(136, 72, 136, 1, 136),
    "epilogue with a residual": lambda: fused(136, 72, 136, 136, 136),
    "epilogue with a scale of rows": lambda: fused(136, 72, 136, 136, 1),
    "attention": lambda: attention(200, heads=2, groups=2),
    "attention with groups of heads": lambda: attention(136, heads=6, groups=2, batch=2),
    "causal attention": lambda: attention(330, causal=True),
    "causal attention of wide tiles": lambda: attention(330, causal=True, block_k=128),
    "attention with a window": lambda: attention(330, window=(100, 30)),
    "attention of halves": lambda: attention(136, causal=True, dtype="float16"),
    "query gradient": lambda: gradient("query", 200, heads=4, groups=2),
    "causal query gradient": lambda: gradient("query", 200, causal=True),
    "key gradient": lambda: gradient("key", 200, heads=2, groups=2),
    "key gradient with groups of heads": lambda: gradient("key", 136, heads=4, groups=2),
    "causal key gradient": lambda: gradient("key", 200, causal=True),
    "attention with lengths": lambda: attention(200, heads=4, groups=2, batch=2, extras="lengths"),
    "causal attention with lengths": lambda: attention(330, heads=2, batch=2, causal=True, extras="lengths"),
    "attention with segments": lambda: attention(200, heads=4, groups=2, batch=2, extras="segments"),
    "attention with sinks": lambda: attention(136, heads=4, groups=2, batch=2, causal=True, extras="sinks"),
    "attention with a softcap": lambda: attention(136, heads=2, softcap=3.0),
    "attention with a distant window": lambda: attention(330, window=(-70, 140)),
    "query gradient with lengths": lambda: gradient("query", 200, batch=2, extras="lengths"),
    "query gradient with segments": lambda: gradient("query", 200, batch=2, extras="segments"),
    "query gradient with a window": lambda: gradient("query", 330, window=(100, 30)),
    "key gradient with lengths": lambda: gradient("key", 200, heads=4, groups=2, batch=2, extras="lengths"),
    "key gradient with segments": lambda: gradient("key", 200, heads=2, batch=2, extras="key segments"),
    "key gradient with a window": lambda: gradient("key", 330, window=(100, 30)),
    "key gradient with a softcap": lambda: gradient("key", 136, softcap=3.0),
    "a product up to a row": lambda: limited.trace(like(200, 200), like(200, 72), like(1, dtype=np.int32)).ir,
    "a triangle from its diagonal back": lambda: lower_backwards.trace(like(200, 200), like(200, 200)).ir,
    "a triangle up to a row": lambda: (
        lower_limited.trace(like(200, 64), like(200, 64), like(200, 72), like(1, dtype=np.int32)).ir
    ),
    "a grouped product": lambda: grouped_product(200, 136, 136, 5),
    "a grouped product of wide tiles": lambda: grouped_product(200, 136, 256, 5, block_n=128),
    "a product of 8-bit floats": lambda: product(136, 144, 144, dtype="float8_e4m3fn"),
    "a grouped product of integers": lambda: scaled_product(("bfloat16", "int8")),
    "a grouped product of transposed integers": lambda: scaled_product(("bfloat16", "int8"), transposed=True),
    "a grouped product of 8-bit floats": lambda: scaled_product(("float8_e4m3fn", "float8_e4m3fn"), columns=128),
    "a grouped product with scales by block": lambda: scaled_product(("float8_e5m2", "float8_e5m2"), (4, 2)),
    "attention of wide heads": lambda: attention(136, width=256, causal=True),
}


# Each alone finds a fault of tests/mutants: in a loop that runs backwards, and in a mask of rows by lengths.
_ALWAYS = ("a triangle from its diagonal back", "attention with lengths")
assert {*_ALWAYS} <= FUNCS.keys()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.always] * (n in _ALWAYS)) for n in FUNCS])
def test_a_program_computes_what_its_func_means(name: str) -> None:
    func = FUNCS[name]()
    made = program(func)
    assert_neat(made)
    assert_computes(made, func, seeds=(0, 1))


def test_rows_behind_a_length_would_leak() -> None:
    func = attention(200, batch=2, extras="lengths")
    made = program(func)
    leaky = replace(made, text=re.sub(r"keep_rows\(value.*", "pass", made.text))
    (wanted, *_), (got, *_) = expected(func), simulate(leaky, inputs(func))
    assert np.isfinite(wanted.astype(np.float32)).all() and np.isnan(got.astype(np.float32)).any()


def test_one_of_two_sums_may_be_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of the other one is waited for in its own iteration, which Gluon's types demand."""
    monkeypatch.setattr(delays, "rotations", lambda op: [r for r in rotations(op) if len(r.numbers) == 1])
    func = gradient("key", 192)
    made = program(func)
    assert "slot_before" in made.text
    assert_computes(made, func)
    loops = re.split(r"\n +for ", made.text[made.text.index("_compute(") :])
    for loop in (text for text in loops if "warpgroup_mma(" in text):
        assert re.findall(r"warpgroup_mma_wait\((\d)", loop)[-1] == "0"


@pytest.mark.parametrize("warps", [4, 8, 12])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", ["product", "causal attention"])
def test_any_number_of_warpgroups_and_of_stages(name: str, warps: int, stages: int) -> None:
    func = FUNCS[name]()
    assert_computes(program(func, num_warps=warps, num_stages=stages), func, seeds=(2,))


@pytest.mark.parametrize("tiles", range(1, 10))
def test_loops_of_any_length(tiles: int) -> None:
    """Longer loops repeat: a ring of two places and its phases are as they were after four steps."""
    for func in (product(64, 64 * tiles, 64), attention(64 * tiles)):
        assert_computes(program(func, num_stages=2), func, seeds=(3,), blocks=1)


@pytest.mark.parametrize("blocks", [1, 3, 5])
def test_any_number_of_thread_blocks(blocks: int) -> None:
    for func in (product(200, 72, 328), attention(330, heads=2, groups=2, causal=True)):
        assert_computes(program(func), func, blocks=blocks)


def test_the_same_func_gives_the_same_text() -> None:
    made = program(product(200, 136, 136))
    assert made == program(product(200, 136, 136))
    assert made.language == "gluon" and made.group == 2
    assert {loc.line for loc in made.lines.values() if "matmul" in loc.file}


# --- machine code ---------------------------------------------------------------------------------------------------


def attention_of(width: int, causal: bool, extras: str = "", length: int = 4096, **config: Any) -> Func:
    """Attention of 4096 queries, with the blocks of its schedule."""
    from tilekern.kernels.flash_attention.arguments import Config
    from tilekern.kernels.flash_attention.kernel import flash_attention_forward

    x, arrays = like(2, length, 16, width), extras_of(extras, length, length)
    config = {"scale": 0.1, "causal": causal, **config}
    traced = flash_attention_forward.trace(x, x, x, arrays, config=Config(**config), return_logsumexp=True)
    return traced.lower("cuda:sm_90", emitter="gluon").ir


def large_product() -> Func:
    """A product of matrices of 8192, with the blocks of its schedule."""
    from tilekern.kernels.matmul.kernel import matmul

    return matmul.trace(like(8192, 8192), like(8192, 8192)).lower("cuda:sm_90", emitter="gluon").ir


COMPILED: dict[str, Any] = {"product": large_product, "attention": lambda: attention_of(128, False)}
MORE: dict[str, Any] = {
    f"{'causal' if causal else 'full'} attention of {width}": lambda width=width, causal=causal: attention_of(
        width, causal
    )
    for width, causal in ((64, False), (64, True), (128, True), (256, False))
} | {
    "attention of ragged tiles": lambda: attention_of(128, False, length=4000),
    "attention with lengths": lambda: attention_of(64, False, "lengths"),
    "attention with segments": lambda: attention_of(64, False, "segments"),
    "attention with a window": lambda: attention_of(128, True, window=(1024, None)),
    "attention with a softcap": lambda: attention_of(128, True, softcap=30.0),
}


@pytest.mark.parametrize("name", [*COMPILED, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
@pytest.mark.slow
def test_machine_code_is_as_planned(name: str) -> None:
    """No spills; no product waits for another (C7515); copies, and registers handed over, are there."""
    pytest.importorskip("triton", reason="needs triton")
    # The schedule of the product has tiles for two thread blocks that compute them together.
    made = program({**COMPILED, **MORE}[name](), num_warps=8, num_ctas=2 if name == "product" else 1)
    binary = compile_program(made, SM_90)
    resources = measure(binary, SM_90)
    assert resources.spills == 0 and resources.serialized is False and resources.threads == 384
    names = re.findall(r"\b(HGMMA|UTMALDG|UTMASTG|USETMAXREG)\b", binary.sass)
    assert {"HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"} <= set(names)
    assert_all_threads_arrive(binary.sass)
    if "attention" in name:
        assert_exponentials_beside_products(binary.sass)


def assert_all_threads_arrive(sass: str) -> None:
    """Assert that a warpgroup's threads meet before one of them arrives at a barrier for all.

    The simulator takes a role for one thread. In machine code four warps wait for products, each for itself.
    """
    kinds = {"HGMMA": "p", "WARPGROUP.DEPBAR": "w", "BAR.SYNC": "b", "SYNCS.ARRIVE.TRANS64.A1T0": "a"}
    found = re.findall(r"HGMMA|WARPGROUP\.DEPBAR|BAR\.SYNC|SYNCS\.ARRIVE\.TRANS64\.A1T0", sass)
    order = "".join(kinds[name] for name in found)
    assert "a" in order and not re.search("[pwa]a", order), order


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_warps_meet_around_a_tile_that_they_cast(dtype: str) -> None:
    """No warp stores where another one still multiplies, and none multiplies before all have stored."""
    pytest.importorskip("triton", reason="needs triton")
    made = program(scaled_product(("bfloat16", dtype), columns=128))
    binary = compile_program(made, SM_90)
    assert measure(binary, SM_90).spills == 0 and measure(binary, SM_90).serialized is False
    kinds = {"HGMMA": "p", "WARPGROUP.DEPBAR": "w", "BAR.SYNC": "b", "STS": "s"}
    order = "".join(kinds[x] for x in re.findall(r"HGMMA|WARPGROUP\.DEPBAR|BAR\.SYNC|STS", binary.sass))
    assert "sbp" in order and not re.search(r"[pw]s|sp", order), order
    assert_all_threads_arrive(binary.sass)


def assert_exponentials_beside_products(sass: str) -> None:
    """Assert that in each loop of products exponentials stand between the second product and the wait for it."""
    kinds = {"HGMMA": "p", "MUFU.EX2": "e", "WARPGROUP.DEPBAR": "w"}
    order = "".join(kinds[name] for name in re.findall(r"HGMMA|MUFU\.EX2|WARPGROUP\.DEPBAR", sass))
    # Both warpgroups have a loop: products, the wait for the first one, exponentials, the wait for the second one.
    assert len(re.findall(r"p{8,}we{30,}w", order)) == 2, order


def test_registers_are_handed_on_within_the_pool() -> None:
    """Roles get at most the registers that all threads had at the start; for more they would wait forever."""
    for count, (start, own, loading) in REGISTERS.items():
        assert count * own + loading <= (count + 1) * start
        assert (count + 1) * 128 * start <= SM_90.registers_per_core
        assert all(n % 8 == 0 and 24 <= n <= 256 for n in (start, own, loading))


def test_kernels_are_told_by_their_form() -> None:
    """A kernel of the user's own, of another name, in any order of arguments."""

    @tk.kernel(out_type=lambda w, bias, x: like(x.shape[0], w.shape[1]))
    def anything(w, bias, x, y):
        j, i = tk.parallel(w.shape[1], 64), tk.parallel(x.shape[0], 64)
        acc = tk.fold(tk.serial(x.shape[1], 64), lambda k, acc: tk.dot(x[i, k], w[k, j], acc), tk.zeros((i, j)))
        y[i, j] = (acc + bias[j].astype(acc.dtype)).astype(y.dtype)

    func = anything.trace(like(136, 72), like(72), like(72, 136)).ir
    assert_computes(program(func), func)
