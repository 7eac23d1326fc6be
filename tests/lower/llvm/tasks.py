"""Programs written by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tilekern.lower.llvm.call import call
from tilekern.lower.llvm.compile import toolchain
from tilekern.lower.llvm.ir_builder import Code, Module
from tilekern.lower.llvm.ir_values import F32, I8, I64, PTR, Reg, Type, constant
from tilekern.lower.llvm.program import TASK, Program
from tilekern.lower.llvm.runtime.machine import Machine

HASWELL = Machine("x86_64-unknown-linux-gnu", "haswell", "", vector_bytes=32, registers=16, has_int16_pairs=True)
ARM = Machine("aarch64-unknown-linux-gnu", "neoverse-n1", "+neon", vector_bytes=16, registers=32)


def program(
    body: Callable[[Code, Callable[[int], Reg], Reg, Reg], None], machine: Machine | None = None, **more: Any
) -> Program:
    """A program whose task emits `body(code, address of buffer, number, scratch)`."""
    module = Module(machine or toolchain.host())

    def task(code: Code, buffers: Reg, number: Reg, scratch: Reg) -> None:
        body(code, lambda n: code.load(PTR, code.gep(buffers, n, "ptr")), number, scratch)
        code.ret()

    module.function(TASK, [("buffers", PTR), ("number", I64), ("scratch", PTR)], task)
    return Program("by_hand", module, **{"tasks": 1, "scratch": 0, **more})


def scale(tasks: int, factor: float = 2.0, rows: int = 64, machine: Machine | None = None) -> Program:
    """y = factor * x, `rows` numbers a task."""
    lanes = (machine or toolchain.host()).lanes

    def body(code: Code, buffer: Callable[[int], Reg], number: Reg, scratch: Reg) -> None:
        x, y, first = buffer(0), buffer(1), code.binary("mul", number, rows)

        def step(i: Reg) -> None:
            at = code.binary("add", first, i)
            v = code.load(Type("float", lanes), code.gep(x, at, "float"))
            code.store(code.binary("fmul", v, factor), code.gep(y, at, "float"))

        code.loop(0, rows, lanes, step)

    return program(body, machine, tasks=tasks)


def through_scratch(tasks: int, scratch: int) -> Program:
    """y = x, one number a task, which spends a while at the begin, the end and the alignment of its scratch."""

    def body(code: Code, buffer: Callable[[int], Reg], number: Reg, memory: Reg) -> None:
        value = code.load(F32, code.gep(buffer(0), number, "float"))
        last = code.gep(memory, scratch - 4)
        code.loop(0, scratch, 4096, lambda i: code.store(constant(1, I8), code.gep(memory, i)))
        code.store(value, last)
        code.store(code.load(F32, last), code.gep(buffer(1), number, "float"))
        low = code.binary("and", code.cast("ptrtoint", memory, "i64"), 63)
        with code.when(code.compare("icmp ne", low, 0)):
            code.store(constant(-1.0, F32), code.gep(buffer(1), number, "float"))

    return program(body, tasks=tasks, scratch=scratch)


def add_up(tasks: int, zeroed: tuple[int, ...] = (0,)) -> Program:
    """The number of tasks, in float32."""

    def body(code: Code, buffer: Callable[[int], Reg], number: Reg, scratch: Reg) -> None:
        code.emit(F32, f"atomicrmw fadd {buffer(0)}, float 1.0 monotonic")

    return program(body, tasks=tasks, zeroed=zeroed)


def like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def run(made: Program, *inputs: Any) -> jax.Array:
    """The one result, which is like the first input."""
    return call(made, [like(inputs[0])], {}, *inputs)[0]


def handler(made: Program) -> int:
    """The address of a program's handler. The code stays loaded, as that of all programs compiled lately."""
    code = toolchain.compile(made).code
    assert code is not None
    return code.address


def numbers(tasks: int, rows: int = 64) -> jax.Array:
    return jnp.arange(tasks * rows, dtype=jnp.float32)


def process(code: str, **environment: str) -> str:
    """The output of a new process."""
    paths = [str(Path(__file__).parents[3]), *filter(None, sys.path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths), **environment}
    head = "from tests.lower.llvm.tasks import *\nimport numpy as np\n"
    command = [sys.executable, "-W", "ignore", "-c", head + code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
