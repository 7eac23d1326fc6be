"""All mutants."""

from tests.mutants import autodiff, backends, library, meshes, middle
from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (*middle.MUTANTS, *autodiff.MUTANTS, *backends.MUTANTS, *library.MUTANTS, *meshes.MUTANTS)
