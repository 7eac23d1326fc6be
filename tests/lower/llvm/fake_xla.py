"""A stand-in for XLA that calls handlers with the structs of c_api.h: for what jaxlib itself never does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

P, I64, I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
FUNCTION = ctypes.CFUNCTYPE(P, P)
ERROR = 0x1234  # what a function of the API returns when it fails
DTYPES = {"float32": 11, "int8": 2, "int32": 4, "int64": 5, "complex64": 15}


def struct(*fields: tuple[str, Any]) -> type[Any]:
    """A struct of the API. Its size comes first, then its extension, or in one case the size of a nested struct."""
    return type("Struct", (ctypes.Structure,), {"_fields_": [("size", I64), ("extension", P), *fields]})


Buffer = struct(("dtype", I32), ("data", P), ("rank", I64), ("dims", P))
Api = struct(("version", I64 * 2), ("major", I32), ("minor", I32), ("internal", P), *((f"f{n}", P) for n in range(20)))
Listed = struct(("count", I64), ("types", P), ("buffers", P))
Span = type("Span", (ctypes.Structure,), {"_fields_": [("text", ctypes.c_char_p), ("length", I64)]})
Attrs = struct(("count", I64), ("types", P), ("names", P), ("values", P))
Frame = struct(("api", P), ("context", P), ("stage", I32), ("args", Listed), ("rets", Listed), ("attrs", Attrs),
               ("future", P))  # fmt: skip
State = struct(("context", P), ("stage", I32), ("type", P), ("state", P))
Metadata = struct(("version", I64), ("major", I32), ("minor", I32), ("traits", I32), ("state", I64))
Extension = struct(("next", P), ("metadata", P))


class FakeError(Exception):
    """The error that a handler returned."""


@dataclass
class FakeXla:
    """Behaviour of XLA in a call.

    Attributes:
      threads: what the pool says, None if there is none.
      schedule: what the pool does with a task; whether it takes it.
      changes: fields with wrong values, "api.major" for one.
      key: the attribute that names a kernel.
      state: of the call; None before it is set.
    """

    threads: int | None = 1
    schedule: Callable[[Callable[[], object]], bool] = lambda task: False
    changes: dict[str, int] = field(default_factory=dict)
    key: str = ""
    state: int | None = None
    scheduled: int = 0
    destroyed: int = 0
    _errors: list[str] = field(default_factory=list)

    def call(self, address: int, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], **more: Any) -> None:
        """Call a handler, in the stage execute by default."""
        keep: list[Any] = []
        api = self._api(keep)
        frame = Frame(
            ctypes.sizeof(Frame) - 8, more.get("extension"), ctypes.addressof(api), 0x77, more.get("stage", 3)
        )
        frame.args, frame.rets = self._listed(inputs, keep), self._listed(outputs, keep)
        frame.attrs = self._attrs(keep)
        owners = {"api": api, "frame": frame, "args": frame.args, "rets": frame.rets, "attrs": frame.attrs}
        for name, value in self.changes.items():
            owner = owners.get(name.split(".")[0])
            if owner is not None:
                setattr(owner, name.split(".")[1], value)
        if FUNCTION(address)(ctypes.addressof(frame)):
            raise FakeError(self._errors[-1] if self._errors else "of XLA's own")

    def instantiate(self, address: int) -> None:
        """Call a handler in the stage instantiate."""
        self.call(address, [], [], stage=0)

    def metadata(self, address: int, size: int = 36) -> tuple[int, ...]:
        """A handler's metadata: the version that it is for, its traits, the type of its state."""
        metadata = Metadata(size, major=99, minor=99, traits=99, state=99)
        extension = Extension(32, 1, 0, ctypes.addressof(metadata))
        self.call(address, [], [], extension=ctypes.addressof(extension))
        return metadata.major, metadata.minor, metadata.traits, metadata.state

    def _listed(self, arrays: Sequence[np.ndarray], keep: list[Any]) -> Any:
        pointers = (P * len(arrays))()
        for number, array in enumerate(arrays):
            dims = (I64 * array.ndim)(*array.shape)
            dtype = self.changes.get("dtype", DTYPES[str(array.dtype)])
            size = self.changes.get("buffer.size", ctypes.sizeof(Buffer))
            buffer = Buffer(size, None, dtype, array.ctypes.data, array.ndim, ctypes.addressof(dims))
            pointers[number] = ctypes.addressof(buffer)
            keep += [dims, buffer]
        keep.append(pointers)
        return Listed(ctypes.sizeof(Listed), None, len(arrays), None, ctypes.addressof(pointers))

    def _attrs(self, keep: list[Any]) -> Any:
        text = self.key.encode()
        span = Span(text, self.changes.get("key.length", len(text)))
        types, values = (I32 * 1)(self.changes.get("key.type", 4)), (P * 1)(ctypes.addressof(span))
        keep += [text, span, types, values]
        return Attrs(ctypes.sizeof(Attrs), None, 1, ctypes.addressof(types), None, ctypes.addressof(values))

    def _api(self, keep: list[Any]) -> Any:
        functions = {0: self._create, 2: self._destroy, 7: self._set, 8: self._get, 11: self._schedule, 12: self._count}
        api = Api(ctypes.sizeof(Api), major=0, minor=4)
        for number, function in functions.items():
            native = FUNCTION(function)
            keep.append(native)
            setattr(api, f"f{number}", ctypes.cast(native, P).value)
        return api

    def _create(self, arguments: int) -> int:
        given = struct(("message", ctypes.c_char_p), ("code", I32)).from_address(arguments)
        self._errors.append(f"{given.code}: {given.message.decode()}")
        return ERROR

    def _destroy(self, arguments: int) -> int:
        assert struct(("error", P)).from_address(arguments).error == ERROR
        self.destroyed += 1
        return 0

    def _set(self, arguments: int) -> int:
        given = State.from_address(arguments)
        assert (given.context, given.stage) == (0x77, 0)
        if self.state is not None:
            return ERROR
        self.state = given.state
        return 0

    def _get(self, arguments: int) -> int:
        given = State.from_address(arguments)
        assert (given.context, given.stage) == (0x77, 0)
        if self.state is None:
            return ERROR
        given.state = self.state
        return 0

    def _count(self, arguments: int) -> int:
        given = struct(("context", P), ("place", P)).from_address(arguments)
        assert given.context == 0x77
        I64.from_address(given.place).value = 64 if self.threads is None else self.threads
        return ERROR if self.threads is None else 0

    def _schedule(self, arguments: int) -> int:
        given = struct(("context", P), ("task", P), ("data", P)).from_address(arguments)
        assert given.context == 0x77
        task, data = ctypes.CFUNCTYPE(None, P)(given.task), given.data
        self.scheduled += 1
        return 0 if self.schedule(lambda: task(data)) else ERROR
