"""A new class of op cannot be forgotten: each place that must know it is listed, and refuses an op without a rule."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import tilekern as tk
from tilekern.autodiff import cotangents, tangents
from tilekern.errors import NotDifferentiableError
from tilekern.ir.analysis.costs import cost_of
from tilekern.ir.analysis.sharding import sharding_of
from tilekern.ir.core import Array, Builder, Func, Op, Value
from tilekern.ir.make import Make
from tilekern.ir.memory import Load, MemoryOp
from tilekern.ir.parse import OPS
from tilekern.ir.records import record
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import BOOL, F32, TileType
from tilekern.ir.validity import Validity, sources
from tilekern.lower.mosaic.emit import ops as mosaic_ops
from tilekern.lower.mosaic.plan.value_sizes import is_streamed
from tilekern.lower.triton.legalize.pad_tiles import pad_tiles
from tilekern.lower.xla.emit import ops as xla_ops
from tilekern.testing.support import Sketch, attempts

ROOT = Path(__file__).parents[2]
CLASSES = {kind.__name__: kind for kind in OPS.values()}

CONTROL = frozenset({"Fold", "While", "Switch", "Hoist"})
MEMORY = frozenset(name for name, kind in CLASSES.items() if issubclass(kind, MemoryOp))
DEBUG = frozenset({"Print", "Assert"})
IMPURE = CONTROL | MEMORY | DEBUG
DERIVATIVES = frozenset({"Stop", "Custom"})  # a backend's first pass removes them
LOWER = "tilekern/lower"


@dataclass(frozen=True)
class Place:
    """Files that must have a rule for each class of op, together.

    Attributes:
      files: the files.
      exempt: the classes that do not come there.
    """

    files: tuple[str, ...]
    exempt: frozenset[str] = frozenset()


PLACES = [
    Place(("tilekern/ir/validity.py",), IMPURE - {"Hoist"}),
    Place(("tilekern/ir/analysis/lanes.py",), MEMORY | {"Hoist"}),
    Place(("tilekern/ir/analysis/costs.py",), MEMORY),
    Place(("tilekern/autodiff/tangents.py",), IMPURE),
    Place(("tilekern/autodiff/cotangents.py",), IMPURE),
    Place((f"{LOWER}/xla/emit/ops.py", f"{LOWER}/jax_ops.py"), IMPURE | DERIVATIVES),
    Place((f"{LOWER}/triton/legalize/pad_tiles.py",), CONTROL | MEMORY | DERIVATIVES),
    Place(
        (
            f"{LOWER}/triton/legalize/expand.py",
            f"{LOWER}/triton/legalize/movement.py",
            f"{LOWER}/triton/emit/expressions.py",
        ),
        IMPURE | DERIVATIVES,
    ),
    Place(
        (f"{LOWER}/mosaic/legalize/expand.py", f"{LOWER}/mosaic/emit/ops.py", f"{LOWER}/jax_ops.py"),
        IMPURE | DERIVATIVES,
    ),
    Place((f"{LOWER}/mosaic/legalize/expand.py", f"{LOWER}/mosaic/plan/value_sizes.py"), IMPURE | DERIVATIVES),
    Place(
        (f"{LOWER}/llvm/legalize/expand.py", f"{LOWER}/llvm/element_index.py", f"{LOWER}/llvm/emit_program.py"),
        IMPURE | DERIVATIVES,
    ),
    Place(("tilekern/testing/support.py",)),
]

# Modules with many rules that take an op which they do not know for one of which nothing is proved.
CAUTIOUS = {
    "tilekern/autodiff/zero_tails.py",
    "tilekern/blocks/reader.py",
    "tilekern/ir/analysis/additive.py",
    "tilekern/ir/analysis/ranges.py",
    "tilekern/lower/llvm/plan/loop_fusion.py",
    "tilekern/lower/mosaic/legalize/widen_moves.py",
    "tilekern/lower/mosaic/plan/register_pressure.py",
    "tilekern/passes/canonicalize.py",
    "tilekern/testing/programs/coverage.py",
}


# --- every class is named -------------------------------------------------------------------------------------------


def forgotten(classes: Iterable[str]) -> list[str]:
    """For each place that does not name some of the classes, its files and these classes."""
    places: list[str] = []
    for place in PLACES:
        named = {node.id for file in place.files for node in ast.walk(tree(file)) if isinstance(node, ast.Name)}
        missing = sorted(set(classes) - place.exempt - named)
        places += [f"{' + '.join(place.files)}: {', '.join(missing)}"] if missing else []
    return places


def tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def test_every_place_names_every_class() -> None:
    assert not forgotten(CLASSES), "these files have no rule for classes of ops"


def test_a_new_class_is_missed_in_every_place() -> None:
    lines = forgotten([*CLASSES, "Rotate"])
    assert [line.partition(": ")[2] for line in lines] == ["Rotate"] * len(PLACES)


def test_what_need_not_be_named_is_a_class() -> None:
    assert frozenset().union(*(place.exempt for place in PLACES)) <= set(CLASSES)


def dispatched(file: Path) -> set[str]:
    """The classes that a module tells apart: in patterns, by `isinstance` and as keys."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.MatchClass(cls=ast.Name(id=name)):
                names.add(name)
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                names.update(n.id for n in ast.walk(kinds) if isinstance(n, ast.Name))
            case ast.Dict(keys=keys):
                names.update(key.id for key in keys if isinstance(key, ast.Name))
            case _:
                pass
    return names & set(CLASSES)


