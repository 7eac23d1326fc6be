"""Blocks that nobody chose: by the model of the target; they never change a result."""

from __future__ import annotations

import importlib.util
import itertools
import math
import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from bench.plain_kernels import CASES, Case
from tests import seeds
from tests.lower.library import CASES as CASES_OF
from tests.lower.library import NAMES, family
from tilekern import testing
from tilekern.blocks import by_speed, good_blocks, model_of, tiling
from tilekern.blocks.choose import Blocks
from tilekern.ir.control import Fold
from tilekern.ir.core import Func
from tilekern.kernel.composite import called
from tilekern.lower.target import BACKENDS, resolve
from tilekern.testing.programs.batches import sample

needs_llvm = pytest.mark.skipif(importlib.util.find_spec("llvmlite") is None, reason="needs llvmlite")
S = jax.ShapeDtypeStruct
TARGETS = ("cpu:xla", "cuda:sm_80", "cuda:sm_90", "cuda:sm_100", "rocm:gfx942", "tpu:v5e", "tpu:v6e")


def seconds(func: Func, target: str = "cpu:xla") -> float:
    """The estimated seconds of a Func on a target."""
    model = model_of(resolve(target))
    assert model is not None
    return float(model(tiling(func)))


def traced(case: Case, **blocks: int) -> Func:
    return case.kernel.trace(*case.arguments, **blocks).ir


def blocks_of(func: Func) -> tuple[int, ...]:
    return tuple(axis.block for axis in func.axes)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_evaluation_has_the_seconds_of_every_choice_of_blocks(case: Case) -> None:
    start = dict.fromkeys(case.kernel.signature.blocks, 128)
    others = [traced(case, **dict.fromkeys(start, size)) for size in (128, 32, 512)]
    for target in TARGETS:
        model = model_of(resolve(target))
        assert model is not None
        chosen = next(by_speed(lambda blocks: [traced(case, **blocks)], start, list(start), model))
        assert chosen.keys() == start.keys()
        # The numbers of the trace with these blocks, and not those that were derived from the traces of the start.
        best = seconds(traced(case, **chosen), target)
        assert all(best <= 1.1 * seconds(other, target) for other in others), target


def test_a_row_that_a_program_holds_whole_gets_few_rows() -> None:
    @tk.kernel(out_type=lambda x: x)
    def softmax(x, out, *, rows: tk.Block):
        i = tk.parallel(x.shape[0], rows)
        out[i, :] = jax.nn.softmax(x[i, :], axis=1)

    wide, narrow = S((64, 50257), jnp.float32), S((65536, 16), jnp.float32)
    assert blocks_of(softmax.trace(wide).ir)[0] <= 4 < 16 <= blocks_of(softmax.trace(narrow).ir)[0]


@pytest.mark.parametrize("target", ["cpu:llvm", "tpu:v5e"])
def test_a_causal_loop_gets_blocks_that_leave_out_tiles(target: str) -> None:
    @tk.kernel(out_type=lambda x: x)
    def causal(x, out, *, queries: tk.Block = 128, keys: tk.Block = 128):
        i = tk.parallel(x.shape[0], queries)

        def step(j: tk.Tile, total: jax.Array) -> jax.Array:
            earlier = i.indices[:, None] >= j.indices[None, :]
            return total + tk.dot(jnp.where(earlier, tk.dot(x[i, :], x[j, :].T), 0), x[j, :])

        visited = tk.serial(x.shape[0], keys, stop=i.start + queries)
        out[i, :] = tk.fold(visited, step, tk.zeros((i, x.shape[1])))

    def programs(blocks: Blocks) -> list[Func]:
        return [causal.trace(S((1024, 128), jnp.float32), **blocks).ir]

    def seconds_of(queries: int, keys: int) -> float:
        return seconds(programs({"queries": queries, "keys": keys})[0], target)

    model = model_of(resolve(target))
    assert model is not None
    start = {"queries": 128, "keys": 128}
    chosen = next(by_speed(programs, start, list(start), model))
    sizes = [32, 64, 128, 256, 512, 1024]
    assert seconds_of(**chosen) <= 1.05 * min(seconds_of(*pair) for pair in itertools.product(sizes, repeat=2))


