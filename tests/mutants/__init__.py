"""Mutants: one-line faults planted in the compiler, each of which the tests must find.

    python -m tests.mutants                        plant each fault in a copy of the tree, and run its tests
    python -m tests.mutants --only "mask|bound"    those whose name matches
    python -m tests.mutants --list                 names, files, and the changes

A mutant that no test finds survives. A survivor is a defect of the tests: write the test that kills it.
"""
