"""Collective matmuls against one device, and the order of their exchanges and products."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.lang.checks import marked_line
from tilekern.distributed import all_gather_matmul, matmul_reduce_scatter
from tilekern.errors import ArgumentError
from tilekern.testing import assert_close, in_float64

checks = pytest.mark.parametrize("check", [True, False])
both = pytest.mark.parametrize("function", [all_gather_matmul, matmul_reduce_scatter])
SPECS = {
    all_gather_matmul: ((P("model", None), P(None, "model")), P(None, "model")),
    matmul_reduce_scatter: ((P(None, "model"), P("model", None)), P("model", None)),
}


def mapped(function: Callable[..., Any], devices: int, check: bool = True, **options: Any) -> Callable[..., Any]:
    mesh = jax.make_mesh((devices,), ("model",), (AxisType.Auto,), devices=jax.devices()[:devices])
    ins, out = SPECS[function]

    def local(x: Any, w: Any) -> Any:
        return function(x, w, axis_name="model", **options)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=out, check_vma=check))


def naive(x: Any, w: Any) -> Any:
    return jnp.matmul(x, w, precision="highest")


def operands(dtype: Any = jnp.float32, rows: int = 16, inner: int = 24, columns: int = 8) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return tuple(jnp.asarray(random.standard_normal(s), dtype) for s in ((rows, inner), (inner, columns)))


def agree(found: Any, wanted: Callable[..., Any], *arrays: Any, factor: float = 2, length: int = 24) -> None:
    oracles, lows = in_float64(wanted, *arrays), jax.jit(wanted)(*arrays)
    for f, oracle, low in zip(*map(jax.tree.leaves, (found, oracles, lows)), strict=True):
        assert_close(f, oracle, low, length=length, factor=factor)


@both
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_products(function: Any, devices: int, bidirectional: bool) -> None:
    x, w = operands(rows=3 * devices, inner=5 * devices, columns=7 * devices)
    agree(mapped(function, devices, bidirectional=bidirectional)(x, w), naive, x, w, length=5 * devices)


@both
def test_an_explicit_mesh(function: Any) -> None:
    """Inside of `jax.shard_map` its axes are as manual as others."""
    (x, w), (ins, out) = operands(), SPECS[function]
    mesh = jax.make_mesh((2,), ("model",), (AxisType.Explicit,), devices=jax.devices()[:2])
    divided = (jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((x, w), ins, strict=True))
    local = lambda x, w: function(x, w, axis_name="model", target="cpu:xla")  # noqa: E731
    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=out))(*divided)
    agree(found, naive, x, w)


@both
def test_batches(function: Any) -> None:
    x, w = operands()
    many = jnp.stack([x, 2 * x])
    ins, out = SPECS[function]
    mesh = jax.make_mesh((2,), ("model",), (AxisType.Auto,), devices=jax.devices()[:2])

    def local(x: Any, w: Any) -> Any:
        return jax.vmap(lambda x: function(x, w, axis_name="model", target="cpu:xla"))(x)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(None, *ins[0]), ins[1]), out_specs=P(None, *out))
    agree(jax.jit(mapped)(many, w), naive, many, w)


@both
def test_a_mesh_of_data_and_model(function: Any) -> None:
    """The rows of x are divided by data, too: the gradient of w is a sum over that axis."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    (x_spec, w_spec), out = SPECS[function]

    def with_data(spec: P) -> P:
        return P(("data", spec[0]) if spec[0] else "data", spec[1])

    local = lambda x, w: function(x, w, axis_name="model", target="cpu:xla")  # noqa: E731
    call = jax.shard_map(local, mesh=mesh, in_specs=(with_data(x_spec), w_spec), out_specs=with_data(out))

    def gradients(call: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda x, w: (call(x, w) ** 2).sum(), (0, 1))

    agree(jax.jit(gradients(call))(*operands()), gradients(naive), *operands(), factor=3)


@both
@checks
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients(function: Any, dtype: Any, check: bool) -> None:
    x, w = operands(dtype)
    scale = jnp.cos(jnp.arange(128, dtype=jnp.float32)).reshape(16, 8)

    def gradients(call: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda x, w: (call(x, w) * scale.astype(x.dtype)).sum(), (0, 1))

    found = jax.jit(gradients(mapped(function, 4, check, bidirectional=check, target="cpu:xla")))(x, w)
    agree(found, gradients(naive), x, w, factor=3)


@both
@checks
def test_second_order_in_both_modes(function: Any, check: bool) -> None:
    x, w = operands()

    def seconds(call: Callable[..., Any]) -> Callable[..., Any]:
        loss = lambda x, w: jnp.sin(call(x, w)).sum()  # noqa: E731
        slope = jax.grad(loss, (0, 1))

        def both_modes(x: Any, w: Any) -> Any:
            forward = jax.jvp(slope, (x, w), (x, w))[1]
            backward = jax.grad(lambda *a: sum((g * g).sum() for g in slope(*a)), (0, 1))(x, w)
            return forward, backward

        return both_modes

    found = jax.jit(seconds(mapped(function, 2, check, target="cpu:xla")))(x, w)
    agree(found, seconds(naive), x, w, factor=3, length=384)


# --- order ------------------------------------------------------------------------------------------------------------


