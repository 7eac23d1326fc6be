"""Ahead-of-time compilation of functions with Pallas kernels by libtpu, on a machine without a TPU."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax

from tilekern import _jax
from tilekern.errors import CompileError, ResourceError, TilekernError
from tilekern.lower.mosaic.chip import Chip
from tilekern.lower.mosaic.compile import toolchain

# By default XLA moves operands into vector memory before a kernel if there is room, and such operands need no buffers.
# Without this option a kernel takes the most memory that it ever does: as much as among other kernels.
_OPTIONS: dict[str, str | bool] = {"xla_msa_enable": False}

_SHOWN_LINES, _SHOWN = 4, 600  # of the compiler's message

_CALL = re.compile(r'^.*custom_call_target="tpu_custom_call".*$', re.MULTILINE)
_VMEM = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"\}')
_BODY = re.compile(r'"custom_call_config":\{"body":"([A-Za-z0-9+/=]+)"')
_ESCAPED_BODY = re.compile(r"custom_call_config\\22: \{\\22body\\22: \\22([A-Za-z0-9+/=]+)")
_SCOPED = re.compile(r"Scoped allocation with size (\S+) and limit (\S+) exceeded")
_TOO_LARGE = re.compile(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\)")
_USED = re.compile(
    r"Ran out of memory in memory space (\w+)\. Used (\S+) of (\S+) \w+\. Exceeded \w+ capacity by (\S+)\."
)
_SPACE = re.compile(r"memory space (\w+)|space=(\w+)")


def compile_ahead(function: Callable[..., Any], types: Sequence[jax.ShapeDtypeStruct], chip: Chip) -> Any:
    """Compile `function` of arrays of `types` for `chip`, which this machine need not have.

    The program is a `jax.stages.Compiled`. Operands stay in HBM until the kernels fetch them, so its `vmem_used` does
    not depend on the vector memory that XLA has free. Errors name the current line of the user (`source.at`).

    Raises:
      DependencyError: libtpu is missing, too old, or in use by another process.
      ResourceError: a kernel takes more vector or scalar memory than a core has, or than its `vmem_limit_bytes`.
      CompileError: Pallas or libtpu refuses a kernel.
    """
    device = jax.sharding.SingleDeviceSharding(toolchain.device(chip))
    operands = [jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=device) for t in types]
    try:
        with _jax.abstract_tpu(chip.device_kind, chip.cores):
            lowered = jax.jit(function, out_shardings=device).trace(*operands).lower(lowering_platforms=("tpu",))
        return lowered.compile(compiler_options=_OPTIONS)
    except TilekernError:
        raise
    except Exception as error:
        raise _explain(error, getattr(function, "__name__", "a kernel"), chip) from error


def vmem_used(compiled: Any) -> int:
    """The bytes of vector memory that the largest kernel of a program takes: blocks, scratch and spilled values.

    libtpu writes them into the HLO of each kernel's custom call: `used_scoped_memory_configs`, memory space 1.
    """
    return max((int(n) for call in _CALL.findall(compiled.as_text()) for n in _VMEM.findall(call)), default=0)


def asm(compiled: Any) -> Mapping[str, str]:
    """The stages of a program: "hlo" after XLA's optimisation, and "mosaic", the MLIR of its kernels before Mosaic."""
    hlo: str = compiled.as_text()
    bodies = [body for call in _CALL.findall(hlo) for body in cast(list[str], _BODY.findall(call))]
    return {"hlo": hlo, "mosaic": "\n".join(_jax.mosaic_text(base64.b64decode(body)) for body in bodies)}


def _explain(error: Exception, name: str, chip: Chip) -> TilekernError:
    message = f"{type(error).__name__}: {error}"
    if "RESOURCE_EXHAUSTED" in message:
        expected, got = _figures(message)
        return ResourceError(
            f"{name} needs more memory than a core of {chip.name} has",
            expected=expected,
            got=f"{got}\n    {_shorten(message)}",
            fix="take smaller blocks, or loop over what is loaded as a whole",
        )
    return CompileError(
        f"{name} does not compile for {chip.name}",
        expected="a program that Pallas and libtpu accept",
        got=_shorten(message),
        fix='this is a bug of tilekern, Pallas or libtpu; please report it. target="cpu:xla" runs on TPUs, too',
    )


def _figures(message: str) -> tuple[str, str]:
    """The memory that is available, and the memory that a kernel needs, from libtpu's message of exhausted memory."""
    if match := _SCOPED.search(message):
        return f"at most {_unit(match[2])} of vmem, the kernel's vmem_limit_bytes", _unit(match[1])
    if match := _TOO_LARGE.search(message):
        needed, available = (f"{int(n) / 2**20:.2f} MiB" for n in match.groups())
        return f"at most {available} of {_space(message)}", f"one buffer of {needed}"
    if match := _USED.search(message):
        return f"at most {_unit(match[3])} of {match[1]}", f"{_unit(match[2])}, {_unit(match[4])} too much"
    return "buffers that fit", "too much"


def _unit(size: str) -> str:
    """`63.94M` → `63.94 MiB`."""
    return f"{size[:-1]} {size[-1]}iB" if size[-1] in "KMG" else f"{size.removesuffix('B')} bytes"


def _space(message: str) -> str:
    match = _SPACE.search(message)
    return (match[1] or match[2]) if match else "memory"


def _shorten(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()][:_SHOWN_LINES]
    text = "\n    ".join(lines)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"


def kernel_text(function: Callable[..., Any], types: Sequence[jax.ShapeDtypeStruct], chip: Chip) -> str:
    """The MLIR of the kernels of a function before Mosaic; it needs no libtpu."""
    with _jax.abstract_tpu(chip.device_kind, chip.cores):
        lowered = jax.jit(function).trace(*types).lower(lowering_platforms=("tpu",))
    bodies = cast(list[str], _ESCAPED_BODY.findall(lowered.as_text()))
    return "\n".join(_jax.mosaic_text(base64.b64decode(body)) for body in bodies)
