"""The native code between XLA and a program's tasks: what XLA calls, on its own threads, without Python.

It follows the header xla/ffi/api/c_api.h of jaxlib. A call lays out the buffers' addresses in a *job*, asks XLA's
thread pool for helpers and takes part itself. Everybody claims task numbers from one counter, so the call ends however
busy the pool is: it waits only for tasks that others have begun. A helper that starts when all is done, maybe after the
call has returned, touches nothing but the job, which lives as long as somebody counts on it.

XLA's threads flush subnormals to zero. Tasks run by the rules of IEEE 754: every thread switches its mode for them.

All of this is the same for every program and compiled once in a process (`runtime`). A program's own handler
(`with_handler`) only passes on the work to run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager

import numpy as np

from tilekern.ir.core import round_up
from tilekern.ir.records import record
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.ir_builder import Code, Module
from tilekern.lower.llvm.ir_values import I1, I8, I32, I64, PTR, VOID, Reg, Type, constant
from tilekern.lower.llvm.program import TASK, Program
from tilekern.lower.llvm.runtime.code_table import define_code_table
from tilekern.lower.llvm.runtime.ffi_structs import (
    API_BYTES,
    ARGS,
    COUNT,
    DATA,
    DIMS,
    DTYPE,
    DTYPES,
    ELEMENT_BYTES,
    ERROR,
    EXECUTING,
    FRAME_API,
    FRAME_BYTES,
    FRAME_CONTEXT,
    FRAME_STAGE,
    INVALID_ARGUMENT,
    NULL,
    NUM_THREADS,
    RANK,
    RESOURCE_EXHAUSTED,
    RETS,
    SCHEDULE,
    UNIMPLEMENTED,
    Checks,
    Field,
    answer_metadata,
    argument_struct,
    destroy,
    each,
    emit_error,
    invoke,
    item,
    string,
    variable,
)
from tilekern.lower.llvm.runtime.fp_mode import ieee_mode, pause
from tilekern.lower.llvm.runtime.huge_pages import prefer_huge
from tilekern.lower.llvm.runtime.machine import Machine

HANDLER = "tilekern_handler"
"""A program's own handler, which `code_table.EXECUTE` calls: `XLA_FFI_Error* (XLA_FFI_CallFrame*)`."""

RUN = "tilekern_run"
"""The function of the runtime that handlers call: `XLA_FFI_Error* (XLA_FFI_CallFrame*, Work)`, see `_Work`."""

_LOOP, _HELP, _RELEASE = (f"tilekern_{name}" for name in ("loop", "help", "release"))


# --- the job: each counter on a cache line of its own ----------------------------------------------------------------

_NEXT = Field(0, I64)  # the first task that nobody has claimed
_DONE = Field(64, I64)  # how many tasks have ended
_USERS = Field(128, I64)  # how many threads will still touch the job
_TASK, _TASKS, _SCRATCH = Field(192, PTR), Field(200, I64), Field(208, I64)  # what to run
_CLAIM_DIVISOR = Field(216, I64)  # guided scheduling: a claim takes 1 / divisor of the remaining tasks
_ADDRESSES = Field(256, PTR)  # of the buffers


@record
class _Work:
    """Arguments that a handler passes to `RUN`.

    Attributes:
      task: the address of the program's `TASK`.
      tasks: the number of tasks.
      scratch: the bytes that each thread needs, a multiple of 64.
      name: the kernel's name, for errors; ends with a zero.
      zeroed: the numbers of the results that are set to 0 first.
      zeros: the length of `zeroed`.
    """

    task: Reg
    tasks: Reg
    scratch: Reg
    name: Reg
    zeroed: Reg
    zeros: Reg


_WORK = [("task", PTR), ("tasks", I64), ("scratch", I64), ("name", PTR), ("zeroed", PTR), ("zeros", I64)]


