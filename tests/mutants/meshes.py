"""Faults in sharding rules, and in calls that a mesh divides."""

from tests.mutants.mutant import Mutant

_RULES = ("tests/ir/analysis/test_sharding.py",)

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
        'self._sum(op, op.monoid == "sum")',
        "self._sum(op, True)",
        _RULES,
    ),
    Mutant(
        "same program: numbers that a body computes with may differ as sizes do",
        "tilekern/ir/analysis/same_program.py",
        "is_extent and self._bounds_only(a.result),",
        "same and a.array.shape == (),",
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
        "if local(family, types, found) is not None:",
        "if local(family, types, found) is not None or not checked:",
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
