"""Plans of warp-specialised programs: groups, channels, shared memory; and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tests.lower.triton.gluon.samples import SM_90, attention, like, product, program, scaled_product
from tilekern.errors import ResourceError, TargetError
from tilekern.ir.analysis import ranges
from tilekern.ir.core import Func
from tilekern.ir.types import BF16
from tilekern.kernels.matmul.kernel import matmul
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.gluon.build import build_gluon
from tilekern.lower.triton.gluon.plan import Plan, plan_group
from tilekern.lower.triton.legalize import legalize


def planned(func: Func, warps: int = 8, stages: int | None = None) -> Plan:
    """The plan of a Func."""
    legal = legalize(func, SM_90, num_warps=warps, delay=False)
    return plan_group(legal, SM_90, ranges.analyze(legal), warps, stages)


def test_a_product_shares_the_tile_that_is_the_same_for_neighbours() -> None:
    plan = planned(product(256, 256, 256))
    assert plan.group.axis == 0 and plan.group.count == 2 and plan.group.blocks == 2 * 4
    (channel,) = plan.unique
    assert [load.ref.name for load in channel.loads] == ["lhs", "rhs"] and channel.shared
    assert not plan.delayed and not plan.takes_turns


def test_attention_has_rings_of_keys_and_of_values() -> None:
    plan = planned(attention(512, causal=True))
    query, key, value = plan.unique
    assert (query.name, query.fold, query.shared) == ("query", None, False)
    assert key.shared and value.shared and key.fold is value.fold is not None
    assert key.readers.isdisjoint(value.readers)
    assert list(plan.delayed) == [key.fold] and plan.takes_turns


def test_heads_that_share_keys_are_neighbours() -> None:
    """Their loops are equally long; those of neighbouring tiles of queries are not."""
    plan = planned(attention(512, heads=4, groups=2, causal=True))
    assert plan.group.axes[plan.group.axis].name == "r"


def test_a_lone_program_is_a_group() -> None:
    assert planned(attention(64)).group.count == 1


def test_stages_are_as_many_as_fit() -> None:
    assert planned(product(256, 256, 256)).stages == 4
    assert planned(attention(512, width=256)).stages == 2
    assert planned(product(256, 256, 256), stages=7).stages == 7
    for func in (product(256, 256, 256), attention(512, width=256)):
        assert planned(func).shared_bytes <= SM_90.shared_bytes


def test_a_tile_that_is_cast_has_places_for_both_dtypes() -> None:
    """Two of the wide ones where a product runs beside the next cast; with scales by block the loop waits for it."""
    for blocks, places in (((1, 1), 2), ((4, 2), 1)):
        plan = planned(scaled_product(("bfloat16", "int8"), blocks))
        ((load, wide),) = plan.widened.items()
        assert (load.ref.name, wide.dtype, wide.places) == ("rhs", BF16, places)
        assert plan.shared_bytes == 4 * (8192 + 2 * 4096) + 2 * places * 8192 + 2 * 8192


def test_a_left_side_is_cast_in_registers() -> None:
    plan = planned(scaled_product(("float8_e4m3fn", "float8_e4m3fn")))
    assert [load.ref.name for load in plan.channels] == ["lhs", "rhs"]
    assert [load.ref.name for load in plan.widened] == ["rhs"]


def test_tiles_that_do_not_fit_are_refused_with_a_bill() -> None:
    with pytest.raises(ResourceError, match="do not fit the shared memory") as info:
        planned(product(256, 256, 256), stages=40)
    assert "40 places" in info.value.got


def test_tiles_that_do_not_fit_the_registers_are_refused() -> None:
    """128 rows of heads of 256 would take 256 registers of a thread for their sums alone."""
    func = matmul.trace(like(512, 256), like(256, 512), block_m=128, block_n=256, block_k=64).ir
    with pytest.raises(ResourceError, match="more registers") as info:
        planned(func)
    assert "num_warps = 4 or 8" in info.value.fix


# --- refusals -------------------------------------------------------------------------------------------------------


def kernel(body: Any, *arrays: Any, out: Any) -> Func:
    """The Func of a kernel with this body."""
    return tk.kernel(out_type=lambda *_: out)(body).trace(*arrays).ir


def _no_dot(x, y):
    i = tk.parallel(128, 64)
    y[i, :] = x[i, :] * 2


def _wide(x, y):
    i = tk.parallel(128, 64)
    y[i, :] = tk.dot(x[i, :], x[:, :])


def _cast(x, y):
    def step(k, acc):
        return tk.dot(x[i, k].astype(jnp.bfloat16), x[k, :].astype(jnp.bfloat16), acc)

    i = tk.parallel(128, 64)
    y[i, :] = tk.fold(tk.serial(128, 64), step, tk.zeros((64, 128)))


def _few_rows(x, y):
    i = tk.parallel(128, 32)
    y[i, :] = tk.fold(tk.serial(128, 64), lambda k, acc: tk.dot(x[i, k], x[k, :], acc), tk.zeros((32, 128)))


def _used_besides(x, y):
    def step(k, acc):
        tile = x[k, :]
        return tk.dot(x[i, k], tile, acc) + tile.astype(jnp.float32).sum()

    i = tk.parallel(128, 64)
    y[i, :] = tk.fold(tk.serial(128, 64), step, tk.zeros((64, 128)))


def _sum(x, y):
    i = tk.parallel(128, 64)
    y.at[...].add(tk.fold(tk.serial(128, 64), lambda k, acc: tk.dot(x[i, k], x[k, :], acc), tk.zeros((64, 128))))


def _nested(x, y):
    def inner(_, acc):
        return tk.fold(tk.serial(128, 64), lambda k, acc: tk.dot(x[i, k], x[k, :], acc), acc)

    def outer(_, acc):
        return tk.fold(tk.serial(2), inner, acc)

    i = tk.parallel(128, 64)
    y[i, :] = tk.fold(tk.serial(3), outer, tk.zeros((64, 128)))


def _cast_twice(x, y):
    def step(k, acc):
        tile, first = x[k, :].astype(jnp.bfloat16), tk.tile(128, 64, 0)
        acc = tk.dot(x[i, k].astype(jnp.bfloat16), tile, acc)
        return tk.dot(x[first, k].astype(jnp.bfloat16), tile, acc)

    i = tk.parallel(128, 64)
    y[i, :] = tk.fold(tk.serial(128, 64), step, tk.zeros((64, 128)))


def _cast_outside(x, y):
    i = tk.parallel(128, 64)
    whole = x[:, :].astype(jnp.bfloat16)
    y[i, :] = tk.fold(
        tk.serial(2), lambda _, acc: tk.dot(x[i, :].astype(jnp.bfloat16), whole, acc), tk.zeros((64, 128))
    )


F32_128 = like(128, 128, dtype=jnp.float32)
REFUSED = {
    "no product": (_no_dot, like(128, 128), "there is no product"),
    "float32": (_wide, F32_128, "of bfloat16 or float16"),
    "cast operands": (_cast, F32_128, "no tile that TMA copies"),
    "a cast tile outside of the loop": (_cast_outside, like(128, 128, dtype=jnp.int8), "no tile that TMA copies"),
    "a cast tile of two products": (_cast_twice, like(128, 128, dtype=jnp.int8), "no tile that TMA copies"),
    "32 rows": (_few_rows, like(128, 128), "a size that `wgmma` does not have"),
    "a tile for two": (_used_besides, like(128, 128), "is used besides"),
    "loops in loops": (_nested, like(128, 128), "inside of two others"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_reason_and_the_line(name: str) -> None:
    body, array, reason = REFUSED[name]
    func = kernel(body, array, out=array if name == "no product" else F32_128)
    with pytest.raises(TargetError, match=reason) as info:
        program(func)
    assert 'emitter="auto"' in info.value.fix
    assert info.value.loc.file == __file__


def test_sums_are_refused() -> None:
    func = kernel(_sum, like(128, 128), out=tk.Sum(like(64, 128, dtype=jnp.float32)))
    with pytest.raises(TargetError, match="an output that is updated"):
        program(func)


@pytest.mark.parametrize("warps", [2, 6, 16])
def test_warps_are_those_of_warpgroups(warps: int) -> None:
    with pytest.raises(TargetError, match="number of warps"):
        program(product(64, 64, 64), num_warps=warps)


def test_other_gpus_are_refused() -> None:
    with pytest.raises(TargetError, match="for Hopper"):
        build_gluon(product(64, 64, 64), CHIPS["cuda:sm_80"], {})


def test_a_mask_that_keeps_the_last_rows_is_refused() -> None:
    def masked(x, n, y):
        def step(k, acc):
            return tk.dot(x[i, k], x.load((k, slice(None)), mask=(k.indices >= n[0])[:, None]), acc)

        i = tk.parallel(128, 64)
        y[i, :] = tk.fold(tk.serial(128, 64), step, tk.zeros((64, 128)))

    func = kernel(masked, like(128, 128), jax.ShapeDtypeStruct((1,), jnp.int32), out=F32_128)
    with pytest.raises(TargetError, match="no tile that TMA copies"):
        program(func)
