"""All mutants."""

from tests.mutants import backends, library, middle
from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (*middle.MUTANTS, *backends.MUTANTS, *library.MUTANTS)