def with_handler(program: Program) -> Module:
    """A copy of the program's module that also has `HANDLER`."""
    module = copy.deepcopy(program.module)
    module.declare(RUN, PTR, [PTR, *(type for _, type in _WORK)])

    def build(code: Code, frame: Reg) -> None:
        numbers = module.data("tilekern_zeroed", np.array(program.zeroed, np.int64)) if program.zeroed else NULL
        # A load of one element that is masked reads the first bytes instead, also where no tile is kept there.
        scratch = round_up(max(program.scratch, 1), 64)
        counts = [constant(number, I64) for number in (program.tasks, scratch, len(program.zeroed))]
        task, name = Reg(f"@{TASK}", PTR), string(module, program.name)
        code.ret(code.call(RUN, PTR, frame, task, counts[0], counts[1], name, numbers, counts[2]))

    module.function(HANDLER, [("frame", PTR)], build, PTR, "")
    return module


def runtime(machine: Machine) -> Module:
    """The module that has `RUN`, and the functions of the table of loaded kernels."""
    module = Module(machine)
    module.declare("malloc", PTR, [I64], "nounwind")
    module.declare("aligned_alloc", PTR, [I64, I64], "nounwind")
    module.declare("free", VOID, [PTR], "nounwind")
    module.declare("snprintf", I32, [PTR, I64, PTR, Type("...")], "nounwind")
    functions: list[tuple[str, list[tuple[str, Type]], Callable[..., None], Type]] = [
        (ERROR, [("api", PTR), ("name", PTR), ("text", PTR), ("code", I32)], emit_error, PTR),
        (_RELEASE, [("job", PTR)], _release, VOID),
        (_LOOP, [("job", PTR), ("scratch", PTR)], _loop, VOID),
        (_HELP, [("job", PTR)], _help, VOID),
        (RUN, [("frame", PTR), *_WORK], _run, PTR),
    ]
    for name, parameters, build, result in functions:
        module.function(name, parameters, build, result, "" if name == RUN else "internal", noalias=False)
    define_code_table(module)
    return module


# --- a call ----------------------------------------------------------------------------------------------------------


def _run(code: Code, frame: Reg, *passed: Reg) -> None:
    """`XLA_FFI_Error* run(XLA_FFI_CallFrame*, Work)`."""
    work = _Work(*passed)
    check = Checks(code, work.name, FRAME_API.load(code, frame))
    check.size("XLA_FFI_CallFrame", frame, FRAME_BYTES)
    answer_metadata(code, check, frame)
    check.size("XLA_FFI_Api", check.api, API_BYTES)
    check.version()
    stage = FRAME_STAGE.load(code, frame)
    check(code.compare("icmp eq", stage, EXECUTING), INVALID_ARGUMENT, "XLA calls it in another stage than execute")
    for struct in (ARGS, RETS):
        check.buffers(struct.address(code, frame))

    each(code, RETS.address(code, frame), lambda _, result: _prefer_huge(code, result))

    def zero(number: Reg) -> None:
        result = code.load(I64, code.gep(work.zeroed, number, "i64"))
        _zero(code, check, item(code, RETS.address(code, frame), result))

    code.loop(0, work.zeros, 1, zero)
    with code.when(code.compare("icmp ne", work.tasks, 0)):
        _run_tasks(code, check, frame, work)
    code.ret(NULL)


def _zero(code: Code, check: Checks, buffer: Reg) -> None:
    """Fill a buffer with zeros."""
    element = _element_bytes(code, buffer)
    check(code.compare("icmp ne", element, 0), UNIMPLEMENTED, "a result that starts as zeros has an unknown dtype")
    size = _nbytes(code, buffer, element)
    code.call_external("llvm.memset.p0.i64", VOID, DATA.load(code, buffer), constant(0, I8), size, constant(0, I1))


def _prefer_huge(code: Code, buffer: Reg) -> None:
    prefer_huge(code, DATA.load(code, buffer), _nbytes(code, buffer, _element_bytes(code, buffer)))


def _element_bytes(code: Code, buffer: Reg) -> Reg:
    """Bytes of an element; 0 for an unknown dtype."""
    table = np.zeros(DTYPES, np.uint8)
    for size, dtypes in ELEMENT_BYTES.items():
        table[list(dtypes)] = size
    dtype = DTYPE.load(code, buffer)
    index = code.cast("zext", code.select(code.compare("icmp ult", dtype, DTYPES), dtype, 0), "i64")
    return code.cast("zext", code.load(I8, code.gep(code.module.data("tilekern_sizes", table), index)), "i64")


