"""A Func → a warp-specialised program in Gluon, the lower language of Triton: legalize, plan, emit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain

from tilekern import source
from tilekern.errors import TargetError
from tilekern.ir.analysis import ranges
from tilekern.ir.core import Func
from tilekern.ir.quote import code_of
from tilekern.lower.rewrite.constant_inputs import constants_as_inputs
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.emit.memory import Memory
from tilekern.lower.triton.emit.names import Names
from tilekern.lower.triton.emit.prelude import prelude
from tilekern.lower.triton.emit.source_text import Writer, dtype_text
from tilekern.lower.triton.gluon.channels import Widened, is_own
from tilekern.lower.triton.gluon.clusters import cluster_of
from tilekern.lower.triton.gluon.computer import Computer
from tilekern.lower.triton.gluon.groups import REGISTERS, WARPS
from tilekern.lower.triton.gluon.loader import Loader
from tilekern.lower.triton.gluon.plan import Plan, plan_group
from tilekern.lower.triton.gluon.rings import Buffers
from tilekern.lower.triton.gluon.rounds import WIDTH
from tilekern.lower.triton.legalize import legalize
from tilekern.lower.triton.plan.tma import TmaCopy
from tilekern.lower.triton.program import Program

_GLUON = """from triton.experimental import gluon
from triton.experimental.gluon import language as gl
"""
_HOPPER = """\
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.6 has other names for both.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
"""
_KEEP_ROWS = """

@gluon.jit
def keep_rows(tile, count, rows: gl.constexpr, step: gl.constexpr, layout: gl.constexpr):
    for first in gl.static_range(0, rows, step):
        part = tile.slice(first, step)
        lanes = first + gl.arange(0, step, gl.SliceLayout(1, layout))
        part.store(gl.where((lanes < count)[:, None], part.load(layout), 0.0))
