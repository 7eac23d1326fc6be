"""Which dims of the library's calls devices divide, and the collectives that it takes, forward and with gradients.

A column tells the kinds of collectives in the compiled program: "-" for none, "sum" for an all-reduce, "gather" for an
all-gather, with a `GatherWarning`, and "moves" for others. "*": JAX decides of the rest.
Names joined by "+" are divided together; behind "|" stand those that the second axis of the mesh divides.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.meshes.library_calls import CALLS, INTEGERS
from tilekern.errors import GatherWarning
from tilekern.kernel.divided import gather_warnings
from tilekern.testing import assert_close, in_float64

TABLE = """
kernel                       divided                        forward   with gradients
adamw_step                   rows                           -
adamw_step                   columns                        -
adamw_step                   rows | columns                 -
causal_conv1d                batch                          -         sum
causal_conv1d                channels                       -         -
causal_conv1d                tokens                         gather *  gather *
cross_entropy                tokens                         -         sum
cross_entropy                words                          gather    gather
cross_entropy                inner                          gather    gather
distillation                 tokens                         -         sum
distillation                 words                          gather    gather
distillation                 inner                          gather    gather
flash_attention              batch                          -         -
flash_attention              heads                          -         -
flash_attention, causal      heads                          -         -
flash_attention, causal      tokens                         gather    gather
flash_attention, grouped     batch                          -         -
flash_attention, grouped     heads+groups                   -         -
flash_attention, grouped     batch | heads+groups           -         -
flash_attention, grouped     heads+groups | heads+groups    -         -
fused_matmul                 rows                           -         sum
fused_matmul                 columns                        -         sum
fused_matmul                 inner                          gather    gather
fused_ragged_dot             columns                        -         sum
fused_ragged_dot             inner                          gather    gather
gated_delta_rule             batch                          -         -
gated_delta_rule             heads                          -         -
gated_delta_rule             width                          -         sum
gated_delta_rule, grouped    batch                          -         -
gated_delta_rule, grouped    heads+groups                   -         -
gated_delta_rule, grouped    batch | heads+groups           -         -
gated_delta_rule, grouped    heads+groups | heads+groups    -         -
gated_delta_rule by channel  heads                          -         -
group_norm                   batch                          -         sum
group_norm                   channels                       -         -
group_norm                   batch | channels               -         sum
group_norm                   tokens                         gather    gather
group_norm, large            batch                          -         sum
group_norm, large            channels                       -         -
layer_norm                   rows                           -         sum
layer_norm                   columns                        gather    gather
linear_attention             batch                          -         -
linear_attention             heads                          -         -
linear_attention             width                          -         sum
linear_attention, grouped    batch                          -         -
linear_attention, grouped    heads+groups                   -         -
linear_attention, grouped    batch | heads+groups           -         -
linear_attention, grouped    heads+groups | heads+groups    -         -
linear_attention, packed     batch                          -         -
linear_attention, packed     heads+groups                   -         -
matmul                       rows                           -         sum
matmul                       columns                        -         sum
matmul                       inner                          sum       sum
matmul                       rows | columns                 -         sum
matmul of batches            batch                          -         -
matmul of batches            rows                           -         sum
ragged_contracting_dot       columns                        -         sum
ragged_contracting_dot       inner                          -         sum
ragged_contracting_dot       rows                           gather    gather
ragged_dot                   columns                        -         sum
ragged_dot                   inner                          sum       sum
ragged_dot                   rows                           gather    gather
ragged_dot                   experts                        gather *  gather *
rg_lru                       batch                          -         sum
rg_lru                       channels                       -         -
rms_norm                     rows                           -         sum
rms_norm                     columns                        gather    gather
add_rms_norm                 rows                           -         sum
rms_norm_quantized           rows                           -
rms_norm_rope                batch                          -         sum
rms_norm_rope                heads                          -         sum
rms_norm_rope                tokens                         -         sum
rms_norm_rope                batch | heads                  -         sum
rope                         batch                          -         -
rope                         heads                          -         -
rope                         tokens                         -         -
selective_scan               batch                          -         sum
selective_scan               channels                       -         sum
softmax                      rows                           -         -
softmax                      columns                        gather    gather
ssd                          batch                          -         sum
ssd                          heads+groups                   -         -
ssd                          batch | heads+groups           -         sum
ssd                          heads+groups | heads+groups    -         -
swiglu                       rows                           -         -
swiglu                       columns                        -         -
symmetric_matmul             inner                          sum       sum
symmetric_matmul             rows                           gather    *
"""
KINDS = {"all-reduce": "sum", "reduce-scatter": "sum", "all-gather": "gather"}
MESHES = {
    kind: jax.make_mesh((2, 2), ("a", "b"), (getattr(AxisType, kind),) * 2, devices=jax.devices()[:4])
    for kind in ("Auto", "Explicit")
}
# JAX's operations around the kernels round in other places than on one device; products of smaller tiles, which the
# schedule chooses for fewer tokens, add up in another order.
OTHER_BITS = ("ssd", "fused_matmul", "fused_ragged_dot", "cross_entropy", "distillation")


class Row(NamedTuple):
    """A line of the table."""

    kernel: str
    divided: str
    forward: str
    with_gradients: str = ""

    def spec(self, dims: tuple[str, ...]) -> P:
        """The division of an array with these dims."""
        axes = dict(zip("ab", (part.split("+") for part in self.divided.split(" | ")), strict=False))
        return P(*(tuple(axis for axis, names in axes.items() if dim in names) or None for dim in dims))

    def is_whole(self, dims: tuple[str, ...]) -> bool:
        """True if something divided is no dim of an array, whose gradient is a sum over devices then."""
        return not all(set(part.split("+")) & set(dims) for part in self.divided.split(" | "))


ROWS = [Row(*re.split(r"  +", line)) for line in TABLE.strip().splitlines()[1:]]


def program(row: Row, kind: str, name: str) -> tuple[list[jax.Array], str, bool]:
    """The results of `forward` or `both`, the kinds of collectives in the program, and if it warned of a gather."""
    call, mesh = CALLS[row.kernel], MESHES[kind]
    shardings = [NamedSharding(mesh, row.spec(dims)) for dims in call.dims.values()]
    arrays = [jax.device_put(x, sharding) for x, sharding in zip(call.values(), shardings, strict=True)]
    gather_warnings.clear()
    with jax.set_mesh(mesh), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = jax.jit(getattr(call, name)).lower(*arrays).compile()
    found = set(re.findall(r" (all-[a-z-]+|collective-[a-z-]+|reduce-scatter)\(", compiled.as_text()))
    kinds = sorted({KINDS.get(each, "moves") for each in found}) or ["-"]
    warned = any(issubclass(w.category, GatherWarning) for w in caught)
    return jax.tree.leaves(compiled(*arrays)), " ".join(kinds), warned


def table_for_users() -> str:
    """The table of docs/distributed.md: for each call the dims that an axis divides, by what devices exchange."""
    lines = ["| call | nothing | sums of gradients | sums of results | what is gathered |", "|---|---|---|---|---|"]
    for kernel in CALLS:
        dims: dict[str, list[str]] = {column: [] for column in ("nothing", "gradients", "results", "gathered")}
        for row in ROWS:
            if row.kernel == kernel and "|" not in row.divided:
                sums = "gradients" if row.with_gradients == "sum" else "nothing"
                column = {"-": sums, "sum": "results"}.get(row.forward, "gathered")
                dims[column].append(row.divided.replace("+", " with "))
        lines.append(f"| {kernel} | {' | '.join(map(', '.join, dims.values()))} |")
    return "\n".join(lines)


def test_the_table_of_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    assert table_for_users() in text


def test_each_call_has_rows() -> None:
    assert {row.kernel for row in ROWS} == set(CALLS)


def check_collectives(found: str, wanted: str) -> None:
    """Compare the kinds of collectives; "*" stands for any more."""
    if wanted.endswith("*"):
        assert set(wanted.split()) - {"*"} <= set(found.split())
    else:
        assert found == wanted


@pytest.mark.sweep(40)
@pytest.mark.parametrize("kind", list(MESHES))
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kernel}: {row.divided}")
def test_collectives_and_results(row: Row, kind: str) -> None:
    """Each result has the bits of one device, wherever no sum is divided."""
    call = CALLS[row.kernel]
    found, collectives, warned = program(row, kind, "forward")
    check_collectives(collectives, row.forward)
    assert warned == ("gather" in collectives)
    is_exact = [not ({"sum", "moves"} & {*collectives.split()})] * len(found)
    if call.has_gradients:
        found, collectives, _ = program(row, kind, "both")
        check_collectives(collectives, row.with_gradients)
        moving = [dims for name, dims in call.dims.items() if name not in INTEGERS]
        has_sums = bool({"sum", "moves"} & {*collectives.split()})
        is_plain = is_exact[0] and not has_sums
        is_part = is_exact[0] and row.with_gradients == "sum"
        is_exact += [is_plain or (is_part and not row.is_whole(dims)) for dims in moving]
    name = "both" if call.has_gradients else "forward"
    alone = jax.tree.leaves(jax.jit(getattr(call, name))(*call.values()))
    compare(found, alone, is_exact, call.values(), getattr(call, name), row.kernel not in OTHER_BITS)


def compare(
    found: list[Any], alone: list[Any], is_exact: list[bool], values: list[Any], function: Any, same_bits: bool
) -> None:
    """Compare results with those of one device; sums as closely as those are to float64."""
    oracles = None
    for number, (f, a, exact) in enumerate(zip(found, alone, is_exact, strict=True)):
        if exact and same_bits:
            np.testing.assert_array_equal(f, a)
            continue
        oracles = oracles or jax.tree.leaves(in_float64(function, *values))
        assert_close(np.asarray(f), oracles[number], np.asarray(a), length=64, factor=3)
