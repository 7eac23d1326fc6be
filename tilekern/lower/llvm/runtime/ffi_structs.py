"""The structs of XLA's FFI, and code that reads, checks and fills them.

The source is the header xla/ffi/api/c_api.h of jaxlib. Each struct begins with its size, and may grow at its end.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilekern.ir.records import record
from tilekern.lower.llvm.ir_builder import Code, Module
from tilekern.lower.llvm.ir_values import I32, I64, PTR, VOID, Reg, Type, constant

API = (0, 4)
"""The version of XLA's interface that this is written for: that of the oldest supported jaxlib."""

NULL = Reg("null", PTR)

ERROR = "tilekern_error"
"""`XLA_FFI_Error* (const XLA_FFI_Api*, const char* name, const char* text, XLA_FFI_Error_Code)`."""


@record
class Field:
    """A field of a struct.

    Attributes:
      offset: bytes from the begin of the struct.
      type: of its value.
    """

    offset: int
    type: Type

    def address(self, code: Code, struct: Reg) -> Reg:
        """The field's address in a struct."""
        return code.gep(struct, self.offset)

    def load(self, code: Code, struct: Reg) -> Reg:
        """Load the field."""
        return code.load(self.type, self.address(code, struct))

    def store(self, code: Code, struct: Reg, value: Reg) -> None:
        """Store to the field."""
        code.store(value, self.address(code, struct))


# --- structs of c_api.h ----------------------------------------------------------------------------------------------

SIZE = Field(0, I64)
EXTENSION = Field(8, PTR)  # extension_start

# XLA_FFI_CallFrame: the XLA_FFI_Args lie at 40, the XLA_FFI_Rets at 80, the XLA_FFI_Attrs at 120
FRAME_API, FRAME_CONTEXT, FRAME_STAGE = Field(16, PTR), Field(24, PTR), Field(32, I32)
ARGS, RETS, ATTRS = Field(40, PTR), Field(80, PTR), Field(120, PTR)
FRAME_BYTES, FRAME_WITH_ATTRS_BYTES = 120, 168

# XLA_FFI_ExecutionStage
INSTANTIATING, EXECUTING = 0, 3

# XLA_FFI_Args and XLA_FFI_Rets
COUNT, ITEMS = Field(16, I64), Field(32, PTR)
ARGS_BYTES = 40

# XLA_FFI_Attrs, which begins like these
ATTR_TYPES, ATTR_VALUES = Field(24, PTR), Field(40, PTR)
ATTRS_BYTES = 48
STRING = 4  # XLA_FFI_AttrType_STRING; its value is an XLA_FFI_ByteSpan
SPAN_TEXT, SPAN_SIZE = Field(0, PTR), Field(8, I64)

# XLA_FFI_Buffer
DTYPE, DATA, RANK, DIMS = Field(16, I32), Field(24, PTR), Field(32, I64), Field(40, PTR)
BUFFER_BYTES = 48

# XLA_FFI_Api
MAJOR, MINOR = Field(32, I32), Field(36, I32)
ERROR_CREATE, ERROR_DESTROY = Field(48, PTR), Field(64, PTR)
STATE_SET, STATE_GET = Field(104, PTR), Field(112, PTR)
SCHEDULE, NUM_THREADS = Field(136, PTR), Field(144, PTR)
API_BYTES = 152

# XLA_FFI_Metadata_Extension and its XLA_FFI_Metadata
EXTENSION_TYPE, METADATA = Field(8, I32), Field(24, PTR)
IS_METADATA = 1  # XLA_FFI_Extension_Metadata
METADATA_MAJOR, METADATA_MINOR, TRAITS = Field(24, I32), Field(28, I32), Field(32, I32)
METADATA_STATE_TYPE = Field(40, I64)
METADATA_BYTES = 36  # the header's size of the struct leaves out its last field, the type of states

# XLA_FFI_Error_Code
INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED, UNIMPLEMENTED = 3, 5, 8, 12

# XLA_FFI_DataType: the types with elements of so many bytes; the others have no data, or elements of less than a byte
ELEMENT_BYTES = {
    1: (1, 2, 6, 19, 20, 23, 24, 25, 28, 29, 33),
    2: (3, 7, 10, 16),
    4: (4, 8, 11),
    8: (5, 9, 12, 15),
    16: (18,),
}
DTYPES = 34


