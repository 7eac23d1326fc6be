"""llvmlite, which has LLVM inside: imported when a program is compiled, not before."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import re
import sys
import threading
from collections.abc import Generator, Sequence
from typing import Any

from tilekern.errors import DependencyError, ResourceError
from tilekern.ir.records import record
from tilekern.lower import disk_cache
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.compile import perf_map
from tilekern.lower.llvm.compile.loaded_code import CodeTable, LoadedCode
from tilekern.lower.llvm.program import Program
from tilekern.lower.llvm.runtime import host_print
from tilekern.lower.llvm.runtime.code_table import EXPORTED, KEY_BYTES
from tilekern.lower.llvm.runtime.ffi_handler import HANDLER, RUN, runtime, with_handler
from tilekern.lower.llvm.runtime.host_print import HOST_PRINT
from tilekern.lower.llvm.runtime.machine import SETTING, Machine, restricted
from tilekern.lower.llvm.runtime.tile_permission import permitted

OLDEST, BEYOND = (0, 45), (0, 51)
"""llvmlite's versions from the first on and before the second are supported.

The first is the oldest with an LLVM, 20, that reads `splat (i32 1)`; the tests run with 0.45 and 0.50.
"""

CACHE = disk_cache.Room("llvm", max_bytes=512 << 20)
"""Object files: a kernel takes 10 to 100 KiB."""

_OBJECT = "kernel.o"  # the only file of an entry

lock = threading.RLock()
"""Held by whoever uses llvmlite. One compilation at a time: two threads that want a program should compile it once."""

if sys.platform != "win32":
    # No other thread uses llvmlite while this one forks, so the child finds the locks of llvmlite and of its import
    # free, and ours.
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


@record
class Compiled:
    """Machine code.

    Attributes:
      name: tells it from all other code.
      text: the LLVM IR that it was made of.
      machine: the machine that the code runs on.
      code: the code in this process, which stays loaded while this lives; None if it does not run on this machine.
    """

    name: str
    text: str
    machine: Machine
    code: LoadedCode | None

    @functools.cached_property
    def assembly(self) -> str:
        """The code for people to read."""
        with lock:
            return _Codegen(self.text, self.machine).assembly()


def compile(program: Program) -> Compiled:
    """Machine code of a program, with its handler; the same for the same program.

    Raises:
      DependencyError: llvmlite is missing, broken, too old or too new.
      ResourceError: the program's scratch is larger than `calibration.MAX_SCRATCH`.
    """
    check_scratch(program)
    text, target = with_handler(program).text, program.module.machine
    name = name_of(text, target)
    with lock:
        return Compiled(name, text, target, _loaded(program, name, text, target) if target.runs_on(host()) else None)


def _loaded(program: Program, name: str, text: str, target: Machine) -> LoadedCode:
    table, key = code_table(), name[-KEY_BYTES:]
    if (loaded := table.find(key)) is not None:
        return loaded
    code = machine_code(text, target)
    library = _link(name, code, [HANDLER], imported())
    perf_map.record(program.name, program.loc, code, HANDLER, library[HANDLER])
    return table.add(key, library, library[HANDLER])


def machine_code(text: str, target: Machine, level: int = calibration.OPTIMIZATION_LEVEL) -> bytes:
    """The object file that LLVM makes of its IR for a machine, from the cache on disk if an earlier process made it.

    Args:
      text: LLVM IR.
      target: the machine.
      level: LLVM's level of optimisation, of 0 to 3.
    """
    key = disk_cache.key([text, repr(target), f"{level=}", *_identity()])
    entry = CACHE.load(key, [_OBJECT])
    if entry is not None:
        return entry[_OBJECT]
    code = _Codegen(text, target, level).object()
    CACHE.store(key, {_OBJECT: code})
    return code


def _identity() -> tuple[str, str]:
    """All that decides machine code besides the text, the machine and the level: versions, and how LLVM is called."""
    return repr((_import("llvmlite").__version__, llvmlite().llvm_version_info)), _source()


@functools.cache
def _source() -> str:
    """The text of this module, where LLVM's options stand; "None" in a package without sources."""
    return str(__spec__.loader.get_source(__name__))


def imported() -> dict[str, int]:
    """The addresses of the functions that programs call."""
    return {RUN: code_table().functions[RUN], HOST_PRINT: host_print.address()}


def check_scratch(program: Program) -> None:
    """Refuse a program whose scratch is larger than `calibration.MAX_SCRATCH`."""
    if program.scratch > calibration.MAX_SCRATCH:
        raise ResourceError(
            f"{program.name} needs too much memory for its intermediate values",
            expected=f"at most {calibration.MAX_SCRATCH} bytes for each thread",
            got=f"scratch = {program.scratch} bytes",
            fix="use smaller blocks",
        )


@functools.cache
def host() -> Machine:
    """The machine that code is made for: this process's, or the level of it that `TILEKERN_CPU` names.

    The variable is read once: code, and the programs that call it, stay for one machine as long as the process lives.

    Raises:
      DependencyError: llvmlite is missing, broken, too old or too new.
      SettingError: the variable names no level, or one that this machine lacks.
      TargetError: the machine lacks AVX2 or NEON.
    """
    with lock:
        llvm = llvmlite()
        with _working():
            description = llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features()
        return restricted(os.environ.get(SETTING, ""), *description, tiles=permitted())


def working_host() -> Machine:
    """The machine that code is made for, after llvmlite has compiled and linked the code that all programs share.

    Raises:
      DependencyError: llvmlite is missing, broken, too old or too new.
      SettingError: `TILEKERN_CPU` names no level, or one that this machine lacks.
      TargetError: the machine lacks AVX2 or NEON.
    """
    machine = host()
    with lock, _working():
        code_table()
    return machine


