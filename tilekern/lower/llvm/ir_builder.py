"""LLVM IR as text: modules, functions and their instructions.

Text, because llvmlite's builder has no vectors of bfloat16, and is slower than pasting strings together. Instructions
work on scalars and on vectors alike; a Python number as an operand stands for a constant of the other operand's type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from tilekern.lower.llvm.ir_values import I1, I8, I32, I64, PTR, VOID, Operand, Reg, Type, constant

if TYPE_CHECKING:
    from collections.abc import Generator

    from tilekern.lower.llvm.debug_lines import DebugLines
    from tilekern.lower.llvm.runtime.machine import Machine
    from tilekern.source import Loc

_NOWHERE = nullcontext()


class Module:
    """A module of LLVM IR as text.

    Attributes:
      machine: the machine it is for.
      lines: the places of instructions; None without debug information.
    """

    def __init__(self, machine: Machine, lines: DebugLines | None = None) -> None:
        self.machine, self.lines = machine, lines
        self._declared: dict[str, str] = {}
        self._globals: list[str] = []
        self._functions: dict[str, str] = {}
        self._names: dict[str, int] = {}

    def declare(self, name: str, result: Type, parameters: Sequence[Type], attributes: str = "") -> None:
        """Declare an external function; declaring it again has no effect."""
        listed = ", ".join(map(str, parameters))
        self._declared[name] = f"declare {result} @{name}({listed}) {attributes}".rstrip()

    def data(self, name: str, array: np.ndarray[Any, Any]) -> Reg:
        """The address of a constant array, aligned for vectors."""
        name = self.fresh(name)
        escaped = "".join(f"\\{byte:02X}" for byte in np.ascontiguousarray(array).tobytes())
        self._globals.append(f'@{name} = private constant [{len(escaped) // 3} x i8] c"{escaped}", align 64')
        return Reg(f"@{name}", PTR)

    def zeros(self) -> Reg:
        """The address of 128 zero bytes: as many as the longest vector has, 16 float64."""
        if "nothing" not in self._names:
            self._names["nothing"] = 1
            self._globals.append("@nothing = private constant [128 x i8] zeroinitializer, align 64")
        return Reg("@nothing", PTR)

    def variable(self, name: str, type: Type) -> Reg:
        """The address of a global number, initially 0. The same name gives the same variable."""
        if name not in self._names:
            self._names[name] = 1
            self._globals.append(f"@{name} = private global {type} 0")
        return Reg(f"@{name}", PTR)

    def fresh(self, name: str) -> str:
        """An unused name of a function or a global: "f", then "f.1", "f.2", ..."""
        number = self._names.get(name, 0)
        self._names[name] = number + 1
        return f"{name}.{number}" if number else name

    def function(
        self,
        name: str,
        parameters: Sequence[tuple[str, Type]],
        build: Callable[..., None],
        result: Type = VOID,
        attributes: str = "internal",
        noalias: bool = True,
        inline: bool = True,
        own_lines: bool = False,
    ) -> str:
        """Define a function unless it exists: `build(code, *parameters)` emits its body.

        Args:
          name: its name, without the @.
          parameters: their names and types.
          build: must end with `code.ret(...)`.
          result: the type of its result.
          attributes: the linkage.
          noalias: True if no other pointer, and no other thread, changes the memory of its pointers.
          inline: True if LLVM may inline it.
          own_lines: True if its instructions have the places of the ops for which they are emitted (`DebugLines`).
        """
        if name not in self._functions:
            self._functions[name] = ""  # in the order of first use
            if self.lines is not None:
                self.lines.begin(name, own=own_lines)
            code = Code(self, name)
            args = [Reg(f"%{n}", t) for n, t in parameters]
            build(code, *args)
            listed = ", ".join(f"ptr noalias {a.text}" if noalias and a.type == PTR else str(a) for a in args)
            notes = "nounwind" if inline else "noinline nounwind"
            head = f"define {attributes} {result} @{name}({listed}) {notes} {{"
            self._functions[name] = "\n".join([head, "entry:", *code.entry, *code.lines, "}"])
        return name

    @property
    def text(self) -> str:
        """The module as text."""
        machine = self.machine
        head = [f'target triple = "{machine.triple}"', ""]
        functions, nodes = list(self._functions.values()), list[str]()
        if self.lines is not None:
            functions, nodes = self.lines.finish(self._functions)
        return "\n".join([*head, *self._globals, "", *functions, "", *self._declared.values(), *nodes]) + "\n"


class Code:
    """Builder of one function: each method appends instructions.

    Operands may be Python numbers, which become constants of the other operand's type.

    Attributes:
      module: the module of the function.
      lines: the instructions so far.
      entry: instructions at the function's start, such as `alloca`.
    """

    def __init__(self, module: Module, function: str = "") -> None:
        self.module = module
        self._function = function
        self.lines: list[str] = []
        self.entry: list[str] = []
        self._entry_values: set[str] = set()
        self._count = 0
        self._label = "entry"

    # --- the text ---

    def fresh(self, hint: str = "") -> str:
        """An unused name of a local value or a label, without the %."""
        self._count += 1
        return f"{hint or 'v'}{self._count}"

    def fresh_value(self) -> str:
        """An unused name of a local value, with the %."""
        return f"%{self.fresh()}"

    @property
    def here(self) -> str:
        """The label of the present basic block."""
        return self._label

    def emit(self, type: Type, text: str) -> Reg:
        """Append an instruction with a result."""
        name = f"%{self.fresh()}"
        self.do(f"{name} = {text}")
        return Reg(name, type)

    def do(self, text: str) -> None:
        """Append an instruction without a result."""
        lines = self.module.lines
        self.lines.append(f"  {text}" if lines is None else f"  {text}{lines.suffix(self._function)}")

    def at(self, loc: Loc) -> AbstractContextManager[None]:
        """Instructions that are emitted inside have this place, if the module has places."""
        return _NOWHERE if self.module.lines is None else self.module.lines.at(loc)

    def label(self, name: str) -> None:
        """Begin a basic block."""
        self.lines.append(f"{name}:")
        self._label = name

    # --- arithmetic ---

    def _same_type(self, a: Operand, b: Operand) -> tuple[Reg, Reg]:
        if isinstance(a, Reg):
            return a, b if isinstance(b, Reg) else constant(b, a.type)
        assert isinstance(b, Reg)
        return constant(a, b.type), b

    def binary(self, name: str, a: Operand, b: Operand) -> Reg:
        """An instruction of two operands: "fadd", "add nsw", "shl"."""
        x, y = self._same_type(a, b)
        return self.emit(x.type, f"{name} {x}, {y.text}")

    def unary(self, name: str, x: Reg) -> Reg:
        """An instruction of one operand: "fneg"."""
        return self.emit(x.type, f"{name} {x}")

    def compare(self, name: str, a: Operand, b: Operand) -> Reg:
        """A comparison with its predicate: "icmp slt", "fcmp oge"."""
        x, y = self._same_type(a, b)
        return self.emit(x.type.of("i1"), f"{name} {x}, {y.text}")

    def cast(self, name: str, x: Reg, scalar: str) -> Reg:
        """A conversion: "sext", "bitcast", "fptrunc". None is emitted if the type stays the same."""
        if x.type.scalar == scalar:
            return x
        to = x.type.of(scalar)
        return self.emit(to, f"{name} {x} to {to}")

    def select(self, condition: Reg, a: Operand, b: Operand) -> Reg:
        """`a` where the condition holds, else `b`."""
        x, y = self._same_type(a, b)
        return self.emit(x.type, f"select {condition}, {x}, {y}")

    def call(self, name: str, result: Type, *operands: Reg, flags: str = "") -> Reg:
        """Call a function. The value of a call without a result has no meaning."""
        listed = ", ".join(map(str, operands))
        if self.module.lines is not None:
            self.module.lines.call(self._function, name)
        if result == VOID:
            self.do(f"call void @{name}({listed})")
            return Reg("", VOID)
        return self.emit(result, f"call {flags} {result} @{name}({listed})")

    def call_external(self, name: str, result: Type, *operands: Reg, flags: str = "", attributes: str = "") -> Reg:
        """Call a function of LLVM or of the C library, which is declared with the types of the operands."""
        self.module.declare(name, result, [x.type for x in operands], attributes)
        return self.call(name, result, *operands, flags=flags)

    def intrinsic(self, name: str, first: Reg, *rest: Operand, flags: str = "") -> Reg:
        """An intrinsic whose first operand and result have the type that its name ends with: "llvm.fma"."""
        operands = [first, *(x if isinstance(x, Reg) else constant(x, first.type) for x in rest)]
        name = f"{name}.{first.type.suffix}"
        return self.call_external(name, first.type, *operands, flags=flags)

    def intrinsic_with_flag(self, name: str, x: Reg) -> Reg:
        """An intrinsic with a flag that makes an edge case poison, such as "llvm.abs" of the least number: not set."""
        name = f"{name}.{x.type.suffix}"
        return self.call_external(name, x.type, x, constant(0, I1))

    def saturating_to_int(self, x: Reg, scalar: str, *, signed: bool) -> Reg:
        """Convert floats to integers: rounded toward 0, saturating, NaN to 0."""
        to = x.type.of(scalar)
        name = f"llvm.fpto{'s' if signed else 'u'}i.sat.{to.suffix}.{x.type.suffix}"
        return self.call_external(name, to, x)

    def to_bfloat16(self, x: Reg) -> Reg:
        """Round 16 or 32 float32 to bfloat16, as i16; subnormal numbers become 0. Needs AVX512-BF16."""
        if x.type.lanes == 32:
            low, high = (self.shuffle(x, x, range(at, at + 16)) for at in (0, 16))
            name, to = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", Type("bfloat", 32)
            return self.cast("bitcast", self.call_external(name, to, high, low), "i16")
        name, to = "llvm.x86.avx512bf16.cvtneps2bf16.512", Type("bfloat", 16)
        return self.cast("bitcast", self.call_external(name, to, x), "i16")

    def dot_words(self, name: str, scalar: str, total: Reg, x: Reg, y: Reg) -> Reg:
        """Add to each 32-bit lane of `total` the products of all elements of a word, by the intrinsic `name`."""
        elements = Type(scalar, total.type.bits // Type(scalar).bits * total.type.lanes)
        return self.call_external(name, total.type, total, *(self._bitcast(v, elements) for v in (x, y)))

    def products_of_pairs(self, name: str, x: Reg, y: Reg) -> Reg:
        """The sum of the two products of each pair of int16, by the intrinsic `name`."""
        pairs = Type("i16", 2 * x.type.lanes)
        return self.call_external(name, x.type, *(self._bitcast(v, pairs) for v in (x, y)))

    def _bitcast(self, x: Reg, type: Type) -> Reg:
        return self.emit(type, f"bitcast {x} to {type}")

    def fma(self, a: Reg, b: Operand, c: Operand) -> Reg:
        """a * b + c, rounded once."""
        return self.intrinsic("llvm.fma", a, b, c)

    # --- vectors ---

    def splat(self, x: Reg, lanes: int) -> Reg:
        """A scalar in every lane."""
        if not lanes:
            return x
        if not x.text.startswith("%"):
            return Reg(f"splat ({x})", Type(x.type.scalar, lanes))
        to = Type(x.type.scalar, lanes)
        first_lane = self.emit(to, f"insertelement {to} poison, {x}, i64 0")
        return self.emit(to, f"shufflevector {first_lane}, {to} poison, <{lanes} x i32> zeroinitializer")

    def extract(self, x: Reg, lane: int) -> Reg:
        """One lane of a vector; a scalar has only one."""
        return self.emit(x.type.element, f"extractelement {x}, i64 {lane}") if x.type.lanes else x

    def insert(self, x: Reg, value: Reg, lane: int) -> Reg:
        """A vector with another value in one lane."""
        return self.emit(x.type, f"insertelement {x}, {value}, i64 {lane}")

    def shuffle(self, x: Reg, y: Reg, lanes: Sequence[int]) -> Reg:
        """The `lanes` of two vectors; the lanes of `y` are counted after the lanes of `x`."""
        mask = ", ".join(f"i32 {lane}" for lane in lanes)
        return self.emit(Type(x.type.scalar, len(lanes)), f"shufflevector {x}, {y}, <{len(lanes)} x i32> <{mask}>")

    # --- memory ---

    def gep(self, base: Reg, index: Operand, scalar: str = "i8") -> Reg:
        """The address of element number `index` (getelementptr); elements are bytes by default."""
        offset = index if isinstance(index, Reg) else constant(index, I64)
        if offset.text == "0":
            return base
        return self.emit(PTR, f"getelementptr inbounds {scalar}, ptr {base.text}, {offset}")

    def load(self, type: Type, address: Reg, align: int = 0) -> Reg:
        """Load from an address; `align` in bytes, one lane's alignment if 0."""
        return self.emit(type, f"load {type}, ptr {address.text}, align {align or max(type.bits // 8, 1)}")

    def store(self, x: Reg, address: Reg, align: int = 0) -> None:
        """Store to an address; `align` as for `load`."""
        self.do(f"store {x}, ptr {address.text}, align {align or max(x.type.bits // 8, 1)}")

    def prefetch(self, address: Reg) -> None:
        """Prefetch a cache line into the second-level cache, for reading. Any address is allowed."""
        self.call_external("llvm.prefetch.p0", VOID, address, constant(0, I32), constant(2, I32), constant(1, I32))

    def masked_load(self, type: Type, address: Reg, mask: Reg, fill: Reg) -> Reg:
        """Load the lanes of the mask. Other lanes are the fill; their memory is not read."""
        name, align = f"llvm.masked.load.{type.suffix}.p0", constant(max(type.bits // 8, 1), I32)
        if type.bits >= 32 and self.module.machine.is_x86 and self.module.machine.vector_bytes == 32:
            # LLVM 22 for AVX2 keeps of a mask only the bit that vmaskmov reads. If a register's part of the mask is
            # then a constant, it takes every nonzero lane for a lane to load (X86's combineMaskedLoadConstantMask):
            # it reads the lanes that the mask excludes, or it fails an assertion.
            mask = self._hidden_mask(mask)
        return self.call_external(name, type, address, align, mask, fill)

    def masked_store(self, x: Reg, address: Reg, mask: Reg) -> None:
        """Store the lanes of the mask."""
        name, align = f"llvm.masked.store.{x.type.suffix}.p0", constant(max(x.type.bits // 8, 1), I32)
        if x.type.bits < 32:
            mask = self._hidden_mask(mask)  # LLVM 22 would store 32 bits for one lane of 16 or 8 bits
        self.call_external(name, VOID, x, address, align, mask)

    def gather(self, type: Type, addresses: Reg, mask: Reg | None = None, fill: Reg | None = None) -> Reg:
        """Load each lane from its address; with a mask, its lanes only, and the fill for other lanes."""
        name, align = f"llvm.masked.gather.{type.suffix}.{addresses.type.suffix}", constant(max(type.bits // 8, 1), I32)
        mask = mask or constant(1, type.of("i1"))
        return self.call_external(name, type, addresses, align, mask, fill or Reg("poison", type))

    def scatter(self, x: Reg, addresses: Reg, mask: Reg | None = None) -> None:
        """Store each lane at its address, in the order of the lanes; with a mask, its lanes only."""
        name, align = (
            f"llvm.masked.scatter.{x.type.suffix}.{addresses.type.suffix}",
            constant(max(x.type.bits // 8, 1), I32),
        )
        mask = mask or constant(1, x.type.of("i1"))
        self.call_external(name, VOID, x, addresses, align, mask)

    def opaque_false(self) -> Reg:
        """False, as a value that LLVM cannot know: it is loaded at the function's start."""
        zero = self.module.variable("hidden", I8)
        load = f"%hidden.byte = load volatile i8, ptr {zero.text}"
        return self._at_entry("%hidden", I1, load, "%hidden = trunc i8 %hidden.byte to i1")

    def _hidden_mask(self, mask: Reg) -> Reg:
        """A mask of which LLVM knows no lane, unless it is written as a constant."""
        if not mask.text.startswith("%"):
            return mask
        false, name = self.opaque_false(), f"%hidden.{mask.type.lanes}"
        insert = f"{name}.one = insertelement {mask.type} poison, {false}, i64 0"
        zeros = f"<{mask.type.lanes} x i32> zeroinitializer"
        splat = f"{name} = shufflevector {mask.type} {name}.one, {mask.type} poison, {zeros}"
        return self.binary("xor", mask, self._at_entry(name, mask.type, insert, splat))

    def _at_entry(self, name: str, type: Type, *lines: str) -> Reg:
        """The register `name`, such as "%hidden". The first call adds `lines`, which assign it, to the entry."""
        if name not in self._entry_values:
            self._entry_values.add(name)
            self.entry += [f"  {line}" for line in lines]
        return Reg(name, type)

    def copy(self, target: Reg, source: Reg, nbytes: int) -> None:
        """Copy bytes that do not overlap."""
        self.call_external("llvm.memcpy.p0.p0.i64", VOID, target, source, constant(nbytes, I64), constant(0, I1))

    def fill(self, target: Reg, byte: int, nbytes: int) -> None:
        """Set bytes to one number."""
        size, is_volatile = constant(nbytes, I64), constant(0, I1)
        self.call_external("llvm.memset.p0.i64", VOID, target, constant(byte, I8), size, is_volatile)

    def alloca(self, type: Type) -> Reg:
        """Memory on the stack for one value, which lives as long as the call."""
        name = f"%{self.fresh('slot')}"
        self.entry.append(f"  {name} = alloca {type}, align 64")
        return Reg(name, PTR)

    # --- control ---

    def ret(self, x: Reg | None = None) -> None:
        """Return."""
        self.do("ret void" if x is None else f"ret {x}")

    def branch(self, to: str) -> None:
        """Branch to a label."""
        self.do(f"br label %{to}")

    def branch_if(self, condition: Reg, then: str, otherwise: str) -> None:
        """Branch to one of two labels."""
        self.do(f"br {condition}, label %{then}, label %{otherwise}")

    def loop(
        self,
        start: Reg | int,
        stop: Reg | int,
        step: int,
        body: Callable[..., Sequence[Reg] | None],
        *inits: Reg,
        index: str = "",
    ) -> list[Reg]:
        """A loop over range(start, stop, step): `body(i, *values)` returns the next values. Returns the final values.

        Bounds are i64. If the loop is known to run at most once, no loop is emitted, and i is a constant. `index` is an
        unused name for i.
        """
        first, end = (x if isinstance(x, Reg) else constant(x, I64) for x in (start, stop))
        is_static = isinstance(start, int) and isinstance(stop, int)
        if isinstance(start, int) and isinstance(stop, int) and stop <= start + step:
            return list(inits) if stop <= start else list(body(first, *inits) or ())
        before, head, latch, done = self._label, self.fresh("loop"), self.fresh("next"), self.fresh("done")
        counter = Reg(f"%{index or self.fresh('i')}", I64)
        values = [Reg(f"%{self.fresh('c')}", v.type) for v in inits]
        begin = self.fresh("begin")
        if is_static:
            self.branch(begin)
        else:
            self.branch_if(self.compare("icmp slt", first, end), begin, done)
        self.label(begin)
        self.branch(head)
        self.label(head)
        self.do(f"{counter.text} = phi i64 [{first.text}, %{begin}], [{counter.text}.n, %{latch}]")
        for v, init in zip(values, inits, strict=True):
            self.do(f"{v.text} = phi {v.type} [{init.text}, %{begin}], [{v.text}.n, %{latch}]")
        results = list(body(counter, *values) or ())
        self.branch(latch)
        self.label(latch)
        self.do(f"{counter.text}.n = add nsw i64 {counter.text}, {step}")
        for v, r in zip(values, results, strict=True):
            self.do(f"{v.text}.n = bitcast {r} to {v.type}")
        again = self.compare("icmp slt", Reg(f"{counter.text}.n", I64), end)
        self.branch_if(again, head, done)
        self.label(done)
        lasts = [Reg(f"%{self.fresh('r')}", v.type) for v in inits]
        for last, v, init in zip(lasts, values, inits, strict=True):
            skipped = "" if is_static else f", [{init.text}, %{before}]"
            self.do(f"{last.text} = phi {v.type} [{v.text}.n, %{latch}]{skipped}")
        return lasts

    @contextmanager
    def when(self, condition: Reg) -> Generator[None]:
        """Code that is emitted inside runs only if the condition holds."""
        then, done = self.fresh("then"), self.fresh("done")
        self.branch_if(condition, then, done)
        self.label(then)
        yield
        self.branch(done)
        self.label(done)

    def compute_if(self, condition: Reg, value: Reg, compute: Callable[[], Reg]) -> Reg:
        """The value of `compute()`, which runs only if the condition (one bit) holds; else `value`."""
        before, then, done = self._label, self.fresh("then"), self.fresh("done")
        self.branch_if(condition, then, done)
        self.label(then)
        computed, last = compute(), self._label
        self.branch(done)
        self.label(done)
        return self.emit(value.type, f"phi {value.type} [{value.text}, %{before}], [{computed.text}, %{last}]")
