"""The native code between XLA and a program's tasks: what XLA calls, on its own threads, without Python.

It follows the header xla/ffi/api/c_api.h of jaxlib. A call lays out the buffers' addresses in a *job*, asks XLA's
thread pool for helpers and takes part itself. Everybody claims task numbers from one counter, so the call ends however
busy the pool is: it waits only for tasks that others have begun. A helper that starts when all is done, maybe after the
call has returned, touches nothing but the job, which lives as long as somebody counts on it.

XLA's threads flush subnormals to zero. Tasks run by the rules of IEEE 754: every thread switches its mode for them.

All of this is the same for every program and compiled once in a process (`runtime`). A program's own handler
(`with_handler`) only passes on what to run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from tilekern.lower.llvm.ir_builder import I1, I8, I32, I64, PTR, VOID, Code, Module, Reg, Type, constant
from tilekern.lower.llvm.program import TASK, Program
from tilekern.lower.llvm.runtime.fp_mode import ieee_mode, pause
from tilekern.lower.llvm.runtime.huge_pages import prefer_huge
from tilekern.lower.llvm.runtime.machine import Machine

HANDLER = "tilekern_handler"
"""The function of a program's module that XLA calls: `XLA_FFI_Error* (XLA_FFI_CallFrame*)`."""

RUN = "tilekern_run"
"""The function of the runtime that handlers call: `XLA_FFI_Error* (XLA_FFI_CallFrame*, Work)`, see `_Work`."""

API = (0, 4)
"""The version of XLA's interface that this is written for: that of the oldest supported jaxlib."""

_NULL = Reg("null", PTR)
_LOOP, _HELP, _RELEASE, _ERROR = (f"tilekern_{name}" for name in ("loop", "help", "release", "error"))

# What fits the stack of any thread; more scratch comes from the heap.
_MAX_STACK = 16 << 10

# How often a waiting thread looks before it lets others run: some microseconds.
_SPINS = 2000


@dataclass(frozen=True)
class _Field:
    """A field of a struct, which lies so many bytes behind its begin."""

    offset: int
    type: Type

    def address(self, code: Code, struct: Reg) -> Reg:
        return code.gep(struct, self.offset)

    def load(self, code: Code, struct: Reg) -> Reg:
        return code.load(self.type, self.address(code, struct))

    def store(self, code: Code, struct: Reg, value: Reg) -> None:
        code.store(value, self.address(code, struct))


# --- structs of c_api.h; each begins with its size, and may grow at its end ------------------------------------------

_SIZE = _Field(0, I64)
_EXTENSION = _Field(8, PTR)  # extension_start

# XLA_FFI_CallFrame, with the XLA_FFI_Args at 40 and the XLA_FFI_Rets at 80, which are alike
_FRAME_API, _FRAME_CONTEXT, _FRAME_STAGE = _Field(16, PTR), _Field(24, PTR), _Field(32, I32)
_ARGS, _RETS = _Field(40, PTR), _Field(80, PTR)
_COUNT, _BUFFERS = _Field(16, I64), _Field(32, PTR)
_FRAME_BYTES, _ARGS_BYTES = 120, 40
_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE

# XLA_FFI_Buffer
_DTYPE, _DATA, _RANK, _DIMS = _Field(16, I32), _Field(24, PTR), _Field(32, I64), _Field(40, PTR)
_BUFFER_BYTES = 48

# XLA_FFI_Api
_MAJOR, _MINOR = _Field(32, I32), _Field(36, I32)
_ERROR_CREATE, _ERROR_DESTROY = _Field(48, PTR), _Field(64, PTR)
_SCHEDULE, _NUM_THREADS = _Field(136, PTR), _Field(144, PTR)
_API_BYTES = 152

# XLA_FFI_Metadata_Extension and its XLA_FFI_Metadata
_EXTENSION_TYPE, _METADATA = _Field(8, I32), _Field(24, PTR)
_IS_METADATA = 1  # XLA_FFI_Extension_Metadata
_METADATA_MAJOR, _METADATA_MINOR, _TRAITS = _Field(24, I32), _Field(28, I32), _Field(32, I32)
_METADATA_BYTES = 36

# XLA_FFI_Error_Code
_INVALID_ARGUMENT, _RESOURCE_EXHAUSTED, _UNIMPLEMENTED = 3, 8, 12