@functools.cache
def llvmlite() -> Any:
    """llvmlite's interface to LLVM, ready to compile for all machines.

    Raises:
      DependencyError: llvmlite is missing, broken, too old or too new.
    """
    with lock:
        check_version(getattr(_import("llvmlite"), "__version__", "of no version"))
        binding = _import("llvmlite.binding")
        with _working():
            binding.initialize_all_targets()
            binding.initialize_all_asmprinters()
        return binding


def check_version(version: str) -> None:
    """Refuse an llvmlite that tilekern was not tested with."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and OLDEST <= (int(numbers[1]), int(numbers[2])) < BEYOND:
        return
    raise DependencyError(
        "this version of llvmlite is not supported", expected=_EXPECTED, got=f"llvmlite {version}", fix=_FIX
    )


_EXPECTED = f"llvmlite >= {OLDEST[0]}.{OLDEST[1]}, < {BEYOND[0]}.{BEYOND[1]}"
_FIX = f"pip install 'llvmlite>={OLDEST[0]}.{OLDEST[1]},<{BEYOND[0]}.{BEYOND[1]}'"


@contextlib.contextmanager
def _working() -> Generator[None]:
    """Turn errors of llvmlite inside into a `DependencyError`: its data is good, so llvmlite itself is broken."""
    try:
        yield
    except (AssertionError, AttributeError, RuntimeError, TypeError) as error:
        raise DependencyError(
            "llvmlite does not work", expected=_EXPECTED, got=f"{type(error).__name__}: {error}"[:400], fix=_FIX
        ) from error


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # OSError: its library cannot be loaded; a broken installation raises anything
        raise DependencyError(
            "the target cpu needs llvmlite", expected=_EXPECTED, got=f"{type(error).__name__}: {error}", fix=_FIX
        ) from error


def name_of(text: str, target: Machine) -> str:
    """A name that decides the code, in this process and in other processes."""
    parts = repr((text, _runtime_text(target), target, _identity()))
    return f"tilekern_llvm_{hashlib.sha256(parts.encode()).hexdigest()[:32]}"


def code_table() -> CodeTable:
    """The table of loaded kernels, with the functions that all kernels share."""
    with lock:
        return _code_table()


@functools.cache
def _code_table() -> CodeTable:
    """Compile and load the code that all kernels share. Optimised, it would take ten times as long and run as fast."""
    exported = [RUN, *EXPORTED]
    library = _link("tilekern_runtime", machine_code(_runtime_text(host()), host(), level=0), exported, {})
    functions = {name: library[name] for name in exported}
    for owner in (library, library.linker):
        owner.detach()  # it stays loaded: XLA keeps the addresses of the handlers
    return CodeTable(functions, lock)


@functools.cache
def _runtime_text(target: Machine) -> str:
    return runtime(target).text


def _link(name: str, code: bytes, exported: Sequence[str], imported: dict[str, int]) -> Any:
    """Load an object file into this process: llvmlite's tracker, which has the addresses of the exported functions.

    The code goes with the tracker. So does its linker: one linker for all would keep 10 KiB of each library.
    """
    llvm = llvmlite()
    linker = llvm.create_lljit_compiler(_target_machine(host(), calibration.OPTIMIZATION_LEVEL), use_jit_link=True)
    builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
    for symbol in exported:
        builder.export_symbol(symbol)
    for symbol, address in imported.items():
        builder.import_symbol(symbol, address)
    try:
        library = builder.link(linker, name)
    except RuntimeError as error:  # code that calls a function which this process does not have
        raise AssertionError(f"{name}: {error}") from error
    library.linker = linker
    return library


def _target_machine(target: Machine, level: int) -> Any:
    llvm_target = llvmlite().Target.from_triple(target.triple)
    # Position-independent: the linker places code and constants anywhere, but close together.
    return llvm_target.create_target_machine(
        cpu=target.cpu, features=target.features, opt=level, reloc="pic", codemodel="small", jit=True
    )


def _free(passes: Any) -> None:
    """Free a pass manager, 60 KiB. llvmlite does not: of two inherited methods it calls one that does nothing."""
    dispose = [vars(kind)["_dispose"] for kind in type(passes).__mro__ if kind.__name__ == "NewPassManager"]
    if dispose:
        dispose[0](passes)
        passes.detach()  # freed once, also by an llvmlite without that mistake


class _Codegen:
    """A module after LLVM's passes on its IR, in an LLVM context of its own."""

    def __init__(self, text: str, target: Machine, level: int = calibration.OPTIMIZATION_LEVEL) -> None:
        llvm = llvmlite()
        self._context = llvm.create_context()
        try:
            self._module = llvm.parse_assembly(text, self._context)
            self._module.verify()
        except RuntimeError as error:
            raise AssertionError(f"{error}\n{text}") from error
        self._machine = _target_machine(target, level)
        self._module.data_layout = str(self._machine.target_data)
        options = llvm.create_pipeline_tuning_options(speed_level=level)
        # The code has vectors, and unrolled loops, where they pay.
        options.loop_vectorization = options.slp_vectorization = options.loop_interleaving = False
        options.loop_unrolling = False  # a third of the compile time
        builder = llvm.create_pass_builder(self._machine, options)
        passes = builder.getModulePassManager()
        passes.run(self._module, builder)
        _free(passes)

    def object(self) -> bytes:
        return self._machine.emit_object(self._module)

    def assembly(self) -> str:
        return self._machine.emit_assembly(self._module)
