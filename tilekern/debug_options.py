"""Environment variables to find bugs: `TILEKERN_DEBUG` in the compiler, `TILEKERN_INTERPRET` in kernels."""

from __future__ import annotations

import os
from typing import Literal, cast, get_args

from tilekern.errors import SettingError

type DebugOption = Literal["ir", "verify", "poison", "perf"]

VARIABLE = "TILEKERN_DEBUG"


def debug_options() -> frozenset[DebugOption]:
    """The options that `TILEKERN_DEBUG` names, separated by commas.

    - `ir`: print the block IR after each pass that changes it, and verify it.
    - `verify`: verify the block IR after each pass, and the plan of each program.
    - `poison`: fill the scratch memory of `cpu:llvm` with NaN before each program, which must not read it.
    - `perf`: write the names of the machine code of `cpu:llvm` to `/tmp/perf-PID.map`, which `perf report` reads, and
      names, lines and regions to a dump for `perf inject --jit`.

    Raises:
      SettingError: the variable names an option that does not exist.
    """
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    options, all_options = frozenset(filter(None, names)), get_args(DebugOption.__value__)
    if options - set(all_options):
        raise SettingError(
            f"{VARIABLE} names an option that does not exist",
            expected=f"some of {', '.join(all_options)}, separated by commas",
            got=f"{VARIABLE}={os.environ[VARIABLE]}",
            fix=f"unset {VARIABLE}, or correct it",
        )
    return cast("frozenset[DebugOption]", options)


def interprets() -> bool:
    """True if `TILEKERN_INTERPRET` is 1: calls run in the interpreter of the block IR, which finds faults of kernels.

    Raises:
      SettingError: the variable is neither 0, 1 nor empty.
    """
    value = os.environ.get("TILEKERN_INTERPRET", "")
    if value not in ("", "0", "1"):
        raise SettingError(
            "TILEKERN_INTERPRET is neither 0 nor 1",
            expected="1 to run calls in the interpreter, 0 to compile them",
            got=f"TILEKERN_INTERPRET={value}",
            fix="unset TILEKERN_INTERPRET, or correct it",
        )
    return value == "1"