# XLA_FFI_DataType: the bytes of an element, 0 for what is no whole byte or no data
_ELEMENT_BYTES = {
    1: (1, 2, 6, 19, 20, 23, 24, 25, 28, 29, 33),
    2: (3, 7, 10, 16),
    4: (4, 8, 11),
    8: (5, 9, 12, 15),
    16: (18,),
}
_DTYPES = 34

# --- the job: each counter on a cache line of its own ----------------------------------------------------------------

_NEXT = _Field(0, I64)  # the first task that nobody has claimed
_DONE = _Field(64, I64)  # how many tasks have ended
_USERS = _Field(128, I64)  # how many threads will still touch the job
_TASK, _TASKS, _SCRATCH = _Field(192, PTR), _Field(200, I64), _Field(208, I64)  # what to run
_SHARES = _Field(216, I64)  # a thread claims so many times less than what is left
_ADDRESSES = _Field(256, PTR)  # of the buffers

# How often a thread comes back for more, about: neighbouring tasks touch neighbouring memory, the rest is for balance.
_SHARES_OF_THREAD = 8


@dataclass(frozen=True)
class _Work:
    """What a handler passes on.

    Attributes:
      task: the address of the program's `TASK`.
      tasks: how many there are.
      scratch: the bytes that each thread needs, a multiple of 64.
      name: the kernel's, for errors; ends with a zero.
      zeroed: the numbers of the results that are set to 0 first.
      zeros: how many these are.
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
        numbers = module.data("tilekern_zeroed", np.array(program.zeroed, np.int64)) if program.zeroed else _NULL
        # A load of one element that is masked reads the first bytes instead, also where no tile is kept there.
        scratch = max(-(-program.scratch // 64), 1) * 64
        counts = [constant(number, I64) for number in (program.tasks, scratch, len(program.zeroed))]
        task, name = Reg(f"@{TASK}", PTR), _text(module, program.name)
        code.ret(code.call(RUN, PTR, frame, task, counts[0], counts[1], name, numbers, counts[2]))

    module.function(HANDLER, [("frame", PTR)], build, PTR, "")
    return module


def runtime(machine: Machine) -> Module:
    """The module that has `RUN`."""
    module = Module(machine)
    module.declare("malloc", PTR, [I64], "nounwind")
    module.declare("aligned_alloc", PTR, [I64, I64], "nounwind")
    module.declare("free", VOID, [PTR], "nounwind")
    module.declare("sched_yield", I32, [], "nounwind")
    module.declare("snprintf", I32, [PTR, I64, PTR, Type("...")], "nounwind")
    functions: list[tuple[str, list[tuple[str, Type]], Callable[..., None], Type]] = [
        (_ERROR, [("api", PTR), ("name", PTR), ("text", PTR), ("code", I32)], _error, PTR),
        (_RELEASE, [("job", PTR)], _release, VOID),
        (_LOOP, [("job", PTR), ("scratch", PTR)], _loop, VOID),
        (_HELP, [("job", PTR)], _help, VOID),
        (RUN, [("frame", PTR), *_WORK], _run, PTR),
    ]
    for name, parameters, build, result in functions:
        module.function(name, parameters, build, result, "" if name == RUN else "internal", noalias=False)
    return module


# --- a call ----------------------------------------------------------------------------------------------------------


def _run(code: Code, frame: Reg, *passed: Reg) -> None:
    """`XLA_FFI_Error* run(XLA_FFI_CallFrame*, Work)`."""
    work = _Work(*passed)
    check = _Checks(code, work.name, _FRAME_API.load(code, frame))
    check.size("XLA_FFI_CallFrame", frame, _FRAME_BYTES)
    _answer_metadata(code, check, frame)
    check.size("XLA_FFI_Api", check.api, _API_BYTES)
    check.version()
    stage = _FRAME_STAGE.load(code, frame)
    check(code.compare("icmp eq", stage, _EXECUTE), _INVALID_ARGUMENT, "XLA calls it in another stage than execute")
    for struct in (_ARGS, _RETS):
        check.buffers(struct.address(code, frame))

    _each(code, _RETS.address(code, frame), lambda _, result: _prefer_huge(code, result))

    def zero(number: Reg) -> None:
        result = code.load(I64, code.gep(work.zeroed, number, "i64"))
        _zero(code, check, _item(code, _RETS.address(code, frame), result))

    code.loop(0, work.zeros, 1, zero)
    with code.when(code.compare("icmp ne", work.tasks, 0)):
        _run_tasks(code, check, frame, work)
    code.ret(_NULL)


@dataclass(frozen=True)
class _Checks:
    """What must hold, or else the call returns an error."""

    code: Code
    name: Reg
    api: Reg

    def __call__(self, holds: Reg, number: int, text: str, *garbage: Reg) -> None:
        code = self.code
        good, bad = code.fresh("good"), code.fresh("bad")
        code.branch_if(holds, good, bad)
        code.label(bad)
        for address in garbage:
            code.call("free", VOID, address)
        code.ret(code.call(_ERROR, PTR, self.api, self.name, _text(code.module, text), constant(number, I32)))
        code.label(good)

    def size(self, name: str, struct: Reg, expected: int) -> None:
        found = self.code.compare("icmp uge", _SIZE.load(self.code, struct), expected)
        self(found, _INVALID_ARGUMENT, f"{name} of this jaxlib has less than the expected {expected} bytes")

    def version(self) -> None:
        code, (major, minor) = self.code, API
        same = code.compare("icmp eq", _MAJOR.load(code, self.api), major)
        known = code.compare("icmp sge", _MINOR.load(code, self.api), minor)
        text = f"this jaxlib's version of XLA's FFI is neither {major}.{minor} nor a later {major}.*"
        self(code.binary("and", same, known), _INVALID_ARGUMENT, text)

    def buffers(self, listed: Reg) -> None:
        self.size("XLA_FFI_Args or XLA_FFI_Rets", listed, _ARGS_BYTES)
        _each(self.code, listed, lambda number, buffer: self.size("XLA_FFI_Buffer", buffer, _BUFFER_BYTES))


def _error(code: Code, api: Reg, name: Reg, text: Reg, number: Reg) -> None:
    """`XLA_FFI_Error* error(const XLA_FFI_Api*, const char*, const char*, XLA_FFI_Error_Code)`."""
    size = 512
    message, form = code.alloca(Type(f"[{size} x i8]")), _text(code.module, "tilekern cannot run %s: %s")
    code.do(f"call i32 (ptr, i64, ptr, ...) @snprintf({message}, i64 {size}, {form}, {name}, {text})")
    arguments = _arguments(code, 28, message)
    _Field(24, I32).store(code, arguments, number)
    code.ret(_invoke(code, _ERROR_CREATE.load(code, api), arguments))


def _answer_metadata(code: Code, check: _Checks, frame: Reg) -> None:
    """Return if XLA only asks what the handler is: it wants to know the version before the first call."""
    asked, given, go = code.fresh("asked"), code.fresh("given"), code.fresh("go")
    extension = _EXTENSION.load(code, frame)
    code.branch_if(code.compare("icmp ne", extension, _NULL), asked, go)
    code.label(asked)
    code.branch_if(code.compare("icmp eq", _EXTENSION_TYPE.load(code, extension), _IS_METADATA), given, go)
    code.label(given)
    metadata = _METADATA.load(code, extension)
    check.size("XLA_FFI_Metadata", metadata, _METADATA_BYTES)
    for place, number in zip((_METADATA_MAJOR, _METADATA_MINOR, _TRAITS), (*API, 0), strict=True):
        place.store(code, metadata, constant(number, I32))
    code.ret(_NULL)
    code.label(go)


def _zero(code: Code, check: _Checks, buffer: Reg) -> None:
    """Fill a buffer with zeros."""
    element = _element_bytes(code, buffer)
    check(code.compare("icmp ne", element, 0), _UNIMPLEMENTED, "a result that starts as zeros has an unknown dtype")
    code.module.declare("llvm.memset.p0.i64", VOID, [PTR, I8, I64, I1])
    size = _nbytes(code, buffer, element)
    code.call("llvm.memset.p0.i64", VOID, _DATA.load(code, buffer), constant(0, I8), size, constant(0, I1))


def _prefer_huge(code: Code, buffer: Reg) -> None:
    prefer_huge(code, _DATA.load(code, buffer), _nbytes(code, buffer, _element_bytes(code, buffer)))


def _element_bytes(code: Code, buffer: Reg) -> Reg:
    """The bytes of an element; 0 of an unknown dtype."""
    table = np.zeros(_DTYPES, np.uint8)
    for size, dtypes in _ELEMENT_BYTES.items():
        table[list(dtypes)] = size
    dtype = _DTYPE.load(code, buffer)
    index = code.cast("zext", code.select(code.compare("icmp ult", dtype, _DTYPES), dtype, 0), "i64")
    return code.cast("zext", code.load(I8, code.gep(code.module.data("tilekern_sizes", table), index)), "i64")


def _nbytes(code: Code, buffer: Reg, element: Reg) -> Reg:
    """The bytes of a buffer, whose elements have so many."""
    dims = _DIMS.load(code, buffer)

    def multiply(axis: Reg, size: Reg) -> list[Reg]:
        return [code.binary("mul", size, code.load(I64, code.gep(dims, axis, "i64")))]

    (size,) = code.loop(0, _RANK.load(code, buffer), 1, multiply, element)
    return size


def _run_tasks(code: Code, check: _Checks, frame: Reg, work: _Work) -> None:
    """Run the tasks, with the help of XLA's thread pool if there are several."""
    args, rets = (_COUNT.load(code, struct.address(code, frame)) for struct in (_ARGS, _RETS))
    size = code.binary("add", code.binary("shl", code.binary("add", args, rets), 3), _ADDRESSES.offset)
    job = code.call("malloc", PTR, size)
    check(
        code.compare("icmp ne", job, _NULL), _RESOURCE_EXHAUSTED, "there is no memory for the addresses of its arrays"
    )
    with _scratch(code, work.scratch) as (scratch, there):
        check(there, _RESOURCE_EXHAUSTED, "there is no memory for its intermediate values", job)
        _collect(code, frame, _ADDRESSES.address(code, job))
        for place, value in ((_TASK, work.task), (_TASKS, work.tasks), (_SCRATCH, work.scratch)):
            place.store(code, job, value)
        helpers = _helpers(code, check.api, frame, work.tasks)
        _SHARES.store(code, job, code.binary("mul", code.binary("add", helpers, 1), _SHARES_OF_THREAD))
        _NEXT.store(code, job, constant(0, I64))
        _DONE.store(code, job, constant(0, I64))
        _USERS.store(code, job, code.binary("add", helpers, 1))
        _schedule(code, check.api, frame, job, helpers)
        code.call(_LOOP, VOID, job, scratch)
    _wait(code, job, work.tasks)
    code.call(_RELEASE, VOID, job)


