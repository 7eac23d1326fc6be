"""Triton's interpreter, with all corrections that it needs.

A correction replaces methods of Triton's `InterpreterBuilder`, or functions of `triton.language`. Its docstring names
the wrong behaviour, and the versions that have it, of 3.6.0 and 3.9.0; a test fails without the correction.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from tilekern.lower.triton.interpreter import accesses, arithmetic, floats, libdevice, printing, reductions, syntax
from tilekern.lower.triton.interpreter.triton_interpreter import Correction, TritonInterpreter


def correct() -> TritonInterpreter:
    """Import Triton, which must find TRITON_INTERPRET=1 in the environment, and correct its interpreter.

    The interpreter's functions replace the functions of `triton.language` for good. Triton itself replaces and restores
    them at each call, which takes longer than most programs.
    """
    language: Any = import_module("triton.language")
    triton = TritonInterpreter(language, import_module("triton.runtime.interpreter"))
    triton.module._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    triton.module._patch_lang = _nothing
    triton.module.interpreter_builder.options = _options(triton)
    corrections: tuple[Correction, ...] = (
        *syntax.CORRECTIONS,
        *accesses.CORRECTIONS,
        *floats.CORRECTIONS,
        *arithmetic.CORRECTIONS,
        *reductions.CORRECTIONS,
        *libdevice.CORRECTIONS,
        *printing.CORRECTIONS,
    )
    for correction in corrections:
        correction(triton)
    return triton


def _nothing(function: Any) -> None:
    """Replace nothing: all functions of the language have been replaced already."""


def _options(triton: TritonInterpreter) -> Any:
    """Check assertions, let integers wrap around without a second computation, allow CUDA's precisions."""
    return replace(
        triton.module.InterpreterOptions(),
        debug=True,
        sanitize_overflow=False,
        allowed_dot_input_precisions=("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6"),
    )
