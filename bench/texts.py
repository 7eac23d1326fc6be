"""python -m bench.texts: hashes of the program of each library kernel on each backend, to compare two trees.

    python -m bench.texts --out before.json
    ... a change that should leave the programs as they are ...
    python -m bench.texts --out after.json --compare before.json

The kernels are all that the functions of the library and their gradients call for the named cases, with the blocks of
the schedules. The block IR and the target's program of each kernel are hashed, without line numbers of the source, and
without the names that variables of a program have from the source. The exit status is 1 if two hashes differ, or if a
kernel is in one of the files only.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import tilekern.kernels
from tilekern.errors import TilekernError
from tilekern.kernel.primitive import calls_in
from tilekern.lower.target import TARGETS, Target
from tilekern.lower.triton.emit import names

_DTYPES = ("float32", "bfloat16")
_PROGRAMS = ("cpu:llvm", "cuda:sm_80", "cuda:sm_90", "cuda:sm_100", "tpu:v5e", "tpu:v6e", "tpu:7x")

# Comments of Triton source and locations of MLIR, which name lines of the source.
_LINES = re.compile(r"\s*# .*$|\bloc\([^\n]*\)$", re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    """Run the command line, and return the exit status."""
    cli = argparse.ArgumentParser(prog="python -m bench.texts", description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--out", type=Path, default=Path("bench/out/texts.json"), help="the file of hashes")
    cli.add_argument("--compare", type=Path, metavar="FILE", help="hashes of an earlier run")
    cli.add_argument("--only", default="", metavar="REGEX", help="kernels whose name it occurs in")
    cli.add_argument("--targets", default="", metavar="REGEX", help='targets whose name it occurs in, such as "cuda"')
    parsed = cli.parse_args(arguments)
    targets = [name for name in _PROGRAMS if re.search(parsed.targets, name)]
    hashes: dict[str, str] = {}
    with nameless():
        for name in sorted(p.parent.name for p in Path(tilekern.kernels.__path__[0]).glob("*/cases.py")):
            if re.search(parsed.only, name):
                hashes |= _of_library_function(name, targets)
                print(f"{name}: {len(hashes)} programs so far", file=sys.stderr)
    parsed.out.parent.mkdir(parents=True, exist_ok=True)
    parsed.out.write_text(json.dumps(hashes, indent=1) + "\n")
    if parsed.compare is None:
        return 0
    before = json.loads(parsed.compare.read_text())
    return _compare(
        {k: v for k, v in before.items() if re.search(parsed.only, k.split()[0]) and _target(k) in targets}, hashes
    )


def nameless() -> AbstractContextManager[Any]:
    """A context in which variables of generated programs have no names from the kernel's source."""
    nothing_assigned: Any = mock.patch.object(names, "_statements", return_value=())
    return nothing_assigned


def _target(key: str) -> str:
    return key.split()[4]


def _compare(before: dict[str, str], after: dict[str, str]) -> int:
    differing = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    for key in differing:
        print(key, "differs" if key in before and key in after else "is new" if key in after else "is gone")
    print(f"{len(differing)} of {len(after)} programs differ")
    return 1 if differing else 0


def _of_library_function(name: str, targets: Sequence[str]) -> dict[str, str]:
    hashes: dict[str, str] = {}
    for case in importlib.import_module(f"tilekern.kernels.{name}.cases").CASES:
        for dtype in _DTYPES:
            arrays = jax.eval_shape(partial(case.arrays, dtype=dtype), jax.random.key(0))
            call = function_of(name, case)
            for mode, run in (("forward", call), ("gradient", partial(gradient, call))):
                for target in targets:
                    key = f"{name} {case.name} {dtype} {mode} {target}"
                    hashes |= {f"{key} {part}": text for part, text in _texts(run, arrays, TARGETS[target])}
    return hashes


def function_of(name: str, case: Any) -> Any:
    """A function of the library, with the keywords of a case."""
    return partial(getattr(importlib.import_module(f"tilekern.kernels.{name}"), name), **getattr(case, "keywords", {}))


def gradient(call: Any, *arrays: Any) -> Any:
    """The gradient of the sum of all results with respect to the arrays of floats."""
    moved = [n for n, x in enumerate(arrays) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)]

    def total(*some: Any) -> Any:
        values = list(arrays)
        for n, x in zip(moved, some, strict=True):
            values[n] = x
        return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(call(*values)))

    return jax.grad(total, tuple(range(len(moved))))(*(arrays[n] for n in moved))


def kernels_of(run: Any, arrays: Any, target: Target) -> Iterable[Any]:
    """The kernels that a function calls for a target on arrays of the given types, without repetitions."""
    calls = calls_in(jax.make_jaxpr(run)(*arrays))
    return dict.fromkeys(k for family, operands in calls for k, _ in family.kernels(target, operands))


def _texts(run: Any, arrays: Any, target: Target) -> Iterator[tuple[str, str]]:
    """Pairs of names and hashes: of the block IR and the program of each kernel, or of the error that refuses it."""
    try:
        kernels = kernels_of(run, arrays, target)
    except TilekernError as error:
        yield "refused", _hash(str(error).splitlines()[0])
        return
    for number, kernel in enumerate(kernels):
        yield f"{number} {kernel.name} ir", _hash(str(kernel.func(target)))
        try:
            yield f"{number} {kernel.name} program", _hash(kernel.lowered(target).text)
        except TilekernError as error:
            yield f"{number} {kernel.name} refused", _hash(str(error).splitlines()[0])


def _hash(text: str) -> str:
    return hashlib.sha256(_LINES.sub("", text).encode()).hexdigest()[:16]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main(sys.argv[1:]))
