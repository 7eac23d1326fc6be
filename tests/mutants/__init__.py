"""Mutants: one-line faults planted in the compiler, each of which the tests must find.

    python -m tests.mutants                        plant each fault in a copy of the tree, and run its tests
    python -m tests.mutants --only "mask|bound"    those whose name matches
    python -m tests.mutants --list                 names, files, and the changes

A mutant that no test finds survives. A survivor is a defect of the tests: write the test that kills it.

Faults by hand stand in `table.py`. Others are drawn from the syntax trees of the package, and all tests that reach them
may find them, which are known from a recorded run of the tests:

    python -m tests.mutants --record               run the tests, and record which lines each one reaches
    python -m tests.mutants --drawn 300            append what kills each fault that `results.jsonl` does not know yet
    python -m tests.mutants --drawn 60 --rooms passes,autodiff --first
                                                   of two rooms, and only the first test that kills a fault
    python -m tests.mutants --summary
    python -m tests.mutants --repeats              write `tests/repeats.txt`, the tests that `make test` leaves out

Without a recorded run, files of tests run, the nearest first. `results.jsonl` is a file of the repository: a run goes
on where earlier ones ended.
"""