def _nbytes(code: Code, buffer: Reg, element: Reg) -> Reg:
    """Bytes of a buffer; `element` has the bytes of one element."""
    dims = DIMS.load(code, buffer)

    def multiply(axis: Reg, size: Reg) -> list[Reg]:
        return [code.binary("mul", size, code.load(I64, code.gep(dims, axis, "i64")))]

    (size,) = code.loop(0, RANK.load(code, buffer), 1, multiply, element)
    return size


def _run_tasks(code: Code, check: Checks, frame: Reg, work: _Work) -> None:
    """Run the tasks, with the help of XLA's thread pool if there are several."""
    args, rets = (COUNT.load(code, struct.address(code, frame)) for struct in (ARGS, RETS))
    size = code.binary("add", code.binary("shl", code.binary("add", args, rets), 3), _ADDRESSES.offset)
    job = code.call("malloc", PTR, size)
    check(code.compare("icmp ne", job, NULL), RESOURCE_EXHAUSTED, "there is no memory for the addresses of its arrays")
    with _scratch(code, work.scratch) as (scratch, there):
        check(there, RESOURCE_EXHAUSTED, "there is no memory for its intermediate values", job)
        _collect(code, frame, _ADDRESSES.address(code, job))
        for place, value in ((_TASK, work.task), (_TASKS, work.tasks), (_SCRATCH, work.scratch)):
            place.store(code, job, value)
        helpers = _helpers(code, check.api, frame, work.tasks)
        _CLAIM_DIVISOR.store(
            code, job, code.binary("mul", code.binary("add", helpers, 1), calibration.CLAIMS_PER_THREAD)
        )
        _NEXT.store(code, job, constant(0, I64))
        _DONE.store(code, job, constant(0, I64))
        _USERS.store(code, job, code.binary("add", helpers, 1))
        _schedule(code, check.api, frame, job, helpers)
        code.call(_LOOP, VOID, job, scratch)
    _wait(code, job, work.tasks)
    code.call(_RELEASE, VOID, job)


def _collect(code: Code, frame: Reg, addresses: Reg) -> None:
    """Store the addresses of all buffers, results after arguments."""
    args, rets = (struct.address(code, frame) for struct in (ARGS, RETS))

    def write(first: Reg) -> Callable[[Reg, Reg], None]:
        return lambda number, buffer: code.store(DATA.load(code, buffer), code.gep(first, number, "ptr"))

    each(code, args, write(addresses))
    each(code, rets, write(code.gep(addresses, COUNT.load(code, args), "ptr")))


def _helpers(code: Code, api: Reg, frame: Reg, tasks: Reg) -> Reg:
    """Number of threads that may help this thread; 0 if XLA does not tell."""
    number = variable(code, constant(1, I64))
    with code.when(code.compare("icmp sgt", tasks, 1)):
        arguments = argument_struct(code, 32, FRAME_CONTEXT.load(code, frame), number)
        error = invoke(code, NUM_THREADS.load(code, api), arguments)
        with code.when(code.compare("icmp ne", error, NULL)):
            destroy(code, api, error)
            code.store(constant(1, I64), number)
    threads = code.intrinsic("llvm.smin", code.load(I64, number), tasks)
    return code.binary("sub", code.intrinsic("llvm.smax", threads, 1), 1)


def _schedule(code: Code, api: Reg, frame: Reg, job: Reg, helpers: Reg) -> None:
    """Ask the pool to run `_HELP` once for each helper. A helper that is refused is no user of the job."""
    arguments = argument_struct(code, 40, FRAME_CONTEXT.load(code, frame), Reg(f"@{_HELP}", PTR), job)
    schedule = SCHEDULE.load(code, api)

    def ask(number: Reg) -> None:
        error = invoke(code, schedule, arguments)
        with code.when(code.compare("icmp ne", error, NULL)):
            destroy(code, api, error)
            code.call(_RELEASE, VOID, job)

    code.loop(0, helpers, 1, ask)