def _helpers(code: Code, api: Reg, frame: Reg, tasks: Reg) -> Reg:
    """How many threads may take part besides this one; none if XLA does not tell."""
    number = _variable(code, constant(1, I64))
    with code.when(code.compare("icmp sgt", tasks, 1)):
        arguments = _arguments(code, 32, _FRAME_CONTEXT.load(code, frame), number)
        error = _invoke(code, _NUM_THREADS.load(code, api), arguments)
        with code.when(code.compare("icmp ne", error, _NULL)):
            _destroy(code, api, error)
            code.store(constant(1, I64), number)
    threads = code.intrinsic("llvm.smin", code.load(I64, number), tasks)
    return code.binary("sub", code.intrinsic("llvm.smax", threads, 1), 1)


def _schedule(code: Code, api: Reg, frame: Reg, job: Reg, helpers: Reg) -> None:
    """Ask the pool to run `_HELP`; one that it refuses does not count on the job."""
    arguments = _arguments(code, 40, _FRAME_CONTEXT.load(code, frame), Reg(f"@{_HELP}", PTR), job)
    schedule = _SCHEDULE.load(code, api)

    def ask(number: Reg) -> None:
        error = _invoke(code, schedule, arguments)
        with code.when(code.compare("icmp ne", error, _NULL)):
            _destroy(code, api, error)
            code.call(_RELEASE, VOID, job)

    code.loop(0, helpers, 1, ask)


