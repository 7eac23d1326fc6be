"""Programs of PTX written by hand, and how to run them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tilekern.ir.core import Array
from tilekern.lower.triton.ptx.machine import Arena, Machine
from tilekern.lower.triton.ptx.parse import parse
from tilekern.lower.triton.ptx.run import BASE, TABLE

_GAP = 256
_HEAD = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry f({parameters})
.reqntid {threads}
{{
    .reg .pred %p<20>;
    .reg .b16 %h<20>;
    .reg .b32 %r<40>;
    .reg .f32 %f<40>;
    .reg .b64 %d<40>;
    .reg .f64 %q<20>;
    .local .align 8 .b8 stack[64];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %ctaid.x;
{prologue}
{body}
    ret;
}}
"""


def module(body: str, arrays: int, parameters: int, threads: int) -> str:
    """A module whose entry function runs `body`.

    Before it `%r0` is the number of the thread, `%r1` that of its block, and `%d0` to `%d9` are the addresses of the
    arrays. Registers `%p`, `%h`, `%r`, `%f`, `%d` and `%q` are predicates, 16, 32 bits, float32, 64 bits and float64.
    """
    names = ", ".join(f".param .u64 .ptr .global f_param_{n}" for n in range(arrays + parameters))
    prologue = "\n".join(f"    ld.param.u64 %d{n}, [f_param_{n}];" for n in range(arrays))
    return _HEAD.format(parameters=names, threads=threads, prologue=prologue, body=body)


def run(
    body: str,
    *arrays: Array,
    threads: int = 32,
    blocks: int = 1,
    shared_bytes: int = 4096,
    parameters: Sequence[Any] = (),
    **modes: bool,
) -> list[Array]:
    """The arrays after a launch. Behind their addresses the entry function has more `parameters`."""
    places, end = list[int](), _GAP
    for x in arrays:
        places.append(end)
        end += -(-x.nbytes // 256) * 256 + _GAP
    arena = Arena("global", BASE, end)
    for x, place in zip(arrays, places, strict=True):
        part = slice(place, place + x.nbytes)
        arena.bytes[part], arena.open[part] = np.ascontiguousarray(x).reshape(-1).view(np.uint8), True
    entry = parse(module(body, len(arrays), len(parameters), threads))
    values = [*(BASE + place for place in places), *parameters]
    Machine(entry, blocks, shared_bytes, arena, values, TABLE, **modes).run()
    return [
        arena.bytes[place : place + x.nbytes].copy().view(x.dtype).reshape(x.shape)
        for x, place in zip(arrays, places, strict=True)
    ]


def computed(text: str, *operands: Array, result: Any, threads: int | None = None) -> Array:
    """The results of an instruction, one for each element of the operands.

    Args:
      text: instructions on the operands `a`, `b`, `c`, whose result is `out`.
      operands: arrays of one length; the letter of an operand's registers depends on its dtype.
      result: the dtype of the results.
      threads: threads of the block; as many as there are elements if it is None.
    """
    count = len(operands[0])
    threads = threads or -(-count // 32) * 32
    out = np.zeros(threads, result)
    arrays = [np.resize(x, threads) for x in operands]
    loads, names = list[str](), {"out": f"%{_letter(out.dtype)}15"}
    for n, x in enumerate(arrays):
        names["abc"[n]] = f"%{_letter(x.dtype)}{10 + n}"
        loads += [*_address(n, x.dtype), f"ld.global.{_type(x.dtype)} {names['abc'[n]]}, [%d30];"]
    body = re.sub(r"\b(out|a|b|c)\b(?!\.)", lambda name: names[name[0]], text)
    store = [*_address(len(arrays), out.dtype), f"st.global.{_type(out.dtype)} [%d30], {names['out']};"]
    return run("\n".join([*loads, body, *store]), *arrays, out, threads=threads)[-1][:count]


def _address(array: int, dtype: np.dtype[Any]) -> list[str]:
    return [f"mul.wide.u32 %d31, %r0, {dtype.itemsize};", f"add.s64 %d30, %d{array}, %d31;"]


def _letter(dtype: np.dtype[Any]) -> str:
    return {1: "h", 2: "h", 4: "f" if dtype.kind == "f" else "r", 8: "q" if dtype.kind == "f" else "d"}[dtype.itemsize]


def _type(dtype: np.dtype[Any]) -> str:
    return {"f": {4: "f32", 8: "f64"}.get(dtype.itemsize, "b16")}.get(dtype.kind, f"b{dtype.itemsize * 8}")
