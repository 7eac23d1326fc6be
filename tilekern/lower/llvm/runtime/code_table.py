"""The table of loaded kernels, and the two FFI handlers that serve all kernels.

XLA never forgets a handler, so a kernel must not have its own handler, or its machine code could not be unloaded. All
kernels share two handlers. A custom call names its kernel by a string attribute, the *key*.

- `INSTANTIATE`: XLA makes an executable. The handler finds the entry of the key and gives it to XLA as the state of the
  call. The executable is a user of the entry.
- `EXECUTE`: XLA runs the call. The handler gets the entry from XLA and calls the kernel's own handler.
- `RELEASE`: XLA destroys the executable, and so the state. The executable is no user any more.

Python is a user, too, while it may lower calls of the kernel. An entry without users can be removed (`REMOVE`). Then
Python unloads the code. The memory of entries is reused and never freed, so any thread may search the table at any
time. There are no locks: XLA's threads do not wait for Python, and a fork leaves no lock behind that nobody holds.
"""

from __future__ import annotations

from collections.abc import Callable

from tilekern.lower.llvm.ir_builder import Code, Module
from tilekern.lower.llvm.ir_values import I32, I64, PTR, VOID, Reg, Type, constant
from tilekern.lower.llvm.runtime.ffi_structs import (
    API_BYTES,
    ATTR_TYPES,
    ATTR_VALUES,
    ATTRS,
    ATTRS_BYTES,
    COUNT,
    FRAME_API,
    FRAME_BYTES,
    FRAME_CONTEXT,
    FRAME_STAGE,
    FRAME_WITH_ATTRS_BYTES,
    INSTANTIATING,
    INVALID_ARGUMENT,
    NOT_FOUND,
    NULL,
    SPAN_SIZE,
    SPAN_TEXT,
    STATE_GET,
    STATE_SET,
    STRING,
    Checks,
    Field,
    answer_metadata,
    argument_struct,
    invoke,
    string,
)

INSTANTIATE, EXECUTE = "tilekern_instantiate", "tilekern_execute"
"""The handlers: `XLA_FFI_Error* (XLA_FFI_CallFrame*)`."""

FIND = "tilekern_find_code"
"""`entry* (const char* key)`: the entry of a key, with one more user; null if there is none."""

RELEASE = "tilekern_release_code"
"""`void (entry*)`: one user less. Any thread may call it at any time."""

ADD = "tilekern_add_code"
"""`entry* (const char* key, handler)`: a new entry with one user, null without memory. One thread at a time."""

REMOVE = "tilekern_remove_code"
"""`int64 (entry*)`: 1 if the entry had no user and is removed now, else 0. One thread at a time."""

TYPE_ID = "tilekern_type_id"
"""`int64* ()`: the address of XLA's number for the type of states, which is 0 until the type is registered."""

EXPORTED = (INSTANTIATE, EXECUTE, FIND, RELEASE, ADD, REMOVE, TYPE_ID)
"""The functions that Python and XLA call."""

KEY_BYTES = 32
"""The length of a key."""

# An entry.
_USERS, _HANDLER, _NEXT, _KEY = Field(0, I64), Field(8, PTR), Field(16, I64), Field(24, PTR)
_ENTRY_BYTES = _KEY.offset + KEY_BYTES
_REMOVED = -1  # for the number of users

# XLA_FFI_State_Set_Args and XLA_FFI_State_Get_Args
_STATE_BYTES = 48
_STATE_STAGE, _STATE_TYPE, _STATE = Field(24, I32), Field(32, PTR), Field(40, PTR)


def define_code_table(module: Module) -> None:
    """Add the table's functions to a module."""
    module.declare("malloc", PTR, [I64], "nounwind")
    module.declare("memcmp", I32, [PTR, PTR, I64], "nounwind")
    functions: list[tuple[str, list[tuple[str, Type]], Callable[..., None], Type]] = [
        (TYPE_ID, [], _type_id, PTR),
        (RELEASE, [("record", PTR)], _release, VOID),
        (FIND, [("key", PTR)], _find, PTR),
        (ADD, [("key", PTR), ("handler", PTR)], _add, PTR),
        (REMOVE, [("record", PTR)], _remove, I64),
        (INSTANTIATE, [("frame", PTR)], _instantiate, PTR),
        (EXECUTE, [("frame", PTR)], _execute, PTR),
    ]
    for name, parameters, build, result in functions:
        module.function(name, parameters, build, result, "", noalias=False)