@record
class Checks:
    """Checks of a handler. If one fails, the handler returns an error.

    Attributes:
      code: of the handler.
      name: of the kernel, for errors; ends with a zero.
      api: the XLA_FFI_Api.
    """

    code: Code
    name: Reg
    api: Reg

    def __call__(self, holds: Reg, number: int, text: str, *garbage: Reg) -> None:
        """Return an error with an XLA_FFI_Error_Code and a text, and free the garbage, unless `holds`."""
        code = self.code
        good, bad = code.fresh("good"), code.fresh("bad")
        code.branch_if(holds, good, bad)
        code.label(bad)
        for address in garbage:
            code.call("free", VOID, address)
        code.ret(code.call(ERROR, PTR, self.api, self.name, string(code.module, text), constant(number, I32)))
        code.label(good)

    def size(self, name: str, struct: Reg, expected: int) -> None:
        """Check that a struct has at least the expected bytes."""
        fits = self.code.compare("icmp uge", SIZE.load(self.code, struct), expected)
        self(fits, INVALID_ARGUMENT, f"{name} of this jaxlib has less than the expected {expected} bytes")

    def version(self) -> None:
        """Check the version of the API."""
        code, (major, minor) = self.code, API
        same = code.compare("icmp eq", MAJOR.load(code, self.api), major)
        recent = code.compare("icmp sge", MINOR.load(code, self.api), minor)
        text = f"this jaxlib's version of XLA's FFI is neither {major}.{minor} nor a later {major}.*"
        self(code.binary("and", same, recent), INVALID_ARGUMENT, text)

    def buffers(self, listed: Reg) -> None:
        """Check the sizes of XLA_FFI_Args or XLA_FFI_Rets and of their buffers."""
        self.size("XLA_FFI_Args or XLA_FFI_Rets", listed, ARGS_BYTES)
        each(self.code, listed, lambda number, buffer: self.size("XLA_FFI_Buffer", buffer, BUFFER_BYTES))


def emit_error(code: Code, api: Reg, name: Reg, text: Reg, number: Reg) -> None:
    """`XLA_FFI_Error* error(const XLA_FFI_Api*, const char*, const char*, XLA_FFI_Error_Code)`."""
    size = 512
    message, form = code.alloca(Type(f"[{size} x i8]")), string(code.module, "tilekern cannot run %s: %s")
    code.do(f"call i32 (ptr, i64, ptr, ...) @snprintf({message}, i64 {size}, {form}, {name}, {text})")
    arguments = argument_struct(code, 28, message)
    Field(24, I32).store(code, arguments, number)
    code.ret(invoke(code, ERROR_CREATE.load(code, api), arguments))


def answer_metadata(code: Code, check: Checks, frame: Reg, state_type: Reg = NULL) -> None:
    """Return if XLA only asks for the handler's metadata. XLA checks the version before the first call.

    Args:
      code: of the handler.
      check: its checks.
      frame: its argument.
      state_type: the address of the number of the type of states, for a handler that sets the state.
    """
    asked, answer, go = code.fresh("asked"), code.fresh("given"), code.fresh("go")
    extension = EXTENSION.load(code, frame)
    code.branch_if(code.compare("icmp ne", extension, NULL), asked, go)
    code.label(asked)
    code.branch_if(code.compare("icmp eq", EXTENSION_TYPE.load(code, extension), IS_METADATA), answer, go)
    code.label(answer)
    metadata = METADATA.load(code, extension)
    check.size("XLA_FFI_Metadata", metadata, METADATA_BYTES)
    for place, number in zip((METADATA_MAJOR, METADATA_MINOR, TRAITS), (*API, 0), strict=True):
        place.store(code, metadata, constant(number, I32))
    if state_type != NULL:
        METADATA_STATE_TYPE.store(code, metadata, code.load(I64, state_type))
    code.ret(NULL)
    code.label(go)


# --- code ------------------------------------------------------------------------------------------------------------


def argument_struct(code: Code, size: int, *pointers: Reg) -> Reg:
    """A struct of arguments for a function of XLA: its size, no extension, then pointers."""
    struct = code.alloca(Type(f"[{size} x i8]"))
    SIZE.store(code, struct, constant(size, I64))
    EXTENSION.store(code, struct, NULL)
    for number, pointer in enumerate(pointers):
        Field(16 + 8 * number, PTR).store(code, struct, pointer)
    return struct


def variable(code: Code, value: Reg) -> Reg:
    """A place on the stack, with a first value."""
    place = code.alloca(value.type)
    code.store(value, place)
    return place


def invoke(code: Code, function: Reg, arguments: Reg) -> Reg:
    """Call a function of XLA: its XLA_FFI_Error*, null if it succeeds."""
    return code.emit(PTR, f"call ptr {function.text}({arguments})")


def destroy(code: Code, api: Reg, error: Reg) -> None:
    """Destroy an XLA_FFI_Error."""
    code.do(f"call void {ERROR_DESTROY.load(code, api).text}({argument_struct(code, 24, error)})")


def item(code: Code, listed: Reg, number: Reg | int) -> Reg:
    """A buffer of the arguments or of the results."""
    return code.load(PTR, code.gep(ITEMS.load(code, listed), number, "ptr"))


def each(code: Code, listed: Reg, body: Callable[[Reg, Reg], None]) -> None:
    """Emit `body(number, buffer)` for the arguments or for the results."""

    def emit(number: Reg) -> None:
        body(number, item(code, listed, number))

    code.loop(0, COUNT.load(code, listed), 1, emit)


def string(module: Module, text: str) -> Reg:
    """The address of a string, which ends with a zero."""
    return module.data("tilekern_text", np.frombuffer(f"{text}\0".encode(), np.uint8))