def _wait(code: Code, job: Reg, tasks: Reg) -> None:
    """Until every task has ended. What is waited for runs already: nobody claims a task and then sleeps."""
    look, again, other, ended = (code.fresh(name) for name in ("look", "again", "yield", "ended"))
    looks = _variable(code, constant(0, I64))
    code.branch(look)
    code.label(look)
    done = code.emit(I64, f"load atomic i64, {_DONE.address(code, job)} acquire, align 8")
    code.branch_if(code.compare("icmp sge", done, tasks), ended, again)
    code.label(again)
    pause(code)
    count = code.binary("add", code.load(I64, looks), 1)
    code.store(count, looks)
    code.branch_if(code.compare("icmp ugt", count, _SPINS), other, look)
    code.label(other)
    code.call("sched_yield", I32)
    code.branch(look)
    code.label(ended)


# --- every thread ----------------------------------------------------------------------------------------------------


def _loop(code: Code, job: Reg, scratch: Reg) -> None:
    """`void loop(job*, scratch*)`: run tasks as long as there are any, a few neighbours at a time, in the end one."""
    claim, run, none = (code.fresh(name) for name in ("claim", "run", "none"))
    task, tasks, addresses = _TASK.load(code, job), _TASKS.load(code, job), _ADDRESSES.address(code, job)
    count = _variable(code, constant(0, I64))
    with ieee_mode(code):
        code.branch(claim)
        code.label(claim)
        seen = code.emit(I64, f"load atomic i64, {_NEXT.address(code, job)} monotonic, align 8")
        left = code.intrinsic("llvm.smax", code.binary("sub", tasks, seen), 0)
        portion = code.intrinsic("llvm.umax", code.binary("udiv", left, _SHARES.load(code, job)), 1)
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
    """`void help(job*)`, the pool's task. Without memory it leaves the work to the others."""
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
    """Memory of a thread's own, aligned to 64 bytes, and whether there was enough."""
    large = code.compare("icmp ugt", size, _MAX_STACK)
    stack = code.emit(PTR, f"alloca i8, {code.select(large, 0, size)}, align 64")
    place = _variable(code, _NULL)
    with code.when(large):
        code.store(code.call("aligned_alloc", PTR, constant(64, I64), size), place)
    heap = code.load(PTR, place)
    scratch = code.select(large, heap, stack)
    yield scratch, code.compare("icmp ne", scratch, _NULL)
    code.call("free", VOID, heap)


