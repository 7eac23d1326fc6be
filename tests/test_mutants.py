"""The kit of mutants stays applicable: faults find their places, drawn faults are small, and runs are told right."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mutants import matrix
from tests.mutants.drawn import ROOMS, drawn, room_of
from tests.mutants.edits import edits
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.mutant import Mutant
from tests.mutants.near import by_nearness
from tests.mutants.reach import Reach, Recorded, files_of_package, importers, read
from tests.mutants.summary import own_lines, summary
from tests.mutants.table import MUTANTS

ROOT = Path(__file__).parent.parent


def test_the_kit_is_large_and_its_names_differ() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert mutant.planted(text) != text
    assert [t for t in mutant.tests if (ROOT / t).exists()] == list(mutant.tests)


@pytest.mark.parametrize(
    "kind, text, after",
    [
        ("operator", "y = x + 1", "y = x - 1"),
        ("operator", "y = a and b and c", "y = a or b and c"),
        ("operator", "y = np.minimum(x, z)", "y = np.maximum(x, z)"),
        ("operator", 'y = make.of("mul", x, z)', 'y = make.of("add", x, z)'),
        ("operator", "y = not x", "y = (x)"),
        ("bound", "y = x < z", "y = x <= z"),
        ("bound", "y = x[3]", "y = x[4]"),
        ("bound", "y = x[3]", "y = x[2]"),
        ("dtype", "y = x.astype(jnp.float32)", "y = x.astype(jnp.bfloat16)"),
        ("dtype", "y = x.astype(jnp.int32)", "y = x.astype(jnp.uint32)"),
        ("dtype", 'y = zeros("int8")', 'y = zeros("uint8")'),
        ("dtype", "y = F32 if wide else F64", "y = F64 if wide else F64"),
        ("identity", "y = full(-np.inf)", "y = full(np.inf)"),
        ("identity", "y = full(0.0)", "y = full(1.0)"),
        ("flag", "y = sort(x, stable=True)", "y = sort(x, stable=False)"),
        ("mask", "y = load(x, mask=op.mask)", "y = load(x, mask=None)"),
        ("mask", "y = load(x, op.mask)", "y = load(x, None)"),
        ("drop", "x = f(x)", "pass"),
        ("drop", "x[1] = y", "pass"),
        ("drop", "check(x)", "pass"),
        ("drop", "y = [x for x in z if x]", "y = [x for x in z if True]"),
        ("negate", "y = x is None", "y = x is not None"),
        ("negate", "y = 1 if x else z", "y = 1 if (not (x)) else z"),
        ("swap", "y = f(x, z)", "y = f(z, x)"),
        ("swap", "y = x - z", "y = z - x"),
    ],
)
def test_an_edit_is_a_small_change(kind: str, text: str, after: str) -> None:
    function = f"def f():\n    {text}\n"
    assert (kind, f"def f():\n    {after}\n") in {(e.kind, e.planted(function)) for e in edits("a.py", function)}


def test_an_edit_keeps_the_numbers_of_the_lines_behind_it() -> None:
    text = "def f(x):\n    if x > 'é' or (\n        x == 2\n    ):\n        return 1\n"
    text += "    return g(\n        a,\n        c)\n"
    planted = [edit.planted(text) for edit in edits("a.py", text)]
    assert len(planted) > 8
    assert {each.count("\n") for each in planted} == {text.count("\n")}
    assert len(set(planted)) == len(planted)


@pytest.mark.parametrize(
    "text",
    [
        '"""1 + 2"""',
        "x: Literal[1, 2]",
        "raise ShapeError(f'{x + 1}', got=x + 1)",
        "fail = ShapeError(x + 1)",
        "assert x < 3",
        "import a.b",
        "def describe(x): return x + 1",
        "def __repr__(x): return x + 1",
        "if TYPE_CHECKING:\n        x = x + 1",
        "y = f(x, expected=x + 1)",
        "y = zip(x, 'z', strict=True)",
    ],
)
def test_text_for_people_is_left_alone(text: str) -> None:
    assert not edits("a.py", f"def f():\n    {text}\n")


def test_an_edit_keeps_its_name_where_others_change() -> None:
    before = "def f(x):\n    y = x + 1\n    return y + 1\n"
    after = f"def g(x):\n    return x + 1\n\n\n{before}".replace("return y + 1", "return y + 2")
    was, now = ([e for e in edits("a.py", text) if e.scope == "f"] for text in (before, after))
    of_sum = {e.name for e in was if e.line == 2}
    assert len(of_sum) == 3 and of_sum == {e.name for e in now if e.line == 6}
    assert not {e.name for e in was if e.line == 3} & {e.name for e in now if e.line == 7 and e.kind == "bound"}


SMALL = "".join(
    f"def f{n}(x, mask):\n    x = g(x + {n}, mask=mask)\n    return x if x < {n} else h\n\n" for n in range(9)
)
FILES = {"tilekern/ir/a.py": SMALL, "tilekern/lower/xla/a.py": SMALL, "kernels/a.py": SMALL, "kernels/cases.py": SMALL}


def test_faults_are_drawn_evenly_and_a_larger_sample_holds_a_smaller_one() -> None:
    few, many = drawn(12, FILES), drawn(30, FILES)
    assert Counter(room_of(fault.file) for fault in few) == {"ir": 4, "xla": 4, "kernels": 4}
    assert {fault.name for fault in few} < {fault.name for fault in many}
    assert len({fault.kind for fault in many}) >= 5
    assert len({(fault.file, fault.scope) for fault in many}) >= 24
    assert few == drawn(12, dict(reversed(FILES.items())))


def test_faults_of_chosen_rooms_are_those_of_a_larger_sample() -> None:
    chosen = drawn(4, FILES, chosen=("xla",))
    assert {room_of(fault.file) for fault in chosen} == {"xla"}
    assert chosen == [fault for fault in drawn(12, FILES) if room_of(fault.file) == "xla"]


def test_every_file_has_a_room() -> None:
    assert {room_of(file) for file in files_of_package()} == {*ROOMS}


TEXTS = {
    "tilekern/ir/a.py": "def f(x):\n    x = g(x)\n    return x\n",
    "tilekern/lang/b.py": "from tilekern.ir import (\n    a,\n)",
}


def recorded(name: str, seconds: float, lines: int = 0b0100, **flags: bool) -> Recorded:
    return Recorded(name, seconds, {"tilekern/ir/a.py": lines} if lines else {}, **flags, texts=TEXTS)


RECORDED = Reach(
    [
        recorded("tests/ir/test_a.py::near", 0.1),
        recorded("tests/lang/test_b.py::far", 0.1, 0b1100),
        recorded("tests/ir/test_a.py::dear", 9.0),
        recorded("tests/ir/test_a.py::broken", 0.1, passed=False),
        recorded("tests/test_c.py::starts", 0.1, 0, starts=True),
        Recorded("tests/test_c.py::other", 0.1, {"tilekern/lang/b.py": 1}),
        recorded("tests/meshes/test_d.py::divided", 0.1),
    ],
    TEXTS,
)


def test_tests_that_reach_a_fault_start_with_those_that_are_cheap_and_near() -> None:
    before = TEXTS["tilekern/ir/a.py"]
    for text in (before, f"# A comment.\n{before}"):
        (fault,) = (edit for edit in edits("tilekern/ir/a.py", text) if edit.kind == "drop")
        tests = matrix.reaching(fault, Reach(RECORDED.tests, TEXTS | {"tilekern/ir/a.py": text}))
        assert [test.name.partition("::")[2] for test in tests] == ["near", "far", "divided", "dear", "starts"]


def test_code_of_a_module_is_reached_by_the_tests_of_its_file_or_of_those_that_import_it() -> None:
    assert importers("tilekern/ir/a.py", TEXTS) == {"tilekern/lang/b.py"}
    assert not importers("tilekern/ir/g.py", TEXTS)
    edit = edits("tilekern/ir/a.py", "A = b + 1\n")[0]
    assert len(matrix.reaching(edit, RECORDED)) == 5
    alone = Reach(RECORDED.tests[4:6], TEXTS)
    assert [test.name for test in matrix.reaching(edit, alone)] == [test.name for test in alone.tests[::-1]]


def test_without_a_recorded_run_files_come_by_what_they_import_and_by_their_names() -> None:
    (fault,) = (edit for edit in edits("tilekern/ir/a.py", TEXTS["tilekern/ir/a.py"]) if edit.kind == "drop")
    broad = "tests/lower/test_random_programs.py"
    tests = [
        Recorded("tests/lang/test_b.py", 1.0),
        Recorded("tests/ir/test_c.py", 9.0),
        Recorded(broad, 30.0),
        Recorded("tests/lang/test_uses.py", 1.0, {"tilekern/ir/a.py": -1}),
        Recorded("tests/ir/test_a.py", 2.0, {"tilekern/ir/a.py": -1}),
    ]
    found = [test.name for test in by_nearness(fault, Reach(tests, TEXTS, recorded=False))]
    names = ["tests/ir/test_a.py", "tests/lang/test_uses.py", broad, "tests/ir/test_c.py", "tests/lang/test_b.py"]
    assert found == names


class FakeTree(matrix.Tree):
    """Tests whose name has "broken" fail without a fault, too."""

    def outcomes(
        self, tests: Sequence[Recorded], suite: str = "test", first: bool = False
    ) -> tuple[list[str], list[str]]:
        del suite, first
        names = [test.name for test in tests]
        return [n for n in names if "broken" not in n], [n for n in names if "broken" in n]


@pytest.mark.parametrize(
    "killers, wanted",
    [
        (["a::x"], ["a::x"]),
        (["a::broken"], []),
        (["a::x", "a::broken"], ["a::x"]),
        (["a::broken", "a::x"], ["a::x"]),
        (["a::broken", "a::broken2", "a::broken3", "a::x"], []),  # so many that the tree must be broken
        (["collection"], ["collection"]),
    ],
)
def test_a_test_that_fails_without_the_fault_kills_nothing(killers: list[str], wanted: list[str]) -> None:
    assert matrix.confirmed(killers, [Recorded("a", 1.0)], FakeTree(Path()), "test") == wanted


def test_behind_a_test_that_fails_without_the_fault_the_search_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Planted(FakeTree):
        """With --first, a batch ends at its first failure."""

        def outcomes(
            self, tests: Sequence[Recorded], suite: str = "test", first: bool = False
        ) -> tuple[list[str], list[str]]:
            passed, failed = super().outcomes(tests)
            return (passed[:0] if failed else passed), failed[:1]

    monkeypatch.setattr(matrix.Tree, "plant", lambda self, fault: None)
    monkeypatch.setattr(matrix.Tree, "restore", lambda self, fault: None)
    (fault,) = (edit for edit in edits("tilekern/ir/a.py", TEXTS["tilekern/ir/a.py"]) if edit.kind == "drop")
    tree = Planted(Path())
    batch = [Recorded(f"a::{name}", 1.0) for name in ("broken", "x", "broken2", "y")]
    assert matrix._killers(fault, batch, tree, matrix.Effort(9.0, first=True)) == (2, [])
    assert tree.unsound == {"a::broken", "a::broken2"}


def test_a_collection_that_fails_without_the_fault_kills_nothing() -> None:
    assert matrix.confirmed(["collection"], [Recorded("broken", 1.0)], FakeTree(Path()), "test") == []


def test_batches_hold_all_tests_and_grow() -> None:
    tests = [Recorded(f"tests/test_{n // 20}.py::{n}", 1.0) for n in range(200)]
    found = list(matrix.batches(tests))
    assert [test for batch in found for test in batch] == tests
    assert [len(batch) for batch in found][:2] == [5, 29]


PACKAGE = "def double(x):\n    if x > 3:\n        return x + x\n    return 2 * x\n"
TESTS = """
import os, time
from tilekern.a import double
def test_small(): assert double(2) == 4
def test_large(): assert double(4) == 8
def test_wrong(): assert double(1) == 1
def test_ends(): os._exit(7)
"""


def test_runs_are_recorded_and_events_say_how_tests_ended(tmp_path: Path) -> None:
    texts = {"tilekern/__init__.py": "", "tilekern/a.py": PACKAGE, "tests/test_a.py": TESTS}
    texts |= {
        f"tests/mutants/{name}.py": (ROOT / f"tests/mutants/{name}.py").read_text() for name in ("reach", "chosen")
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTEST_PLUGINS": "tests.mutants.reach", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-k", "not ends", "-p", "no:cacheprovider"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True)
    recorded = read(tmp_path / "build" / "reach")
    assert {test.name.rpartition(":")[2]: (test.lines["tilekern/a.py"], test.passed) for test in recorded.tests} == {
        "test_small": (0b10100, True),
        "test_large": (0b01100, True),
        "test_wrong": (0b10100, False),
    }
    tests = [*recorded.tests, Recorded("tests/test_a.py::test_ends", 0.1)]
    passed, failed = matrix.Tree(tmp_path).outcomes(tests[1:])
    assert (passed, failed) == (["tests/test_a.py::test_large"], ["tests/test_a.py::test_wrong", tests[-1].name])
    whole = matrix.whole_files(tests[:1])
    assert matrix.Tree(tmp_path).outcomes(whole) == ([test.name for test in tests[:2]], failed)
    (tmp_path / "tilekern" / "a.py").write_text("(")
    assert matrix.Tree(tmp_path).outcomes(tests) == ([], ["collection"])


def test_a_summary_counts_and_names_survivors(tmp_path: Path) -> None:
    rows = [matrix.Row(f"tilekern/ir/a.py:f:drop:{n}", 2, "x", "pass", verdict="killed") for n in range(3)]
    rows[0].killers, rows[1].killers = (
        ["tests/ir/test_a.py::dear"],
        ["tests/ir/test_a.py::dear", "tests/ir/test_a.py::near"],
    )
    rows[1].suite, rows[2].verdict = "test-full", "survives"
    text = "\n".join(summary(rows, RECORDED))
    assert "| ir | 3 | 1 | 1 | 0 | 1 | 0 |" in text
    assert "survives: tilekern/ir/a.py:f:drop:2 line 2: 'x' -> 'pass'" in text
    assert "| tests/ir/test_a.py | 9 | 2 | 2 |" in text
    assert "| tests/ir/test_a.py::dear | 9.0 | 2 | 1 | 0 |" in text


def test_own_lines_are_those_that_no_cheaper_test_runs() -> None:
    lines = {"cheap": {"a.py": 0b0110}, "dear": {"a.py": 0b1010, "b.py": 0b0010}, "dearest": {"a.py": 0b1100}}
    tests = [Recorded(name, seconds, lines[name]) for seconds, name in enumerate(lines, 1)]
    assert own_lines(tests[::-1]) == {"cheap": 2, "dear": 2, "dearest": 0}


@pytest.mark.parametrize("name, reason", EQUIVALENT.items())
def test_an_equivalent_fault_has_its_place_and_a_reason(name: str, reason: str) -> None:
    file = name.partition(":")[0]
    assert name in {edit.name for edit in edits(file, (ROOT / file).read_text())} and reason
