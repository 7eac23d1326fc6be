"""Faults in the interpreter, the analyses, the passes, and the rewrites that backends share."""

from tests.mutants.mutant import Mutant

# Tests over all ops and random programs, which compare every backend with the interpreter.
_OPS = ("tests/lower/test_ops.py", "tests/lower/test_random_programs.py")
_INTERPRETER = (
    "tests/ir/test_interpret.py",
    "tests/ir/test_access.py",
    "tests/lang/test_atomics.py",
    "tests/lang/test_loops.py",
)
_MONOIDS = ("tests/ir/test_compute.py", "tests/ir/test_ordering.py", *_OPS)
_REWRITE = ("tests/lower/rewrite", "tests/lower/triton/legalize/test_expand.py", "tests/lower/llvm/legalize", *_OPS)


def _of_pass(name: str) -> tuple[str, ...]:
    """The tests of a pass, and of what comes out of all of them."""
    return (f"tests/passes/test_{name}.py", *_OPS)


MUTANTS = (
    Mutant(
        "interpreter: lanes before the array are touched",
        "tilekern/ir/touched.py",
        "inside = (indices >= 0) & (indices < length)",
        "inside = indices < length",
        _INTERPRETER,
    ),
    Mutant(
        "interpreter: a conflict of stores is overlooked",
        "tilekern/ir/interpret_outputs.py",
        "        if (foreign := (owner != program) & (owner != _NOBODY)).any():\n            with source.at(loc):",
        "        if (foreign := owner != owner).any():\n            with source.at(loc):",
        _INTERPRETER,
    ),
    Mutant(
        "interpreter: the last tile of a fold is left out",
        "tilekern/ir/interpret.py",
        "tiles = range(axis.first_tile(start), axis.end_tile(stop))",
        "tiles = range(axis.first_tile(start), axis.first_tile(stop))",
        _INTERPRETER,
    ),
    Mutant(
        "interpreter: an element that a program updates twice counts once",
        "tilekern/ir/interpret_outputs.py",
        "ufunc(kind).at(wide, flat, values.astype(wide.dtype))",
        "wide[flat] = ufunc(kind)(wide[flat], values.astype(wide.dtype))",
        ("tests/lang/test_atomics.py", *_INTERPRETER),
    ),
    Mutant(
        "monoids: the identity of and is 0",
        "tilekern/ir/compute.py",
        "return np.invert(np.zeros((), dtype))",
        "return np.zeros((), dtype)",
        _MONOIDS,
    ),
    Mutant(
        "monoids: the identity of a maximum is the lowest number",
        "tilekern/ir/compute.py",
        "has_inf = bool(np.isinf(np.asarray(np.inf).astype(dtype)))",
        "has_inf = False",
        _MONOIDS,
    ),
    Mutant(
        "batch: the run is the second dim",
        "tilekern/passes/batch.py",
        "Access(\n            (*op.access.dims[:dim], entry, *op.access.dims[dim:])",
        "Access(\n            (*op.access.dims[: dim + 1], entry, *op.access.dims[dim + 1 :])",
        ("tests/passes/test_batch.py", "tests/test_vmap.py"),
    ),
    Mutant(
        "elide masks: the larger operand of a minimum wins",
        "tilekern/passes/elide_masks.py",
        'greater, less = (winner, loser) if op.function == "max" else (loser, winner)',
        "greater, less = (winner, loser)",
        _of_pass("elide_masks"),
    ),
    Mutant(
        "elide masks: a load that is masked loses its fill",
        "tilekern/passes/elide_masks.py",
        "op.filled and not op.masked and access.in_bounds",
        "op.filled and access.in_bounds",
        _of_pass("elide_masks"),
    ),
    Mutant(
        "ranges: an access one past the end is proved in bounds",
        "tilekern/ir/analysis/ranges.py",
        "first_element.within(0, size - lanes)",
        "first_element.within(0, size - lanes + 1)",
        ("tests/ir/analysis/test_ranges.py", *_of_pass("elide_masks")),
    ),
    Mutant(
        "ranges: a digit grows over turns of its modulus",
        "tilekern/ir/analysis/ranges.py",
        "if low // term.mod == high // term.mod else unknown",
        "if low % term.mod <= high % term.mod else unknown",
        ("tests/ir/analysis/test_ranges.py", *_of_pass("elide_masks")),
    ),
    Mutant(
        "elide ranges: any stop counts as a multiple of the block",
        "tilekern/passes/elide_ranges.py",
        "return stop is self._stop and self._multiple(stop)",
        "return stop is self._stop",
        _of_pass("elide_ranges"),
    ),
    Mutant(
        "elide ranges: the first tile may begin before the start",
        "tilekern/passes/elide_ranges.py",
        "return reaches and self._is_start(bound) and self._multiple(bound)",
        "return reaches and self._is_start(bound)",
        _of_pass("elide_ranges"),
    ),
    Mutant(
        "middle tiles: they begin a tile early",
        "tilekern/passes/middle_tiles.py",
        "line.slope - 1 - line.low if rises",
        "-1 - line.low if rises",
        _of_pass("split_loops"),
    ),
    Mutant(
        "split loops: reversed folds run forwards",
        "tilekern/passes/split_loops.py",
        "in reversed(parts) if op.reverse else parts:",
        "in parts:",
        _of_pass("split_loops"),
    ),
    Mutant(
        "guard masks: the last of the middle tiles is masked as if it were the first",
        "tilekern/passes/guard_masks.py",
        'make.of("lt", fresh[0]',
        'make.of("le", fresh[0]',
        _of_pass("guard_masks"),
    ),
    Mutant(
        "sink scales: a factor may be negative",
        "tilekern/passes/sink_scales.py",
        ".smallest_normal <= by < np.inf",
        ".smallest_normal <= abs(by) < np.inf",
        _of_pass("sink_scales"),
    ),
    Mutant(
        "delay dots: the last tile is that behind the end",
        "tilekern/passes/delay_dots.py",
        'make.of("sub", end, 1)',
        "end",
        _of_pass("delay_dots"),
    ),
    Mutant(
        "delay dots: a ragged fold of one tile runs it again",
        "tilekern/passes/delay_dots.py",
        "if op.axis.full_tiles < op.axis.tiles:",
        "if False:",
        _of_pass("delay_dots"),
    ),
    Mutant(
        "dce: carries that only others read are lost",
        "tilekern/passes/dce.py",
        "self._sources[c.result] = [c.init, c.yielded, *c.args]",
        "self._sources[c.result] = [c.init, *c.args]",
        _of_pass("dce"),
    ),
    Mutant(
        "cse: loads of outputs are merged across stores",
        "tilekern/passes/cse.py",
        '(isinstance(op, Load) and op.ref.ref.role == "in")',
        "isinstance(op, Load)",
        _of_pass("cse"),
    ),
    Mutant(
        "hoist: loads of outputs leave the loop",
        "tilekern/passes/hoist_invariants.py",
        'isinstance(op, Load) and op.ref.ref.role == "in"',
        "isinstance(op, Load)",
        _of_pass("hoist_invariants"),
    ),
    Mutant(
        "canonicalize: a subtracted position is added",
        "tilekern/ir/analysis/mixed_radix.py",
        "return self.of(x).plus(self.of(y), -1)",
        "return self.of(x).plus(self.of(y))",
        ("tests/ir/analysis/test_mixed_radix.py", *_of_pass("canonicalize_access")),
    ),
    Mutant(
        "canonicalize: negative positions are divided as if they were not",
        "tilekern/ir/analysis/mixed_radix.py",
        "interval is None or interval.low < 0",
        "interval is None",
        ("tests/ir/analysis/test_mixed_radix.py", *_of_pass("canonicalize_access")),
    ),
    Mutant(
        "split axes: ragged axes are cut, too",
        "tilekern/passes/split_axes.py",
        "if axis.full_tiles != axis.tiles:",
        "if axis.tiles < 0:",
        _of_pass("split_axes"),
    ),
    Mutant(
        "mixed radix: a remainder may be as large as the divisor",
        "tilekern/ir/analysis/mixed_radix.py",
        "if remainder.within(0, divisor - 1, ranges):",
        "if remainder.within(0, divisor, ranges):",
        ("tests/ir/analysis/test_mixed_radix.py", *_of_pass("canonicalize_access")),
    ),
    Mutant(
        "rounding: ties of float64 are rounded twice",
        "tilekern/lower/rewrite/rounding.py",
        'even = make.of("eq", make.of("and", bits, 1), 0)',
        'even = make.of("eq", make.of("and", bits, 1), 2)',
        _REWRITE,
    ),
    Mutant(
        "narrow floats: casts truncate",
        "tilekern/lower/rewrite/narrow_floats.py",
        'half = make.of("add", even, (1 << (form.dropped - 1)) - 1)',
        'half = make.of("and", even, 0)',
        _REWRITE,
    ),
    Mutant(
        "narrow floats: NaN becomes a number",
        "tilekern/lower/rewrite/narrow_floats.py",
        'magnitude = make.select(make.of("ne", x, x), form.nan, magnitude)',
        "magnitude = make.select(is_tiny, magnitude, magnitude)",
        _REWRITE,
    ),
    Mutant(
        "sort key: the order of negative floats is reversed",
        "tilekern/lower/rewrite/sort_key.py",
        'make.of("xor", bits, make.of("and", sign, top))',
        'make.of("xor", bits, make.of("and", sign, 0))',
        _REWRITE,
    ),
    Mutant(
        "costs: the tiles of a fold are counted without its start",
        "tilekern/ir/analysis/iterations.py",
        "elements = np.maximum(0, end - first // axis.block * axis.block)",
        "elements = np.maximum(0, end)",
        ("tests/ir/analysis/test_iterations.py",),
    ),
    Mutant(
        "costs: an array counts each time that it is loaded",
        "tilekern/ir/analysis/costs.py",
        'min(work["r", param], whole)',
        'work["r", param]',
        ("tests/ir/analysis/test_costs.py",),
    ),
    Mutant(
        "custom calls: HLO names them after JAX's primitive",
        "tilekern/_jax.py",
        "[str(context.name_stack)]), name])",
        '[str(context.name_stack)]), "ffi_call"])',
        ("tests/test_profiles.py",),
    ),
)
