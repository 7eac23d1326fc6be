"""The environment variable `TILEKERN_DEBUG`: extra checks and output of the compiler, to find a bug in it."""

from __future__ import annotations

import os
from typing import Literal, cast, get_args

from tilekern.errors import SettingError

type DebugOption = Literal["ir", "verify", "poison"]

VARIABLE = "TILEKERN_DEBUG"


def debug_options() -> frozenset[DebugOption]:
    """The options that `TILEKERN_DEBUG` names, separated by commas.

    - `ir`: print the block IR after each pass that changes it, and verify it.
    - `verify`: verify the block IR after each pass, and the plan of each program.
    - `poison`: fill the scratch memory of `cpu:llvm` with NaN before each program, which must not read it.

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