# --- structs ---------------------------------------------------------------------------------------------------------


def _arguments(code: Code, size: int, *pointers: Reg) -> Reg:
    """The struct of arguments of a function of XLA's: its size, no extension, then pointers."""
    struct = code.alloca(Type(f"[{size} x i8]"))
    _SIZE.store(code, struct, constant(size, I64))
    _EXTENSION.store(code, struct, _NULL)
    for number, pointer in enumerate(pointers):
        _Field(16 + 8 * number, PTR).store(code, struct, pointer)
    return struct


def _variable(code: Code, value: Reg) -> Reg:
    """A place on the stack that holds a value at first."""
    place = code.alloca(value.type)
    code.store(value, place)
    return place


def _invoke(code: Code, function: Reg, arguments: Reg) -> Reg:
    """Call a function of XLA's: its XLA_FFI_Error*, null if all went well."""
    return code.emit(PTR, f"call ptr {function.text}({arguments})")


def _destroy(code: Code, api: Reg, error: Reg) -> None:
    code.do(f"call void {_ERROR_DESTROY.load(code, api).text}({_arguments(code, 24, error)})")


def _item(code: Code, listed: Reg, number: Reg | int) -> Reg:
    """A buffer of the arguments or of the results."""
    return code.load(PTR, code.gep(_BUFFERS.load(code, listed), number, "ptr"))


def _each(code: Code, listed: Reg, body: Callable[[Reg, Reg], None]) -> None:
    """Emit `body(number, buffer)` for the arguments or for the results."""

    def emit(number: Reg) -> None:
        body(number, _item(code, listed, number))

    code.loop(0, _COUNT.load(code, listed), 1, emit)


def _collect(code: Code, frame: Reg, addresses: Reg) -> None:
    """Write down where the buffers are, results behind arguments."""
    args, rets = (struct.address(code, frame) for struct in (_ARGS, _RETS))

    def write(first: Reg) -> Callable[[Reg, Reg], None]:
        return lambda number, buffer: code.store(_DATA.load(code, buffer), code.gep(first, number, "ptr"))

    _each(code, args, write(addresses))
    _each(code, rets, write(code.gep(addresses, _COUNT.load(code, args), "ptr")))


def _text(module: Module, text: str) -> Reg:
    """The address of a string, which ends with a zero."""
    return module.data("tilekern_text", np.frombuffer(f"{text}\0".encode(), np.uint8))