def test_a_block_is_no_longer_than_its_axis_needs() -> None:
    @tk.kernel(out_type=lambda x: x)
    def double(x, out, *, rows: tk.Block, columns: tk.Block):
        i, j = tk.parallel(x.shape[0], rows), tk.parallel(x.shape[1], columns)
        out[i, j] = 2 * x[i, j]

    assert blocks_of(double.trace(S((100000, 24), jnp.float32)).ir)[1] <= 32


@needs_llvm
def test_a_default_stays_unless_other_blocks_are_far_faster() -> None:
    @tk.kernel(out_type=lambda x: x)
    def softmax(x, out, *, rows: tk.Block = 128):
        i = tk.parallel(x.shape[0], rows)
        out[i, :] = jax.nn.softmax(x[i, :], axis=1)

    def rows(shape: tuple[int, int], **blocks: Any) -> int:
        return blocks_of(softmax.trace(S(shape, jnp.float32), target="cpu:llvm", **blocks).ir)[0]

    assert rows((64, 50257)) < 16  # a program would hold 25 MB
    assert rows((64, 50257), rows=32) == 32  # the call's own
    assert rows((256, 256)) == 128  # nothing to gain
    softmax.schedule("cpu")(lambda x: {"rows": 64})
    jax.clear_caches()
    assert rows((65, 50257)) == 64


@needs_llvm
def test_blocks_that_a_body_does_not_take_are_not_chosen() -> None:
    @tk.kernel(out_type=lambda x: x)
    def softmax(x, out, *, rows: tk.Block = 96):
        if rows % 3:
            raise ValueError("rows in threes")
        i = tk.parallel(x.shape[0], rows)
        out[i, :] = jax.nn.softmax(x[i, :], axis=1)

    traced = softmax.trace(S((96, 50257), jnp.float32), target="cpu:llvm")
    assert blocks_of(traced.ir)[0] % 3 == 0


