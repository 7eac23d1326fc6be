"""Faults in sharding rules, and in calls that a mesh divides."""

from tests.mutants.mutant import Mutant

_RULES = ("tests/ir/analysis/test_sharding.py",)
_LANES = ("tests/ir/analysis/test_lanes.py",)

MUTANTS = (
    Mutant(
        "sharding: positions beside those of a tile do not count",
        "tilekern/ir/analysis/sharding.py",
        "        if whole is not None:\n            return whole\n",
        "",
        _RULES,
    ),
    Mutant(
        "sharding: any comparison with a number is one with the extent",
        "tilekern/ir/analysis/sharding.py",
        'return limit == (axis.extent if op.function == "lt" else 0) and self',
        "return limit is not None and axis.extent > 0 and self",
        _RULES,
    ),
    Mutant(
        "additive: a square of a sum is a sum",
        "tilekern/ir/analysis/additive.py",
        'case Elementwise(function="mul") | Dot():\n            return sum(which) == 1',
        'case Elementwise(function="mul") | Dot():\n            return any(which)',
        _RULES,
    ),
    Mutant(
        "lanes: the maximum of a tile is that of its parts",
        "tilekern/ir/analysis/lanes.py",
        'op.monoid == "sum" and _is_nothing(fact.tail)',
        "_is_nothing(fact.tail)",
        _LANES,
    ),
    Mutant(
        "lanes: any number behind the end changes no sum",
        "tilekern/ir/analysis/lanes.py",
        'op.monoid == "sum" and _is_nothing(fact.tail)',
        'op.monoid == "sum"',
        _LANES,
    ),
    Mutant(
        "lanes: rows may be combined with what differs along a tile",
        "tilekern/ir/analysis/lanes.py",
        "or fact.varied & along",
        "or fact.varied & fact.varied - along",
        _LANES,
    ),
    Mutant(
        "lanes: the carry of a loop over tiles has lanes of one tile",
        "tilekern/ir/analysis/lanes.py",
        "if is_of_axis and any(self._of(carry.result).own is not None for carry in carries(op)):",
        "if is_of_axis and any(self._of(carry.result).own is not None for carry in carries(op)[:0]):",
        _LANES,
    ),
    Mutant(
        "lanes: a switch between a sum and a number is a sum",
        "tilekern/ir/analysis/lanes.py",
        "if self._of(result).summed and not all(map(self._is_sum, values)):",
        "if self._of(result).summed and not any(map(self._is_sum, values)):",
        _LANES,
    ),
    Mutant(
        "lanes: a stated derivative may combine what the value does not",
        "tilekern/ir/analysis/lanes.py",
        "        if op.rule is None:\n",
        "        if op.rule is None or op.name:\n",
        _LANES,
    ),
    Mutant(
        "lanes: as many programs add a number whatever the parts",
        "tilekern/ir/analysis/lanes.py",
        "if is_divided == value.summed or",
        "if (is_divided and value.summed) or",
        _LANES,
    ),
    Mutant(
        "sharding: half a tile is as good as a tile",
        "tilekern/ir/analysis/sharding.py",
        "and dim.size == axis.axis.block and is_from_first",
        "and is_from_first",
        _LANES,
    ),
    Mutant(
        "divide: the number of an extent stays that of the whole",
        "tilekern/passes/divide.py",
        "extent = np.asarray(op.array // self._of_constant[op], op.array.dtype)",
        "extent = np.asarray(op.array, op.array.dtype)",
        ("tests/passes/test_divide.py",),
    ),
    Mutant(
        "same program: numbers that a body computes with may differ",
        "tilekern/ir/analysis/same_program.py",
        "same and a.array.tobytes() == b.array.tobytes(),",
        "same,",
        _RULES,
    ),
    Mutant(
        "divided: addends are not summed over devices",
        "tilekern/kernel/divided.py",
        "psum(r, axes) if axes else r for r, axes in pairs",
        "psum(r, axes) if not axes else r for r, axes in pairs",
        ("tests/test_meshes.py",),
    ),
    Mutant(
        "divided: nobody compares the body of a part with that of the whole",
        "tilekern/kernel/divided.py",
        "while isinstance(reason := family.part(found.parts), str):",
        "while isinstance(reason := family.part(found.parts), str) and False:",
        ("tests/test_meshes.py",),
    ),
    Mutant(
        "ring: a device asks for all keys at once",
        "tilekern/distributed/ring.py",
        "            if hold:\n",
        "            if hold and number < 0:\n",
        ("tests/test_meshes.py",),
    ),
    Mutant(
        "sharding rule: the cotangents of a shared operand are not summed",
        "tilekern/kernel/sharding_rule.py",
        "frozenset(n for n, r in enumerate(results) if name not in r) for name in self.sizes}\n        known",
        "frozenset() for name in self.sizes}\n        known",
        ("tests/test_meshes.py",),
    ),
)