def instructions(text: str) -> dict[str, tuple[str, set[str]]]:
    """The opcode and the operands of each instruction of the entry computation."""
    entry = text[text.index("\nENTRY ") :]
    found = re.findall(r"^ *(?:ROOT )?%([\w.-]+) = (?:\([^=]*\)|\S+) ([\w-]+)\((.*)$", entry, re.MULTILINE)
    return {name: (opcode, set(re.findall(r"%([\w.-]+)", rest))) for name, opcode, rest in found}


def waits(program: dict[str, tuple[str, set[str]]], late: str, early: str) -> list[int]:
    """For each instruction `late`, how many of the instructions `early` it depends on."""

    def behind(name: str) -> set[str]:
        operands = program[name][1] & program.keys()
        return operands.union(*map(behind, operands))

    starts = [name for name, (opcode, _) in program.items() if opcode == late]
    return [sum(program[name][0] == early for name in behind(start)) for start in starts]


EXCHANGE, PRODUCT = "collective-permute", "custom-call"


@pytest.mark.parametrize(
    ("function", "late", "early"),
    [(all_gather_matmul, EXCHANGE, PRODUCT), (matmul_reduce_scatter, PRODUCT, EXCHANGE)],
)
def test_exchanges_and_products_do_not_wait_for_each_other(function: Any, late: str, early: str) -> None:
    """Blocks of x travel without products; products that are added to sums do not wait for these."""
    text = mapped(function, 4, target="cpu:llvm").lower(*operands()).compile().as_text()
    program = instructions(text)
    assert waits(program, late, early) == [0] * (3 if late == EXCHANGE else 4)
    assert max(waits(program, early, late)) == 3


@both
def test_a_tpu_exchanges_beside_each_product(function: Any) -> None:
    """In the schedule of XLA's compiler for four v5e, each exchange starts before a product and ends behind it."""
    pytest.importorskip("libtpu", reason="needs libtpu")
    for name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):  # no device is asked, no lock is taken
        os.environ.setdefault(name, "1")
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    mesh, (ins, out) = Mesh(np.array(topology.devices), ("model",), axis_types=(AxisType.Auto,)), SPECS[function]
    local = lambda x, w: function(x, w, axis_name="model")  # noqa: E731
    shapes = [jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for spec in ins]
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=out))
    text = mapped.lower(*shapes).compile().as_text()
    found = re.findall(r"= .* collective-permute-(start|done)\(|%(matmul)[.\d]* = .* custom-call\(", text)
    order = "".join("<" if kind == "start" else ">" if kind == "done" else "x" for kind, _ in found)
    assert order == ("<x><x><x>x" if function is all_gather_matmul else "x<x><x><x>")


@both
@pytest.mark.parametrize("gradient", [False, True])
def test_programs_exchange_blocks_only(function: Any, gradient: bool) -> None:
    """Among four devices a block goes three steps; the backward pass gathers x once more."""
    call = mapped(function, 4, target="cpu:xla")
    slopes = jax.jit(jax.grad(lambda x, w: jnp.sum(call(x, w) ** 2), (0, 1)))
    text = (slopes if gradient else call).lower(*operands()).compile().as_text()
    assert not re.findall(r"all-gather|all-reduce|reduce-scatter|all-to-all", text)
    rings = 1 if not gradient else 3 if function is all_gather_matmul else 2
    assert len(re.findall(r" collective-permute(?:-start)?\(", text)) == 3 * rings


@both
def test_constants_have_no_products(function: Any) -> None:
    """The gradient of x alone: a product forward and one backward for each of four devices."""
    call = mapped(function, 4, target="cpu:llvm")
    text = jax.jit(jax.grad(lambda x, w: (call(x, w) ** 2).sum())).lower(*operands()).compile().as_text()
    assert [opcode for opcode, _ in instructions(text).values()].count(PRODUCT) == 8


# --- errors -----------------------------------------------------------------------------------------------------------


@both
def test_an_unknown_axis_is_refused(function: Any) -> None:
    ins, out = SPECS[function]
    mesh = jax.make_mesh((2,), ("model",), (AxisType.Auto,), devices=jax.devices()[:2])

    def local(x: Any, w: Any) -> Any:
        return function(x, w, axis_name="modell")  # <-

    with pytest.raises(ArgumentError, match=f"{function.__name__} needs a mesh axis") as raised:
        jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=out)(*operands())
    assert raised.value.got == "axis_name='modell'"
    assert raised.value.expected == "axis_name: one of ['model']"
    assert raised.value.loc.line == marked_line(local.__code__)


@both
def test_a_call_outside_of_shard_map_is_refused(function: Any) -> None:
    with pytest.raises(ArgumentError, match="needs a mesh axis") as raised:
        function(*operands(), axis_name="model")
    assert raised.value.expected == "a call inside of jax.shard_map"


@both
def test_operands_that_do_not_fit_are_refused(function: Any) -> None:
    x, w = operands()
    with pytest.raises(ArgumentError, match=f"the arrays of {function.__name__} do not fit") as raised:
        mapped(function, 2)(x, w.astype(jnp.bfloat16))
    assert "of one float dtype" in raised.value.expected


def test_rows_that_devices_do_not_divide_are_refused() -> None:
    with pytest.raises(ArgumentError) as raised:
        mapped(matmul_reduce_scatter, 4)(*operands(rows=14))
    assert raised.value.expected == "rows of x, dim 0, that the 4 devices of mesh axis 'model' divide"
    assert raised.value.fix == "pad x with jnp.pad to 16 rows"
    assert "x = float32[14, 6]" in raised.value.got