"""
_CLUSTER = "from triton.experimental.gluon.language.nvidia.hopper import cluster\n"
_LIBDEVICE = "from triton.experimental.gluon.language.extra import libdevice\n"
_NAN = "from triton.language.core import PropagateNan\n"
_ALL = "ALL = gl.constexpr(PropagateNan.ALL)\n"

# Names of `triton.language` that Gluon lacks, or calls otherwise.
_LACKING = re.compile(r"\btl\.(broadcast_to|trans|debug_barrier|cumsum|sort|dot|device_print|device_assert)\b")

DEFAULT_WARPS = 2 * WARPS
"""Warps that compute, unless a schedule or a call gives another number."""


def build_gluon(func: Func, chip: Chip, hints: Mapping[str, int]) -> Program:
    """Legalize a Func, plan its roles, and emit its source.

    Args:
      func: went through the passes of every Func.
      chip: the GPU to run on.
      hints: `num_warps` (warps that compute), `num_stages` and `num_ctas` (thread blocks of a cluster), where a
        schedule or the call gives them.

    Raises:
      TargetError: it does something that this emitter does not, at the user's line.
      ResourceError: its tiles do not fit.
    """
    warps = hints.get("num_warps", DEFAULT_WARPS)
    closed = constants_as_inputs(legalize(func, chip, num_warps=warps, delay=False), "table")
    legal = closed.func
    cluster = cluster_of(legal, hints.get("num_ctas", 1))
    plan = plan_group(legal, chip, ranges.analyze(legal), warps, hints.get("num_stages"), cluster)
    names = Names()
    names.fresh(WIDTH)
    names.fresh("keep_rows")
    entry = names.fresh(func.name)
    memory = Memory(legal, plan.copies, names)
    roles = names.fresh(f"{func.name}_load"), names.fresh(f"{func.name}_compute")
    buffers = Buffers(plan, names)
    names.fresh("number")
    loader = Loader(legal, memory, names.copy(), plan, buffers)
    computer = Computer(legal, memory, names.copy(), plan, buffers)
    loader.run()
    computer.run()
    parameters = ", ".join(a.name for a in memory.arguments)
    everything = ", ".join([a.name for a in memory.arguments] + buffers.names)
    parts = [
        (f"def {roles[0]}({everything}):", loader.writer),
        (f"def {roles[1]}(number, {everything}):", computer.writer),
        (f"def {entry}({parameters}):", _entry(plan, buffers, memory, roles, everything)),
    ]
    blocks = min(plan.group.blocks, chip.cores // cluster)
    text, lines = _assembled(parts, blocks)
    _check_functions(func, text)
    start, _, _ = REGISTERS[plan.group.count]
    return Program(
        name=entry,
        text=text.replace("tl.", "gl."),
        arguments=tuple(memory.arguments),
        operands=tuple(memory.operands),
        constants=closed.constants,
        results=tuple(memory.results),
        programs=blocks,
        num_warps=WARPS,
        num_stages=plan.stages,
        lines=lines,
        loc=func.loc,
        language="gluon",
        start_registers=start,
        group=plan.group.count,
        cluster=cluster,
    )


def _assembled(parts: list[tuple[str, Writer]], blocks: int) -> tuple[str, dict[int, source.Loc]]:
    """The text of all functions, and the place of each of its lines."""
    bodies = "\n".join(chain.from_iterable(writer.lines for _, writer in parts))
    trims = _KEEP_ROWS if "keep_rows(" in code_of(bodies) else ""
    functions = trims + prelude(code_of(bodies)).replace("@triton.jit", "@gluon.jit").replace(
        "tl.PropagateNan.ALL", "ALL"
    )
    names_nan = "ALL" in functions
    imports = (_LIBDEVICE if "libdevice." in code_of(bodies + functions) else "") + (_NAN if names_nan else "")
    imports += _CLUSTER if "cluster.barrier(" in code_of(bodies) else ""
    constants = f"{WIDTH} = gl.constexpr({blocks})\n" + (_ALL if names_nan else "")
    text = _GLUON + imports + _HOPPER + constants + functions
    lines: dict[int, source.Loc] = {}
    for signature, writer in parts:
        text += f"\n\n@gluon.jit\n{signature}\n"
        first = text.count("\n")
        lines.update((number + first, loc) for number, loc in writer.places.items())
        text += "\n".join(writer.lines) + "\n"
    return text, lines


def _check_functions(func: Func, text: str) -> None:
    lacking = _LACKING.search(code_of(text))
    if lacking:
        with source.at(func.loc):
            raise TargetError(
                f"the Gluon emitter does not take {func.name}: Gluon has no {lacking[1]}",
                expected="functions of single elements, reductions and products",
                got=lacking[0],
                fix='leave the emitter out, or say emitter="auto"',
            )


def _entry(plan: Plan, buffers: Buffers, memory: Memory, roles: tuple[str, str], everything: str) -> Writer:
    """The body of the entry function: it makes buffers and barriers, and starts the roles."""
    writer, group = Writer(), plan.group
    for channel in plan.unique:
        for op in channel.loads:
            places = channel.stages * (group.count if is_own(op, group.varying) else 1)
            writer.line(_buffer(buffers.tiles[op], places, memory.descriptor(op), plan.copies[op]), op.loc)
    for op, name in buffers.widened.items():
        writer.line(_wide_buffer(name, group.count, plan.widened[op], op.result.tile.shape), op.loc)
    for op, name in buffers.stored.items():
        writer.line(_buffer(name, group.count, memory.descriptor(op), plan.copies[op]), op.loc)
    own, common = _barrier_forms(plan.cluster)
    for channel in plan.unique:
        places, readers = channel.stages * (1 if channel.shared else group.count), group.count if channel.shared else 1
        _barriers(writer, buffers.filled[channel], places, 1, own)
        _barriers(writer, buffers.freed[channel], places, readers, own)
        if channel in buffers.released:
            # Gluon multiplies the number of arrivals by the number of thread blocks.
            _barriers(writer, buffers.released[channel], places, readers, common)
    for name in buffers.trimmed.values():
        _barriers(writer, name, 1, group.count, own)
    if buffers.turn:
        _barriers(writer, buffers.turn, group.count, 1, own)
    _, computing, loading = REGISTERS[group.count]
    calls = [f"({roles[1]}, ({n}, {everything}))" for n in range(group.count)] + [f"({roles[0]}, ({everything}))"]
    warps = [WARPS] * (group.count - 1) + [1]
    registers = [computing] * (group.count - 1) + [loading]
    writer.line(f"gl.warp_specialize([{', '.join(calls)}], {warps}, {registers})")
    if buffers.released:
        # A thread block stays until the other blocks have copied to its shared memory, and arrived at its barriers.
        writer.line("cluster.barrier()")
    return writer


def _buffer(name: str, places: int, descriptor: str, copy: TmaCopy) -> str:
    shape = [places, *copy.descriptor.block]
    return f"{name} = gl.allocate_shared_memory({descriptor}.dtype, {shape}, {descriptor}.layout)"


def _wide_buffer(name: str, count: int, wide: Widened, shape: tuple[int, ...]) -> str:
    """Places of 16-bit numbers, whose rows are swizzled as `wgmma` reads them."""
    layout = f"gl.NVMMASharedLayout({min(128, shape[1] * wide.dtype.itemsize)}, 16, 2)"
    return f"{name} = gl.allocate_shared_memory({dtype_text(wide.dtype)}, {[count * wide.places, *shape]}, {layout})"


def _barrier_forms(cluster: int) -> tuple[tuple[int, str], tuple[int, str]]:
    """The number and layout of barriers: one for each thread block of a cluster, and one for the whole cluster."""
    return ((1, ""), (1, "")) if cluster == 1 else ((cluster, "[[1]]"), (1, "[[0]]"))


def _barriers(writer: Writer, name: str, places: int, count: int, form: tuple[int, str]) -> None:
    number, layout = form
    writer.line(
        f"{name} = gl.allocate_shared_memory(gl.int64, [{places}, {number}], mbarrier.MBarrierLayout({layout}))"
    )
    writer.line(f"for place in gl.static_range({places}):")
    with writer.indented():
        writer.line(f"mbarrier.init({name}.index(place), count={count})")