# --- the table -------------------------------------------------------------------------------------------------------


def _first(code: Code) -> Reg:
    """The place of the first entry's address, as an integer."""
    return code.module.variable("tilekern_first_entry", I64)


def _type(code: Code) -> Reg:
    """The place of XLA's number for the type of states."""
    return code.module.variable("tilekern_state_type", I64)


def _type_id(code: Code) -> None:
    code.ret(_type(code))


def _release(code: Code, entry: Reg) -> None:
    code.emit(I64, f"atomicrmw sub {_USERS.address(code, entry)}, i64 1 acq_rel")
    code.ret()


def _each_entry(code: Code, body: Callable[[Reg], None]) -> None:
    """Emit `body(entry)` for every entry; the body may return from the function."""
    look, at_entry, done = (code.fresh(name) for name in ("look", "found", "done"))
    place = code.alloca(PTR)
    code.store(_first(code), place)
    code.branch(look)
    code.label(look)
    address = code.emit(I64, f"load atomic i64, {code.load(PTR, place)} acquire, align 8")
    code.branch_if(code.compare("icmp ne", address, 0), at_entry, done)
    code.label(at_entry)
    entry = code.cast("inttoptr", address, "ptr")
    code.store(_NEXT.address(code, entry), place)
    body(entry)
    code.branch(look)
    code.label(done)


def _has_key(code: Code, entry: Reg, key: Reg) -> Reg:
    differs = code.call("memcmp", I32, _KEY.address(code, entry), key, constant(KEY_BYTES, I64))
    return code.compare("icmp eq", differs, 0)


def _find(code: Code, key: Reg) -> None:
    def visit(entry: Reg) -> None:
        with code.when(_has_key(code, entry, key)), code.when(_retained(code, entry)):
            # The entry may have been removed and reused since its key was read. With a user it stays as it is.
            with code.when(_has_key(code, entry, key)):
                code.ret(entry)
                code.label(code.fresh("unreachable"))
            code.call(RELEASE, VOID, entry)

    _each_entry(code, visit)
    code.ret(NULL)


def _retained(code: Code, entry: Reg) -> Reg:
    """Add a user, unless the entry is removed; true if it is added."""
    users, again, try_, no, done = _USERS.address(code, entry), *(code.fresh(n) for n in ("again", "try", "no", "done"))
    code.branch(again)
    code.label(again)
    seen = code.emit(I64, f"load atomic i64, {users} monotonic, align 8")
    code.branch_if(code.compare("icmp eq", seen, _REMOVED), no, try_)
    code.label(try_)
    swapped = _swap(code, users, seen, code.binary("add", seen, 1))
    code.branch_if(swapped, done, again)
    code.label(no)
    code.branch(done)
    code.label(done)
    return code.emit(swapped.type, f"phi i1 [true, %{try_}], [false, %{no}]")


def _swap(code: Code, place: Reg, old: Reg, new: Reg) -> Reg:
    """Replace the number at a place if it still is `old`; true if it was."""
    pair = code.emit(Type("{ i64, i1 }"), f"cmpxchg {place}, {old}, {new} acq_rel monotonic")
    return code.emit(Type("i1"), f"extractvalue {pair}, 1")


def _add(code: Code, key: Reg, handler: Reg) -> None:
    def reuse(entry: Reg) -> None:
        users = code.emit(I64, f"load atomic i64, {_USERS.address(code, entry)} acquire, align 8")
        with code.when(code.compare("icmp eq", users, _REMOVED)):
            _fill(code, entry, key, handler)
            code.ret(entry)
            code.label(code.fresh("unreachable"))

    _each_entry(code, reuse)
    entry = code.call("malloc", PTR, constant(_ENTRY_BYTES, I64))
    with code.when(code.compare("icmp ne", entry, NULL)):
        _NEXT.store(code, entry, code.load(I64, _first(code)))
        _fill(code, entry, key, handler)
        address = code.cast("ptrtoint", entry, "i64")
        code.do(f"store atomic {address}, {_first(code)} release, align 8")
    code.ret(entry)


