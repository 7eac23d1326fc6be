"""Matrix products: `wgmma` on operands in shared memory or registers, and `mma` on registers.

Layouts: PTX ISA 9.0, sections 9.7.14 and 9.7.15. The address of an element behind a matrix descriptor, in units of
16 bytes T (CUTLASS, include/cute/arch/mma_sm90_desc.hpp, gives the same as layouts):

    rows along K (K-major):    ((8, m), (T, 2)) : ((swizzle, stride), (1, T)); without swizzle (1, leading) for K
    rows along M or N:         ((T, swizzle / 16, m), (8, k)) : ((1, T, leading), (swizzle, stride))
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tilekern.ir.core import Array
from tilekern.ir.records import record
from tilekern.lower.triton.ptx.arithmetic import dtype_of
from tilekern.lower.triton.ptx.machine import SHARED_BASE, WARP, Execute, Machine
from tilekern.lower.triton.ptx.parse import Instruction, Number, OutsideError, PtxError, Vector

_GROUP = 4 * WARP
_SWIZZLES = {0: 16, 1: 128, 2: 64, 3: 32}


def swizzled(addresses: Array, width: int) -> Array:
    """Addresses of bytes in shared memory after the swizzle of a width in bytes: 16 is none."""
    bits = {16: 0, 32: 1, 64: 2, 128: 3}[width]
    return addresses ^ (addresses >> 3 & ((1 << bits) - 1) << 4)


def _places(descriptor: int, rows: int, depth: int, itemsize: int, transposed: bool) -> Array:
    """int64[rows, depth] addresses in shared memory of the bytes where elements begin."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    swizzle = _SWIZZLES[descriptor >> 62 & 3]
    if descriptor >> 49 & 7:
        raise PtxError("a descriptor with a base offset is not known")
    unit = 16 // itemsize
    row, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
    if not transposed:
        chunk = k // unit * (16 if swizzle > 16 else leading)
        offsets = row % 8 * swizzle + row // 8 * stride + chunk + k % unit * itemsize
    elif swizzle == 16:
        offsets = row % unit * itemsize + row // unit * stride + k % 8 * 16 + k // 8 * leading
    else:
        wide = swizzle // itemsize
        offsets = row % wide * itemsize + row // wide * leading + k % 8 * swizzle + k // 8 * stride
    return swizzled(start + offsets, swizzle)


def _operand_places(machine: Machine, places: Array, itemsize: int, block: int) -> Array:
    """Offsets into the bytes of shared memory from the addresses of an operand of a thread block."""
    offsets = places - SHARED_BASE
    if offsets.min() < 0 or offsets.max() + itemsize > machine.shared_limit:
        raise OutsideError(
            f"an operand of a product lies at {offsets.min()} to {offsets.max()} of shared memory, which has "
            f"{machine.shared_limit} bytes"
        )
    return offsets + block * machine.shared_size


def _held(machine: Machine, operand: Vector, ids: Array, dtype: Any) -> Array:
    """float64[64, depth] of a left operand in the registers of 128 threads."""
    pack = 4 // dtype.itemsize
    values = np.stack([machine.read(r, ids, 32) for r in operand.parts], 1).view(dtype).reshape(4, 8, 4, 2, 2, pack)
    # [warp, row of 8, quarter, upper half of K, upper half of rows, element]; register n has bits (half of K, of rows)
    values = values.transpose(0, 4, 1, 3, 2, 5)
    return values.reshape(64, 4 * 2 * pack).astype(np.float64)


