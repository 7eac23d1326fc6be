"""Drawn faults that no test can find, each with the reason: the program means the same, or only its speed differs."""

EQUIVALENT: dict[str, str] = {}
