"""The page of the architecture lists the files that a call passes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tests.lang.checks import like_first

PACKAGE = Path(tk.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
ROOMS = ("ir", "lang", "passes", "blocks", "lower/llvm", "lower/rewrite")
MOST_FILES = 26


def files_entered(kernel: tk.Kernel, x: jax.Array) -> set[str]:
    """The files of the package with a function that the first call of a kernel enters, relative to the package."""
    files: set[str] = set()

    def record(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    previous = sys.getprofile()
    sys.setprofile(record)
    try:
        jax.block_until_ready(kernel(x))
    finally:
        sys.setprofile(previous)
    return {str(Path(file).relative_to(PACKAGE)) for file in files if file.startswith(f"{PACKAGE}/")}


def test_a_call_passes_the_files_of_the_page() -> None:
    pytest.importorskip("llvmlite", reason="needs llvmlite")

    @like_first
    def scaled(x, out, *, block: tk.Block = 4):
        i = tk.parallel(x.shape[0], block)
        out[i] = x[i] * 0.34375  # a number of its own: code that the process has already loaded is not looked up again

    entered = files_entered(scaled, jnp.arange(10.0))
    assert all(any(file.startswith(f"{room}/") for file in entered) for room in ROOMS)
    way = {file for file in entered if not any(file.startswith(f"{room}/") for room in ROOMS)}
    _, _, section = PAGE.read_text().partition("## The way of a call\n")
    listed = re.findall(r"^\| `([\w/]+\.py)` \|", section.partition("\n## ")[0], re.MULTILINE)
    assert way == set(listed)
    assert len(listed) == len(set(listed)) <= MOST_FILES
