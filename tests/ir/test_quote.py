"""Text that users name, on its way into programs."""

from __future__ import annotations

import ast
import json

from hypothesis import example, given
from hypothesis import strategies as st

from tilekern.ir.quote import code_of, quoted, visible

TEXTS = st.text(st.characters(), max_size=20) | st.text('"\\#\n\r\0\f\x1a\x7f\x85\u2028\u2029\ud800 x', max_size=12)


@given(text=TEXTS)
def test_visible_text_is_one_line_of_printable_ascii(text: str) -> None:
    found = visible(text)
    assert found.isascii() and (found.isprintable() or not found)
    assert ast.dump(ast.parse(f"a = 1  # {found}")) == ast.dump(ast.parse("a = 1"))
    assert visible(found) == found
    assert found == text or not (text.isascii() and text.isprintable())


@given(text=TEXTS)
@example(text="\x7f")
def test_a_literal_is_the_text_in_json_and_of_visible_text_in_python(text: str) -> None:
    found = quoted(text)
    assert found.isascii() and found.isprintable()
    assert json.loads(found) == text
    assert ast.literal_eval(quoted(visible(text))) == visible(text)


@given(texts=st.lists(TEXTS, max_size=4))
def test_code_has_no_words_of_strings_and_comments(texts: list[str]) -> None:
    lines = [f"f({quoted(visible(text))}, 1)  # {visible(text)}" for text in texts]
    assert code_of("\n".join(lines)) == "\n".join(['f("", 1)  '] * len(texts))
