"""The sums of a matrix: kills of each room, the faults that survive, and the tests that may go."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from tests.mutants.drawn import room_of
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.matrix import DEAR, Row
from tests.mutants.reach import Reach, Recorded


def summary(rows: Sequence[Row], reach: Reach) -> Iterator[str]:
    """The lines of the summary."""
    rooms = {
        room: [row for row in rows if room_of(row.fault) == room] for room in map(room_of, (r.fault for r in rows))
    }
    yield "| room | faults | killed by `make test` | by `make test-full` alone | equivalent | survive | open |"
    yield "|---|---|---|---|---|---|---|"
    for room, those in [*sorted(rooms.items()), ("all", list(rows))]:
        verdicts = Counter(_verdict(row) for row in those)
        figures = (verdicts[v] for v in ("killed", "killed by test-full", "equivalent", "survives", "open"))
        yield f"| {room} | {len(those)} | {' | '.join(map(str, figures))} |"
    for verdict in ("killed by test-full", "survives", "open"):
        for row in rows:
            if _verdict(row) == verdict:
                yield f"{verdict}: {row.fault} line {row.line}: {row.before!r} -> {row.after!r} ({row.passed} passed)"
    for row in rows:
        if row.verdict == "killed" and row.fault in EQUIVALENT:
            yield f"no equivalent: {row.fault}, killed by {row.killers[0]}"
    yield from _tests(rows, reach)


def _verdict(row: Row) -> str:
    if row.verdict == "killed":
        return "killed" if row.suite == "test" else "killed by test-full"
    return "equivalent" if row.fault in EQUIVALENT else row.verdict


def _tests(rows: Sequence[Row], reach: Reach) -> Iterator[str]:
    """Files of tests, then the tests that are dear: their seconds, their kills, their kills alone, their own lines."""
    files, files_alone, tests, tests_alone = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for row in rows:
        killed_in = {name.partition("::")[0] for name in row.killers}
        files.update(killed_in)
        tests.update(row.killers)
        if len(killed_in) == 1:
            files_alone.update(killed_in)
        if len(row.killers) == 1:
            tests_alone.update(row.killers)
    seconds = defaultdict[str, float](float)
    for test in reach.tests:
        seconds[test.file] += test.seconds
    yield "| file of tests | seconds | kills | alone |"
    yield "|---|---|---|---|"
    for file, total in sorted(seconds.items(), key=lambda item: -item[1]):
        if total > DEAR:
            yield f"| {file} | {total:.0f} | {files[file]} | {files_alone[file]} |"
    own = own_lines(reach.tests)
    yield f"| test of over {DEAR:g} s | seconds | kills | alone | own lines |"
    yield "|---|---|---|---|---|"
    for test in sorted(reach.tests, key=lambda test: -test.seconds):
        if test.seconds > DEAR:
            figures = tests[test.name], tests_alone[test.name], own[test.name]
            yield f"| {test.name} | {test.seconds:.1f} | {' | '.join(map(str, figures))} |"


def own_lines(tests: Sequence[Recorded]) -> dict[str, int]:
    """For each test the number of lines of the package that it runs and no test that takes fewer seconds runs.

    Example: of a test of 1 s that runs lines 1 and 2, and a test of 5 s that runs lines 2 and 3, each has one.
    """
    reached: dict[str, int] = {}
    own: dict[str, int] = {}
    for test in sorted(tests, key=lambda test: test.seconds):
        own[test.name] = sum((mask & ~reached.get(file, 0)).bit_count() for file, mask in test.lines.items())
        for file, mask in test.lines.items():
            reached[file] = reached.get(file, 0) | mask
    return own
