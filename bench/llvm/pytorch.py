"""PyTorch's attention as a contestant: an environment of its own, reached through a child process.

`make pytorch` makes the environment. The child (`pytorch_child.py`) runs none of our code and times its calls
itself; each line to it is a JSON object, and so is each answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.llvm.peak import THREADS
from bench.timing import Clock

ENVIRONMENT = Path(__file__).parents[2] / ".venv-pytorch"
CHILD = Path(__file__).with_name("pytorch_child.py")


@dataclass(frozen=True)
class Attention:
    """A case: self-attention of a batch of 1.

    Attributes:
      length: the length of the sequence.
      heads: the number of heads.
      width: the width of a head.
      dtype: the dtype of all arrays.
      causal: True if a position sees only itself and earlier positions.
    """

    length: int
    heads: int
    width: int
    dtype: str
    causal: bool

    @property
    def flops(self) -> float:
        """Operations of both products; half as many if causal, as is usual."""
        return 4.0 * self.length**2 * self.width * self.heads / (2 if self.causal else 1)


class PyTorch:
    """The child.

    Attributes:
      name: "PyTorch" and its version.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name = f"PyTorch {self._answer()['version']}"

    def clock(self, case: Attention) -> Clock:
        """Prepare a case, and return its clock, which is valid until the next case."""
        self._ask(asdict(case))
        return lambda: self._ask({})["seconds"]

    def close(self) -> None:
        """End the child."""
        self._process.communicate()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of PyTorch ended with status {self._process.wait()}")
        return json.loads(line)


@contextmanager
def start(environment: Path = ENVIRONMENT) -> Generator[PyTorch | None]:
    """A context of the child; None, and a message, if the environment does not exist."""
    python = environment / "bin" / "python"
    if not python.exists():
        print("bench: nothing is compared to PyTorch: `make pytorch` makes its environment", file=sys.stderr)
        yield None
        return
    pytorch = PyTorch([str(python), str(CHILD), str(THREADS)])
    try:
        yield pytorch
    finally:
        pytorch.close()
