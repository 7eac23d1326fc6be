"""One fault, and the tests that must find it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
      name: says the fault.
      file: the path from the root of the tree.
      before: the text that the fault replaces; it occurs once in the file.
      after: the faulty text.
      tests: files and folders of tests, the likeliest first.
      modes: those of the fuzzer that must find the fault by themselves; "" where only tests must.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    modes: str = ""

    def planted(self, text: str) -> str:
        """The text of the file with the fault."""
        found = text.count(self.before)
        assert found == 1, f"{self.name}: {self.before!r} occurs {found} times in {self.file}"
        return text.replace(self.before, self.after)
