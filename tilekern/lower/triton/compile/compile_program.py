"""Triton source text → machine code, from the cache in memory, from the cache on disk, or by Triton."""

from __future__ import annotations

import contextlib
import hashlib
import linecache
import threading
from collections.abc import Generator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tilekern.ir.types import dtype_name
from tilekern.lower import disk_cache
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.compile import debug_lines, failure, resources, toolchain
from tilekern.lower.triton.compile.assembler_faults import warn_of_faults
from tilekern.lower.triton.compile.binary import Binary, DescriptorFormat
from tilekern.lower.triton.compile.options import options
from tilekern.lower.triton.program import Argument, Program
from tilekern.lower.triton.vendor import NVIDIA

CACHE = disk_cache.Room("triton", max_bytes=2 << 30)
"""Machine code, and the stages before it."""

MAX_KEPT = 512
"""Binaries that stay in memory."""

# Triton's names of dtypes, where they differ from ours.
_TYPES = {"bool": "i1", "f64": "fp64", "f32": "fp32", "f16": "fp16", "f8e4m3fn": "fp8e4nv", "f8e5m2": "fp8e5"}

_memory: dict[str, Binary] = {}
# One compilation at a time. Triton 3.6 sets options of LLVM for the whole process while it compiles, `_files_in`
# redirects Triton's cache, and two threads that need one program should compile it once.
_lock = threading.RLock()


def compile_program(program: Program, chip: Chip) -> Binary:
    """Compile a program for the GPUs of `chip`, or take its machine code from a cache.

    Raises:
      DependencyError: Triton is missing, or of a version that is not supported.
      ResourceError: no GPU has this `num_warps` or `num_stages`.
      CompileError: Triton refuses the program; the error names the program's line and the user's line.
    """
    # For other chips Triton would quietly replace descriptors by other parameters.
    assert chip.tma or not any(argument.descriptor for argument in program.arguments)
    resources.check_launch_options(program, chip)
    key = disk_cache.key(_key_parts(program, chip))
    with _lock:
        if key not in _memory:
            _memory[key] = _from_disk(key, chip) or _compile(program, chip, key)
            warn_of_faults(_memory[key], program)
            if len(_memory) > MAX_KEPT:
                del _memory[next(iter(_memory))]
        return _memory[key]


def file_name(program: Program) -> str:
    """The file name of the source in tracebacks, debug information and `linecache`."""
    return f"<tilekern {program.name} {hashlib.sha256(program.text.encode()).hexdigest()[:12]}>"


def _key_parts(program: Program, chip: Chip) -> list[str]:
    settings = [f"{name}={value!r}" for name, value in sorted(options(program, chip).items())]
    arguments = [f"{argument.name}: {_type(argument)}" for argument in program.arguments]
    arguments += [program.language] if program.language != "triton" else []
    identity = toolchain.identity(chip)
    return [program.name, program.text, *arguments, *settings, *debug_lines.places(program), *identity]


def _type(argument: Argument) -> str:
    """An argument's type as Triton writes it: `*bf16`, `tensordesc<bf16[128, 64]>`."""
    name = dtype_name(argument.dtype)
    element = _TYPES.get(name, name)
    if argument.descriptor is None:
        return f"*{element}"
    # A descriptor of single bits makes Triton 3.6 end the process.
    assert element != "i1", argument
    return f"tensordesc<{element}{list(argument.descriptor.block)}>"


