"""Texts that are almost programs: the parser takes them or refuses them with an error of ours, and soon."""

from __future__ import annotations

import re
from random import Random

import pytest

from tilekern.errors import TilekernError
from tilekern.ir.parse import parse
from tilekern.ir.text import to_text
from tilekern.ir.verify import verify
from tilekern.testing.programs.batches import sample

TOKEN = re.compile(r"\s+|[%@]?[\w.]+|.", re.DOTALL)
ODD = (
    "%",
    "-1",
    "0",
    str(2**31),
    str(10**30),
    "f32",
    "i1",
    "[",
    "]",
    "{",
    "}",
    "(",
    ")",
    "!",
    "+:",
    "\x00",
    "é",
    "'",
    '"',
    "{0}",
    "#",
    "\n",
)
_CHUNK = 500


def mutated(tokens: list[str], random: Random) -> str:
    """The text after one to three changes of tokens."""
    tokens = list(tokens)
    for _ in range(random.randint(1, 3)):
        at, other = random.randrange(len(tokens)), random.randrange(len(tokens))
        match random.randrange(6):
            case 0:
                del tokens[at : at + random.choice((1, 1, 1, 8))]
            case 1:
                tokens[at] = tokens[other]
            case 2:
                tokens[at], tokens[other] = tokens[other], tokens[at]
            case 3:
                tokens.insert(at, random.choice(ODD))
            case 4:
                tokens[at] = random.choice(ODD)
            case _:
                tokens[at:at] = tokens[other : other + 12]
        tokens = tokens or [""]
    return "".join(tokens)


@pytest.mark.parametrize("chunk", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 200))])
def test_every_text_is_taken_or_refused(chunk: int) -> None:
    random, refused = Random(chunk), 0
    for number in range(_CHUNK // 50):
        tokens = TOKEN.findall(to_text(sample(1000 * chunk + number)[0].func))
        for _ in range(50):
            text = mutated(tokens, random)
            try:
                verify(parse(text))
            except TilekernError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{type(error).__name__}: {error} for\n{text}") from error
    assert _CHUNK // 2 < refused < _CHUNK