def _scatter(machine: Machine, registers: Vector, ids: Array, result: Array, dtype: Any) -> None:
    """Write float32[64, N] to the accumulators of 128 threads."""
    columns = result.shape[1]
    parts = result.astype(dtype).reshape(4, 2, 8, columns // 8, 4, 2)  # warp, half, row, tile, quarter, pair
    by_thread = parts.transpose(0, 2, 4, 3, 1, 5).reshape(_GROUP, -1)  # thread = (warp, row, quarter)
    if dtype.itemsize == 2:
        by_thread = np.ascontiguousarray(by_thread).view(np.uint32)
    for n, register in enumerate(registers.parts):
        machine.write(register, ids, np.ascontiguousarray(by_thread[:, n]))


def _gather(machine: Machine, registers: Vector, ids: Array, columns: int, dtype: Any) -> Array:
    """The accumulators of 128 threads, as [64, N]."""
    by_thread = np.stack([machine.read(r, ids, 32) for r in registers.parts], 1).view(dtype)
    parts = by_thread.reshape(4, 8, 4, columns // 8, 2, 2).transpose(0, 4, 1, 3, 2, 5)
    return parts.reshape(64, columns)


def _as_tf32(x: Array) -> Array:
    return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


@record
class _Product:
    """One `wgmma` of one warpgroup.

    Attributes:
      ids: the threads.
      into: the accumulators.
      types: the names of the types of the result and the operands.
      left: offsets of a left operand in shared memory, int64[64, depth], or its registers.
      right: offsets of the right operand, int64[columns, depth].
      signs: 1 or -1 for each operand.
      adds: True to add to the accumulators.
    """

    ids: Array
    into: Vector
    types: Sequence[str]
    left: Array | Vector
    right: Array
    signs: Sequence[int]
    adds: bool

    @property
    def in_shared(self) -> list[tuple[Array, int]]:
        """The offsets of the operands in shared memory, and the bytes of an element."""
        sizes = (dtype_of(t).itemsize for t in self.types[1:3])
        pairs = zip((self.left, self.right), sizes, strict=True)
        return [(x.reshape(-1), size) for x, size in pairs if not isinstance(x, Vector)]


def _warpgroup_product(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`wgmma.mma_async`: at once, or when the group is waited for."""
    groups = ids.reshape(-1, _GROUP) if len(ids) % _GROUP == 0 else np.zeros((0, 1), int)
    if not len(groups) or (groups[:, 0] % _GROUP).any():
        raise PtxError("not all threads of a warpgroup take part")
    for group in groups:
        product = _product(machine, instruction, group)
        if machine.races is not None:
            for (offsets, size), warp in itertools.product(product.in_shared, _warps(machine, group)):
                machine.races.read_beside(machine.races.words_of(offsets, size), int(machine.cta[group[0]]), warp)
        if not machine.late:  # operands in registers may be read until the wait
            _multiply(machine, product)
        machine.products.begin(group, product)


def _warps(machine: Machine, group: Array) -> list[int]:
    return [int(warp) for warp in machine.tid[group[::WARP]] // WARP]


def _product(machine: Machine, instruction: Instruction, ids: Array) -> _Product:
    shape = next(m for m in instruction.modifiers if re.fullmatch(r"m64n\d+k\d+", m))
    columns, depth = map(int, re.findall(r"\d+", shape)[1:])
    types = [m for m in instruction.modifiers[instruction.modifiers.index(shape) + 1 :] if m != "satfinite"]
    _, left, right = (dtype_of(t) for t in types[:3])
    into, a, b, scale, *rest = instruction.operands
    assert isinstance(into, Vector)
    numbers = [r.bits for r in rest if isinstance(r, Number)]
    signs, transposes = (numbers[:2], numbers[2:]) if left.kind not in "iu" else ([1, 1], [])
    is_held, block = isinstance(a, Vector), int(machine.cta[ids[0]])
    flip_left, flip_right, *_ = [*([0] * is_held), *transposes, 0, 0]

    def places(operand: Any, rows: int, dtype: Any, flip: int) -> Array:
        addresses = _places(_uniform(machine, operand, ids), rows, depth, dtype.itemsize, bool(flip))
        return _operand_places(machine, addresses, dtype.itemsize, block)

    x = a if isinstance(a, Vector) else places(a, 64, left, flip_left)
    y = places(b, columns, right, flip_right)
    return _Product(ids, into, types, x, y, signs, bool(machine.read(scale, ids, 1)[0]))


def _multiply(machine: Machine, product: _Product) -> None:
    result, left, right = (dtype_of(t) for t in product.types[:3])

    def elements(offsets: Array, dtype: Any) -> Array:
        stored = machine.shared.bytes[offsets[..., None] + np.arange(dtype.itemsize)]
        return stored.view(dtype)[..., 0].astype(np.float64)

    held, ids = product.left, product.ids
    x = _held(machine, held, ids, left) if isinstance(held, Vector) else elements(held, left)
    y = elements(product.right, right)
    if product.types[1] == "tf32":
        x, y = _as_tf32(x), _as_tf32(y)
    total = (x * product.signs[0]) @ (y * product.signs[1]).T
    if product.adds:
        total = total + _gather(machine, product.into, ids, len(y), result)
    _scatter(machine, product.into, ids, total, result)


def _uniform(machine: Machine, operand: Any, ids: Array) -> int:
    """A descriptor, which must be the same in all threads."""
    values = machine.read(operand, ids, 64)
    if (values != values[0]).any():
        raise PtxError("the threads of a warpgroup have different descriptors")
    return int(values[0])


def _wait(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`wgmma.wait_group`: all but the last groups of products are done."""
    (most,) = instruction.operands
    assert isinstance(most, Number)
    for _, product in machine.products.wait(ids, most.bits):
        if machine.late:
            _multiply(machine, product)
        if machine.races is not None:
            for (offsets, size), warp in itertools.product(product.in_shared, _warps(machine, product.ids)):
                machine.races.end_reads(machine.races.words_of(offsets, size), int(machine.cta[product.ids[0]]), warp)


def _commit(machine: Machine, instruction: Instruction, ids: Array) -> None:
    machine.products.commit(ids)


def _warp_product(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`mma.sync` of 16 rows and 8 columns, in the registers of a warp."""
    shape = next(m for m in instruction.modifiers if re.fullmatch(r"m\d+n\d+k\d+", m))
    rows, columns, depth = map(int, re.findall(r"\d+", shape))
    types = [
        m
        for m in instruction.modifiers[instruction.modifiers.index(shape) + 1 :]
        if m not in ("row", "col", "satfinite")
    ]
    result, left, right = (dtype_of(t) for t in types[:3])
    if (rows, columns, depth) == (8, 8, 4) and result.itemsize == 8:
        _wide_warp_product(machine, instruction, ids)
        return
    into, a, b, c = instruction.operands
    assert all(isinstance(v, Vector) for v in (into, a, b, c))
    if (rows, columns) != (16, 8) or result.itemsize == 8:
        raise PtxError(f"a product of shape {shape} is not known")
    warps, pack = ids.reshape(-1, WARP), 4 // left.itemsize

    def registers(operand: Any, dtype: Any) -> Array:
        return np.stack([machine.read(r, ids, 32).reshape(-1, WARP) for r in operand.parts], 2).view(dtype)

    halves = depth // (4 * pack)
    x = registers(a, left).reshape(-1, 8, 4, halves, 2, pack).transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, depth)
    y = registers(b, right).reshape(-1, 8, 4, halves, pack).transpose(0, 1, 3, 2, 4).reshape(-1, 8, depth)
    x, y = x.astype(np.float64), y.astype(np.float64)
    if types[1] == "tf32":
        x, y = _as_tf32(x), _as_tf32(y)
    acc = registers(c, result).reshape(-1, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4).reshape(-1, 16, 8)
    with np.errstate(all="ignore"):
        total = (acc + x @ y.swapaxes(1, 2)).astype(result)
    parts = total.reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(len(warps) * WARP, 4)
    if result.itemsize == 2:
        parts = np.ascontiguousarray(parts).view(np.uint32)
    assert isinstance(into, Vector)
    for n, register in enumerate(into.parts):
        machine.write(register, ids, np.ascontiguousarray(parts[:, n]))


def _wide_warp_product(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`mma.sync` m8n8k4 of float64: four lanes have a row of A and two numbers each of a row of the result."""
    into, a, b, c = instruction.operands

    def registers(operand: Any) -> Array:
        parts = operand.parts if isinstance(operand, Vector) else (operand,)
        return np.stack([machine.read(r, ids, 64).reshape(-1, 8, 4) for r in parts], 3).view(np.float64)

    x, y = registers(a)[..., 0], registers(b)[..., 0]
    total = registers(c).reshape(-1, 8, 8) + x @ y.swapaxes(1, 2)
    parts = total.reshape(-1, 2)
    assert isinstance(into, Vector)
    for n, register in enumerate(into.parts):
        machine.write(register, ids, np.ascontiguousarray(parts[:, n]))


TABLE: dict[str, Execute] = {
    "wgmma.mma_async": _warpgroup_product,
    "wgmma.wait_group": _wait,
    "wgmma.commit_group": _commit,
    "wgmma.fence": lambda m, i, ids: None,
    "mma.sync": _warp_product,
}