def _wait(code: Code, job: Reg, tasks: Reg) -> None:
    """Wait until every task has ended. All are claimed by now, and a thread runs a task as soon as it claims it."""
    look, again, give_way, ended = (code.fresh(name) for name in ("look", "again", "yield", "ended"))
    looks = variable(code, constant(0, I64))
    code.branch(look)
    code.label(look)
    done = code.emit(I64, f"load atomic i64, {_DONE.address(code, job)} acquire, align 8")
    code.branch_if(code.compare("icmp sge", done, tasks), ended, again)
    code.label(again)
    pause(code)
    count = code.binary("add", code.load(I64, looks), 1)
    code.store(count, looks)
    code.branch_if(code.compare("icmp ugt", count, calibration.SPINS_BEFORE_YIELD), give_way, look)
    code.label(give_way)
    code.call_external("sched_yield", I32, attributes="nounwind")
    code.branch(look)
    code.label(ended)


# --- every thread ----------------------------------------------------------------------------------------------------


def _loop(code: Code, job: Reg, scratch: Reg) -> None:
    """`void loop(job*, scratch*)`: guided scheduling. Claim and run neighbouring tasks until none are left."""
    claim, run, none = (code.fresh(name) for name in ("claim", "run", "none"))
    task, tasks, addresses = _TASK.load(code, job), _TASKS.load(code, job), _ADDRESSES.address(code, job)
    count = variable(code, constant(0, I64))
    with ieee_mode(code):
        code.branch(claim)
        code.label(claim)
        seen = code.emit(I64, f"load atomic i64, {_NEXT.address(code, job)} monotonic, align 8")
        left = code.intrinsic("llvm.smax", code.binary("sub", tasks, seen), 0)
        portion = code.intrinsic("llvm.umax", code.binary("udiv", left, _CLAIM_DIVISOR.load(code, job)), 1)
        first = code.emit(I64, f"atomicrmw add {_NEXT.address(code, job)}, {portion} monotonic")
        code.branch_if(code.compare("icmp slt", first, tasks), run, none)
        code.label(run)
        end = code.intrinsic("llvm.smin", code.binary("add", first, portion), tasks)

        def one(number: Reg) -> None:
            code.do(f"call void {task.text}({addresses}, {number}, {scratch})")

        code.loop(first, end, 1, one)
        code.store(code.binary("add", code.load(I64, count), code.binary("sub", end, first)), count)
        code.branch(claim)
        code.label(none)
    code.emit(I64, f"atomicrmw add {_DONE.address(code, job)}, {code.load(I64, count)} release")
    code.ret()


def _help(code: Code, job: Reg) -> None:
    """`void help(job*)`, a task of the pool. Without memory for scratch it runs nothing."""
    first = code.emit(I64, f"load atomic i64, {_NEXT.address(code, job)} monotonic, align 8")
    with (
        code.when(code.compare("icmp slt", first, _TASKS.load(code, job))),
        _scratch(code, _SCRATCH.load(code, job)) as (scratch, there),
        code.when(there),
    ):
        code.call(_LOOP, VOID, job, scratch)
    code.call(_RELEASE, VOID, job)
    code.ret()


def _release(code: Code, job: Reg) -> None:
    """`void release(job*)`: the last user frees it."""
    before = code.emit(I64, f"atomicrmw sub {_USERS.address(code, job)}, i64 1 acq_rel")
    with code.when(code.compare("icmp eq", before, 1)):
        code.call("free", VOID, job)
    code.ret()


@contextmanager
def _scratch(code: Code, size: Reg) -> Generator[tuple[Reg, Reg]]:
    """Scratch memory of a thread, aligned to 64 bytes, and true if memory sufficed."""
    large = code.compare("icmp ugt", size, calibration.MAX_STACK_SCRATCH)
    stack = code.emit(PTR, f"alloca i8, {code.select(large, 0, size)}, align 64")
    place = variable(code, NULL)
    with code.when(large):
        code.store(code.call("aligned_alloc", PTR, constant(64, I64), size), place)
    heap = code.load(PTR, place)
    scratch = code.select(large, heap, stack)
    yield scratch, code.compare("icmp ne", scratch, NULL)
    code.call("free", VOID, heap)