def test_modules_with_many_rules_are_places_or_cautious() -> None:
    listed = CAUTIOUS.union(*(place.files for place in PLACES))
    files = [path for path in (ROOT / "tilekern").rglob("*.py") if len(dispatched(path)) >= 12]
    assert len(files) > 10
    assert not {str(path.relative_to(ROOT)) for path in files} - listed - {"tilekern/lower/triton/emit/emit_triton.py"}


def test_contributing_names_every_file() -> None:
    (section,) = re.findall(r"^## Adding an op$(.*?)^## ", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.M)
    files = {file for place in PLACES for file in place.files}
    assert not [file for file in sorted(files | CAUTIOUS) if f"`{file}`" not in section]


# --- an op that a place does not know is refused --------------------------------------------------------------------


@record(eq=False, kw_only=True)
class Rotate(Op):
    """A new op: the elements along the last dim, each in the next place."""

    name: ClassVar[str] = "rotate"

    def infer(self) -> tuple[TileType, ...]:
        return self.tiles(1)

    def evaluate(self, *operands: Array) -> Array:
        return np.roll(operands[0], 1, -1)


def rotated(shape: tuple[int, ...] = (4, 8)) -> tuple[Func, Rotate]:
    """A Func that stores a rotated load."""
    b = Sketch()
    func = b.func("rotated", lambda: [b.op(Rotate, b.tile(F32, shape))])
    (op,) = [op for op in func.walk() if isinstance(op, Rotate)]
    return func, op


REFUSALS: dict[str, Callable[[Func, Op], Any]] = {
    "tilekern.ir.validity": lambda _, op: sources(op),
    "tilekern.ir.validity ": lambda _, op: Validity(Builder(), op).of_result((Value(TileType((4, 8), BOOL)),)),
    "tilekern.ir.analysis.costs": lambda func, _: cost_of(func),
    "tilekern.autodiff.cotangents": lambda _, op: cotangents.is_linear(op, (True,)),
    "tilekern.lower.triton.legalize.pad_tiles": lambda func, _: pad_tiles(func),
    "tilekern.lower.mosaic.plan.value_sizes": lambda _, op: is_streamed(op),
}


@pytest.mark.parametrize("module", REFUSALS)
def test_an_analysis_refuses_an_unknown_op_and_says_where(module: str) -> None:
    with pytest.raises(
        AssertionError, match=f"^{re.escape(module.strip())} has no rule for the op rotate: see CONTRIB"
    ):
        REFUSALS[module](*rotated())


@pytest.mark.parametrize("emitter", [xla_ops, mosaic_ops], ids=lambda module: module.__name__.split(".")[2])
def test_an_emitter_refuses_an_unknown_op(emitter: Any) -> None:
    with pytest.raises(NotImplementedError, match="backend has no rule for rotate"):
        emitter.function_of(rotated()[1])


@pytest.mark.parametrize("backend", [name for name in attempts() if name != "interpreter"])
def test_a_backend_refuses_an_unknown_op(backend: str) -> None:
    """By a bug's error, which names the pass or the backend, and not by a program that means something else."""
    with pytest.raises((AssertionError, NotImplementedError), match="rotate"):
        attempts()[backend](rotated()[0])


def test_an_unknown_op_has_no_tangent() -> None:
    _, op = rotated()
    moving = [Value(TileType((4, 8), F32))]
    with pytest.raises(NotDifferentiableError, match="rotate has no derivative rule"):
        tangents.tangents(op, op.operands, op.results, moving, Make(Builder(), op))


@tk.kernel(out_type=lambda x: x)
def copied(x, out):
    i = tk.parallel(x.shape[0], 8)
    out[i] = x[i]


def test_an_unknown_op_combines_lanes() -> None:
    """So devices divide an axis only between its tiles, whose lanes it may combine."""
    copy: Func = copied.trace(np.zeros((16, 8), np.float32)).ir

    def rule(op: Op, rewriter: Rewriter) -> list[Value] | None:
        loaded = isinstance(op, Load)
        return rewriter.add(Rotate(operands=(rewriter.one(op.copy()),))) if loaded else None

    for func, sizes in ((copy, {16}), (Rewriter(rule).run(copy), {2, 16})):
        (factor,) = [factor for factor in sharding_of(func).factors if factor.name == "i"]
        assert factor.sizes == sizes