def _fill(code: Code, entry: Reg, key: Reg, handler: Reg) -> None:
    code.copy(_KEY.address(code, entry), key, KEY_BYTES)
    _HANDLER.store(code, entry, handler)
    code.do(f"store atomic i64 1, {_USERS.address(code, entry)} release, align 8")


def _remove(code: Code, entry: Reg) -> None:
    swapped = _swap(code, _USERS.address(code, entry), constant(0, I64), constant(_REMOVED, I64))
    code.ret(code.cast("zext", swapped, "i64"))


# --- the handlers ----------------------------------------------------------------------------------------------------


def _instantiate(code: Code, frame: Reg) -> None:
    check = _checks(code, frame)
    check.size("XLA_FFI_CallFrame", frame, FRAME_BYTES)
    answer_metadata(code, check, frame, _type(code))
    check.size("XLA_FFI_Api", check.api, API_BYTES)
    check.version()
    same = code.compare("icmp eq", FRAME_STAGE.load(code, frame), INSTANTIATING)
    check(same, INVALID_ARGUMENT, "XLA calls it in another stage than instantiate")
    check.size("XLA_FFI_CallFrame", frame, FRAME_WITH_ATTRS_BYTES)
    entry = code.call(FIND, PTR, _key(code, check, ATTRS.address(code, frame)))
    check(
        code.compare("icmp ne", entry, NULL),
        NOT_FOUND,
        "its machine code is not loaded. A program can be compiled in the process that lowered it, and as long as the "
        "lowered program lives. Lower it again",
    )
    arguments = _state_arguments(code, frame)
    _STATE.store(code, arguments, entry)
    error = invoke(code, STATE_SET.load(code, check.api), arguments)
    with code.when(code.compare("icmp ne", error, NULL)):
        code.call(RELEASE, VOID, entry)
    code.ret(error)


def _execute(code: Code, frame: Reg) -> None:
    check = _checks(code, frame)
    check.size("XLA_FFI_CallFrame", frame, FRAME_BYTES)
    answer_metadata(code, check, frame)
    # `INSTANTIATE` has checked the interface, and the kernel's handler checks it again.
    arguments = _state_arguments(code, frame)
    error = invoke(code, STATE_GET.load(code, check.api), arguments)
    with code.when(code.compare("icmp ne", error, NULL)):
        code.ret(error)
        code.label(code.fresh("unreachable"))
    handler = _HANDLER.load(code, _STATE.load(code, arguments))
    code.ret(code.emit(PTR, f"call ptr {handler.text}({frame})"))


def _checks(code: Code, frame: Reg) -> Checks:
    return Checks(code, string(code.module, "a kernel"), FRAME_API.load(code, frame))


def _key(code: Code, check: Checks, attributes: Reg) -> Reg:
    """The key, which is the only attribute of a call."""
    check.size("XLA_FFI_Attrs", attributes, ATTRS_BYTES)
    text = "it has other attributes than a key"
    check(code.compare("icmp eq", COUNT.load(code, attributes), 1), INVALID_ARGUMENT, text)
    type = code.load(I32, ATTR_TYPES.load(code, attributes))
    check(code.compare("icmp eq", type, STRING), INVALID_ARGUMENT, text)
    span = code.load(PTR, ATTR_VALUES.load(code, attributes))
    check(code.compare("icmp eq", SPAN_SIZE.load(code, span), KEY_BYTES), INVALID_ARGUMENT, text)
    return SPAN_TEXT.load(code, span)


def _state_arguments(code: Code, frame: Reg) -> Reg:
    """The arguments to set or get the state, which belongs to the stage instantiate."""
    arguments = argument_struct(code, _STATE_BYTES, FRAME_CONTEXT.load(code, frame))
    _STATE_STAGE.store(code, arguments, constant(INSTANTIATING, I32))
    _STATE_TYPE.store(code, arguments, _type(code))
    _STATE.store(code, arguments, NULL)
    return arguments