def test_bodies_that_change_with_their_blocks_keep_their_start() -> None:
    @tk.kernel(out_type=lambda x: x)
    def f(x, out, *, block: tk.Block):
        i, tile = tk.parallel(x.shape[0], block), 0
        for _ in range(block // 16):
            tile = tile + x[i]
        out[i] = tile

    assert blocks_of(f.trace(S((1 << 20,), jnp.float32)).ir) == (64,)


def test_a_block_for_a_chunk_of_an_axis_follows_the_axis() -> None:
    @tk.kernel(out_type=lambda x: S((math.ceil(x.shape[0] / 16),), x.dtype))
    def f(x, out, *, chunks: tk.Block):
        i = tk.parallel(out.shape[0], chunks)
        out[i] = x[i * 16].reshape(chunks, 16).sum(axis=1)

    x = np.arange(1600, dtype=np.float32)
    np.testing.assert_array_equal(f(x), x.reshape(100, 16).sum(axis=1))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blocks_never_change_results(case: Case) -> None:
    small = tuple(S(tuple(min(n, 40) for n in t.shape), t.dtype) for t in case.arguments)
    random = np.random.default_rng(0)

    def array(type_: Any) -> Any:
        if jnp.issubdtype(type_.dtype, jnp.integer):
            return jnp.asarray(random.integers(0, 40, type_.shape), type_.dtype)
        return jnp.asarray(random.standard_normal(type_.shape), type_.dtype)

    arrays = [array(type_) for type_ in small]
    sizes = [dict(zip(case.kernel.signature.blocks, row, strict=False)) for row in ((1, 64, 8), (8, 5, 3), (64, 16, 1))]
    results = [case.kernel(*arrays, **blocks) for blocks in (*sizes, {})]
    first = np.asarray(results[0])
    if jnp.issubdtype(first.dtype, jnp.integer):
        for result in results[1:]:
            np.testing.assert_array_equal(result, first)
        return
    wide = [x if jnp.issubdtype(x.dtype, jnp.integer) else x.astype(jnp.float32) for x in arrays]
    oracle = np.asarray(case.kernel(*wide, **sizes[0]), np.float64)
    for result in results:
        testing.assert_close(result, oracle, first, length=40)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("target", TARGETS[1:])
def test_no_target_refuses_a_default_or_warns_that_it_is_large(case: Case, target: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", tk.errors.LargeProgramWarning)
        assert case.kernel.trace(*case.arguments, target=target).lower(target).text


def test_a_target_that_refuses_a_default_does_not_get_it() -> None:
    case = next(case for case in CASES if case.name.startswith("softmax_of_rows-64x50257"))
    with pytest.raises(tk.errors.TargetError, match="too large for Triton"):
        case.kernel.trace(*case.arguments, target="cuda:sm_90", rows=128).lower("cuda:sm_90")
    assert blocks_of(case.kernel.trace(*case.arguments, target="cuda:sm_90").ir)[0] < 16


@pytest.mark.parametrize("target", TARGETS)
def test_a_block_needs_no_default(target: str) -> None:
    @tk.kernel(out_type=lambda x: x)
    def softmax(x, out, *, rows: tk.Block):
        i = tk.parallel(x.shape[0], rows)
        out[i, :] = jax.nn.softmax(x[i, :], axis=1)

    wide, narrow = (softmax.trace(S(shape, jnp.float32), target=target) for shape in ((64, 50257), (65536, 16)))
    # By estimates of compiled programs, 8 and 16 wide rows take as long on TPUs, and 4 take three times as long.
    of_wide, of_narrow = blocks_of(wide.ir)[0], blocks_of(narrow.ir)[0]
    assert of_wide <= 16 and 8 * of_wide <= of_narrow
    assert wide.lower(target).text


def test_choices_that_the_target_refuses_are_passed_over() -> None:
    case, refused = CASES[0], list[int]()

    def refuses(settings: Blocks, large: bool = False, /) -> bool:
        refused.append(settings["block"])
        return len(refused) < 4

    def programs(settings: Blocks) -> list[Func]:
        return [traced(case, **settings)]

    sizes = good_blocks(programs, refuses, resolve("tpu:v6e"), {"block": 128}, ["block"], replaceable=True)
    assert sizes["block"] == refused[3] and len(set(refused)) == 4


def _product(x, w, out, *, rows: tk.Block, columns: tk.Block, inner: tk.Block):
    i, j = tk.parallel(x.shape[0], rows), tk.parallel(w.shape[1], columns)
    k = tk.serial(x.shape[1], inner)
    acc = tk.fold(k, lambda k, acc: acc + tk.dot(x[i, k], w[k, j]), tk.zeros((i, j), jnp.float32))
    out[i, j] = acc.astype(out.dtype)


def _new_product() -> Any:
    return tk.kernel(out_type=lambda x, w: S((x.shape[0], w.shape[1]), x.dtype))(_product)


_FACTORS = S((512, 2048), jnp.bfloat16), S((2048, 512), jnp.bfloat16)


def _programs(function: Any, target: str, *types: Any) -> dict[str, Func]:
    """The Funcs that a function of arrays of the types runs on a target, by name."""
    resolved = resolve(target)
    return {kernel.name: kernel.func(resolved) for kernel, _ in called(jax.make_jaxpr(function)(*types), resolved)}


def _gradient(kernel: Any, target: str, **blocks: Any) -> Any:
    """The gradient of the sum of a kernel's results by all arguments."""

    def total(*arrays: Any) -> jax.Array:
        return jnp.sum(kernel(*arrays, target=target, **blocks).astype(jnp.float32))

    return lambda *arrays: jax.grad(total, tuple(range(len(arrays))))(*arrays)


def test_a_derived_gradient_has_blocks_of_its_own() -> None:
    x, w, target, product = *_FACTORS, "cuda:sm_90", _new_product()
    model = model_of(resolve(target))
    assert model is not None
    programs = _programs(_gradient(product, target), target, x, w)
    forward = dict(zip(("rows", "columns", "inner"), _blocks_with_loop(programs["_product"]), strict=True))
    stated = _programs(_gradient(product, target, **forward), target, x, w)
    assert blocks_of(stated["_product"]) == blocks_of(programs["_product"])
    gradients = [{n: f for n, f in funcs.items() if n != "_product"} for funcs in (programs, stated)]
    own, of_forward = (sum(float(model(tiling(f))) for f in funcs.values()) for funcs in gradients)
    assert 1.5 * own <= of_forward


def _blocks_with_loop(func: Func) -> tuple[int, ...]:
    """The blocks of the grid, then that of the only fold."""
    (fold,) = (op for op in func.walk() if isinstance(op, Fold))
    return (*blocks_of(func), fold.axis.block)


def test_blocks_of_a_call_serve_its_gradient() -> None:
    blocks = {"rows": 64, "columns": 32, "inner": 512}
    programs = _programs(_gradient(_new_product(), "cuda:sm_90", **blocks), "cuda:sm_90", *_FACTORS)
    # Each stage has the program's rows or columns along its grid.
    assert {size for func in programs.values() for size in blocks_of(func)} <= set(blocks.values())


def test_a_schedule_serves_the_gradient_of_its_kernel() -> None:
    product = _new_product()
    product.schedule("cuda")(lambda x, w: {"rows": 64, "columns": 32, "inner": 512})
    programs = _programs(_gradient(product, "cuda:sm_90"), "cuda:sm_90", *_FACTORS)
    assert {size for func in programs.values() for size in blocks_of(func)} <= {64, 32, 512}


def test_an_error_of_the_model_is_no_error_of_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(of: Any) -> float:
        raise ZeroDivisionError("in the model")

    def choose(raises: bool) -> Any:
        def programs(settings: Blocks) -> list[Func]:
            if raises:
                raise ValueError("in the body")
            return [traced(CASES[0], **settings)]

        return good_blocks(
            programs, lambda settings, large=False: False, resolve("tpu:v6e"), {}, ["block"], replaceable=True
        )

    monkeypatch.setattr(importlib.import_module("tilekern.blocks.good_blocks"), "model_of", lambda target: model)
    assert choose(raises=True) == {"block": 64}
    with pytest.raises(ZeroDivisionError, match="in the model"):
        choose(raises=False)


def test_tiles_are_as_long_as_their_axis_only_where_the_backend_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def columns() -> int:
        def programs(blocks: Blocks) -> list[Func]:
            return [double.trace(x, **blocks).ir]

        free = ["rows", "columns"]
        return good_blocks(programs, lambda settings, large=False: False, target, {}, free, replaceable=True)["columns"]

    @tk.kernel(out_type=lambda x: x)
    def double(x, out, *, rows: tk.Block, columns: tk.Block):
        i, j = tk.parallel(x.shape[0], rows), tk.parallel(x.shape[1], columns)
        out[i, j] = 2 * x[i, j]

    x, target = S((100_000, 72), jnp.float32), resolve("cpu:llvm")
    assert columns() == 72
    monkeypatch.setitem(BACKENDS, "llvm", replace(BACKENDS["llvm"], takes_extents=False))
    assert columns() == 128


@pytest.mark.parametrize("chunk", range(4))
def test_every_program_takes_a_time(chunk: int) -> None:
    with jax.enable_x64(True):
        for seed in seeds.of_chunk(chunk, 75):
            func = sample(seed)[0].func
            least = 0 if 0 in func.grid else 1e-9  # seconds; without programs there may be none
            assert all(least <= seconds(func, target) < math.inf for target in TARGETS), f"sample({seed})"


def test_kernels_of_the_library_take_a_time_on_every_target() -> None:
    for name in NAMES:
        func = family(name, CASES_OF[name][0].name, "float32").func()
        assert all(0 < seconds(func, target) < math.inf for target in TARGETS), name


def test_ops_with_several_results_count() -> None:
    @tk.kernel(out_type=lambda x: (S((x.shape[0], 8), x.dtype), S((x.shape[0], 8), jnp.int32)))
    def largest(x, values, places, *, rows: tk.Block):
        i = tk.parallel(x.shape[0], rows)
        values[i, :], places[i, :] = jax.lax.top_k(x[i, :], 8)

    x = np.random.default_rng(0).permutation(6400).reshape(100, 64).astype(np.float32)
    assert blocks_of(largest.trace(S((100000, 64), jnp.float32)).ir)[0] > 1
    np.testing.assert_array_equal(largest(x)[1], np.argsort(-x, axis=1)[:, :8])


def test_rows_that_are_too_long_for_any_target_get_the_fewest_at_once() -> None:
    """A row of 200,000 spills registers however few rows a program has, and Triton takes no tile of 64 of them."""

    @tk.kernel(out_type=lambda x: x)
    def softmax(x, out, *, rows: tk.Block):
        i = tk.parallel(x.shape[0], rows)
        out[i, :] = jax.nn.softmax(x[i, :], axis=1)

    @tk.kernel(out_type=lambda x: x)
    def by_default(x, out, *, rows: tk.Block = 128):
        i = tk.parallel(x.shape[0], rows)
        out[i, :] = jax.nn.softmax(x[i, :], axis=1)

    for kernel in (softmax, by_default):
        traced = kernel.trace(S((64, 200_000), jnp.float32), target="cuda:sm_90")
        assert blocks_of(traced.ir)[0] == 1
        with pytest.warns(tk.errors.LargeProgramWarning, match="registers of each thread"):
            traced.lower("cuda:sm_90")