def _gluon_type(argument: Argument, cluster: int) -> str:
    """An argument's type as Gluon writes it: a descriptor also states the layout of its tiles in shared memory."""
    box = argument.descriptor
    if box is None:
        return _type(argument)
    part = [size // (cluster if dim == box.divided else 1) for dim, size in enumerate(box.block)]
    width = part[-1] * argument.dtype.itemsize
    swizzle = next((size for size in (128, 64, 32) if width % size == 0), 0)
    language = toolchain.triton("experimental.gluon.language")
    bases = [[int(dim == box.divided) for dim in range(len(part))]] if cluster > 1 else []
    layout = language.NVMMASharedLayout(swizzle, 8 * argument.dtype.itemsize, len(part), cga_layout=bases)
    return f"{_type(argument)[:-1]},{layout!r}>"


def _from_disk(key: str, chip: Chip) -> Binary | None:
    files = CACHE.load(key, ("launch.json", *chip.vendor.stages, chip.vendor.code))
    try:
        return None if files is None else Binary.from_files(files)
    except ValueError:  # written by another version of tilekern, or by another program
        return None


def _compile(program: Program, chip: Chip, key: str) -> Binary:
    with TemporaryDirectory(prefix="tilekern-") as folder:
        try:
            binary = _run(program, chip, Path(folder))
        except Exception as error:
            again = Path(folder) / "again"
            again.mkdir()
            raise failure.explain(
                error, program, chip, file_name(program), Path(folder), lambda: _run(program, chip, again)
            ) from error
    CACHE.store(key, binary.to_files())
    return binary


def _run(program: Program, chip: Chip, folder: Path) -> Binary:
    """Call Triton; it writes its intermediate files to `folder`."""
    triton = toolchain.triton()
    gluon = program.language == "gluon"
    signature = {a.name: _gluon_type(a, program.cluster) if gluon else _type(a) for a in program.arguments}
    # XLA aligns every buffer to 16 bytes at least: kEntryParameterAlignBytes of xla/service/gpu/gpu_constants.h.
    aligned = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(program.arguments) if a.descriptor is None}
    module, name = ("experimental.gluon._runtime", "GluonASTSource") if gluon else ("compiler", "ASTSource")
    source = getattr(toolchain.triton(module), name)(_function(program), signature, {}, aligned)
    target = toolchain.triton("backends.compiler").GPUTarget(*_target(chip))
    with _files_in(folder), failure.quiet(), debug_lines.user_lines(program, file_name(program)):
        return _binary(triton.compile(source, target=target, options=options(program, chip)), chip)


def _function(program: Program) -> Any:
    """The entry function, decorated by Triton, which reads the text of functions through `linecache`."""
    file = file_name(program)
    linecache.cache[file] = (len(program.text), None, program.text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": file}
    exec(compile(program.text, file, "exec"), namespace)
    return namespace[program.name]


def _target(chip: Chip) -> tuple[str, int | str, int]:
    """Triton's name of the GPU: its backend, its architecture, and the threads of a warp."""
    vendor = chip.vendor
    return vendor.backend, chip.capability if vendor is NVIDIA else chip.architecture, vendor.lanes


def _binary(kernel: Any, chip: Chip) -> Binary:
    launch, vendor = kernel.metadata, chip.vendor
    formats = [
        DescriptorFormat(d["elem_type"], d["swizzle"], tuple(d["block_size"])) for d in launch.tensordesc_meta or ()
    ]
    return Binary(
        name=launch.name,
        # Gluon begins below Triton's own dialect.
        asm={stage: kernel.asm.get(stage, "") for stage in (*vendor.stages, vendor.code)},
        capability=chip.capability,
        num_warps=launch.num_warps,
        num_ctas=launch.num_ctas,
        shared_bytes=launch.shared,
        tensor_columns=getattr(launch, "tmem_size", 0) or 0,
        global_scratch_bytes=launch.global_scratch_size or 0,
        global_scratch_align=launch.global_scratch_align or 1,
        descriptors=tuple(formats),
        backend=vendor.backend,
    )


@contextlib.contextmanager
def _files_in(folder: Path) -> Generator[None]:
    """Make Triton write the files of this thread to `folder`; other threads keep their cache."""
    triton = toolchain.triton()
    default_manager = triton.knobs.cache.manager_class or toolchain.triton("runtime.cache").FileCacheManager
    thread = threading.get_ident()

    def manager(key: str, override: bool = False, dump: bool = False) -> Any:
        mine = threading.get_ident() == thread and not (override or dump)
        return _manager(folder, key) if mine else default_manager(key, override=override, dump=dump)

    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.manager_class = manager
        triton.knobs.compilation.store_binary_only = False
        yield


def _manager(folder: Path, key: str) -> Any:
    """A cache manager for Triton that starts empty and writes files to `folder`."""
    base: type[Any] = toolchain.triton("runtime.cache").CacheManager

    class Manager(base):
        def get_file(self, filename: str) -> str | None:
            return None

        def put(self, data: Any, filename: str, binary: bool = True) -> str:
            path = folder / filename
            path.write_bytes(data if isinstance(data, bytes) else str(data).encode())
            return str(path)

        def get_group(self, filename: str) -> dict[str, str] | None:
            return None

        def put_group(self, filename: str, group: dict[str, str]) -> None:
            pass

    return Manager(key)
