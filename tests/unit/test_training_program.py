"""A cell's source run as IPython would: values, `await`, future imports, errors without frames of ours."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from workbench.training.display import LIMIT, bundle
from workbench.training.program import MOST_TEXT, NO_MAGICS, Program, explain, is_quiet


@pytest.fixture
def program() -> Iterator[Program]:
    made = Program({"__name__": "__main__", "__builtins__": __builtins__})
    yield made
    made.close()


def failure(program: Program, source: str, name: str = "<cell 1>") -> dict[str, str]:
    with pytest.raises(BaseException) as caught:
        program.run(source, name)
    return explain(caught.value)


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("1 + 1", 2),
        ("x = 3\nx", 3),
        ("x = 3", None),
        ("", None),
        ("# only a comment", None),
        ("None", None),
        ("for i in range(3):\n    i", None),
        ("1; 2", 2),
        ("1;", None),
        ("1;  # said nothing", None),
        ("'a;'", "a;"),
        ("'#;'  # not quiet", "#;"),
        ("(1,\n 2)", (1, 2)),
        ("def f():\n    return 5\nf()", 5),
        ("import asyncio\nawait asyncio.sleep(0, 'slept')", "slept"),
        ("async def f():\n    return 4\ny = await f()\ny", 4),
        ("[await f() for f in ()]", []),
        ("global z\nz = 1\nz", 1),
        ("\ufeff1"[1:], 1),
    ],
)
def test_value_of_the_last_expression(program: Program, source: str, value: object) -> None:
    assert program.run(source, "<cell>") == value


def test_state_and_underscore_are_kept(program: Program) -> None:
    program.run("x = 20", "<cell 1>")
    program.run("x + 1;", "<cell 2>")
    assert program.run("_ * 2", "<cell 3>") == 42
    program.run("None", "<cell 4>")
    assert program.run("_", "<cell 5>") == 42


def test_a_future_import_holds_for_its_cell_and_not_the_products(program: Program) -> None:
    source = "from __future__ import annotations\ndef f(x: Missing): pass\nf.__annotations__"
    assert program.run(source, "<cell>") == {"x": "Missing"}
    assert program.run("def f(x: int): pass\nf.__annotations__", "<cell>") == {"x": int}, "ours must not leak in"


def test_a_future_import_before_the_last_expression_holds_there_too(program: Program) -> None:
    assert program.run("from __future__ import annotations\n(lambda: 1)()", "<cell>") == 1


def test_what_a_cell_began_goes_on_in_the_next(program: Program) -> None:
    program.run("import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 9", "<cell 1>")
    program.run("async def begin():\n    global task\n    task = asyncio.create_task(f())\nawait begin()", "<cell 2>")
    assert program.run("await task", "<cell 3>") == 9


def test_functions_of_a_cell_can_be_pickled_by_reference(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    program.run("def f(n):\n    return n + 1", "<cell>")
    main = type(sys)("__main__")
    main.__dict__.update(program.namespace)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert pickle.loads(pickle.dumps(program.namespace["f"]))(41) == 42


def test_traceback_has_the_cells_lines_and_no_frame_of_ours(program: Program) -> None:
    said = failure(program, "def broken():\n    raise ValueError('bad batch')\n\nbroken()")
    assert said["error"] == "ValueError: bad batch"
    assert said["traceback"].count('File "<cell 1>"') == 2 and "raise ValueError('bad batch')" in said["traceback"]
    assert "workbench" not in said["traceback"]


def test_traceback_of_an_older_cell_keeps_its_lines(program: Program) -> None:
    program.run("def broken():\n    return 1 / 0  # first cell", "<cell 1>")
    assert "# first cell" in failure(program, "broken()", "<cell 2>")["traceback"]


def test_causes_and_groups_are_shown_without_frames_of_ours(program: Program) -> None:
    source = "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ExceptionGroup('all', [KeyError('k')]) from e"
    said = failure(program, source)
    assert "direct cause" in said["traceback"] and "KeyError: 'k'" in said["traceback"]
    assert "ZeroDivisionError" in said["traceback"] and "/training/" not in said["traceback"]


@pytest.mark.parametrize("source", ["def f(:", "x = (1,", "  x = 1", "return 1", "'\\u12'", "x = \x00"])
def test_syntax_errors_are_the_cells(program: Program, source: str) -> None:
    said = failure(program, source)
    assert said["error"].startswith(("SyntaxError", "IndentationError", "ValueError"))
    assert "ast.py" not in said["traceback"] and "/training/" not in said["traceback"]


@pytest.mark.parametrize("source", ["%time f()", "x = 1\n%%timeit\nf()", "!ls", "    %matplotlib inline"])
def test_magics_are_answered_with_a_hint(program: Program, source: str) -> None:
    assert NO_MAGICS in failure(program, source)["traceback"]


def test_a_modulo_over_two_lines_is_no_magic(program: Program) -> None:
    assert program.run("(7\n%4)", "<cell>") == 3


def test_the_error_line_is_short_and_the_traceback_bounded(program: Program) -> None:
    said = failure(program, "raise ValueError('x' * 10**6)")
    assert len(said["error"]) <= 2000 and len(said["traceback"]) < MOST_TEXT + 100
    assert "characters left out" in said["traceback"]


def test_endless_recursion_is_shown_shortly(program: Program) -> None:
    said = failure(program, "def f():\n    f()\nf()")
    assert "RecursionError" in said["error"] and len(said["traceback"]) < 4000


def test_an_exception_whose_str_fails_is_still_told(program: Program) -> None:
    source = "class Odd(Exception):\n    def __str__(self):\n        raise ValueError\nraise Odd"
    assert "Odd" in failure(program, source)["error"]


def test_notes_do_not_hide_the_error(program: Program) -> None:
    said = failure(program, "e = ValueError('bad')\ne.add_note('look here')\nraise e")
    assert said["error"] == "ValueError: bad" and "look here" in said["traceback"]


def test_notes_of_two_lines_do_not_hide_the_error(program: Program) -> None:
    said = failure(program, "e = ValueError('bad')\ne.add_note('look\\nhere')\nraise e")
    assert said["error"] == "ValueError: bad"


def test_the_error_of_a_message_with_lines_is_whole(program: Program) -> None:
    assert failure(program, "raise ValueError('one\\ntwo')")["error"] == "ValueError: one\ntwo"


@pytest.mark.parametrize(
    ("source", "quiet"), [("x;", True), ("x", False), ("';'", False), ("x # ;", False), ("(", False)]
)
def test_is_quiet(source: str, quiet: bool) -> None:
    assert is_quiet(source) is quiet


# --- what a value looks like ---


class Rich:
    def __repr__(self) -> str:
        return "plain"

    def _repr_html_(self) -> str:
        return "<b>rich</b>"

    def _repr_png_(self) -> bytes:
        return b"\x89PNG"

    def _repr_json_(self) -> dict[str, int]:
        return {"a": 1}

    def _repr_latex_(self) -> None:
        return None

    def _repr_svg_(self) -> str:
        raise ValueError("not today")


def test_rich_representations() -> None:
    made = bundle(Rich())
    assert json.loads(made.pop("application/json")) == {"a": 1}
    assert made == {"text/plain": "plain", "text/html": "<b>rich</b>", "image/png": "iVBORw=="}


class Bundle:
    def __init__(self, made: Any) -> None:
        self._made = made

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> Any:
        return self._made


@pytest.mark.parametrize("made", [{"text/html": "<i>b</i>"}, ({"text/html": "<i>b</i>"}, {"meta": 1})])
def test_mime_bundles_with_and_without_metadata(made: object) -> None:
    assert bundle(Bundle(made))["text/html"] == "<i>b</i>"


@pytest.mark.parametrize("made", [None, 3, [], {1: "x"}, {"text/html": object()}])
def test_a_bundle_that_is_none_leaves_the_plain_text(made: object) -> None:
    shown = bundle(Bundle(made))
    assert shown["text/plain"].startswith("<") and all(isinstance(key, str) for key in shown)


def test_a_class_is_shown_as_a_class() -> None:
    assert list(bundle(Rich)) == ["text/plain"]


class Huge(Rich):
    def __repr__(self) -> str:
        return "x" * (3 * LIMIT)

    def _repr_html_(self) -> str:
        return "x" * (LIMIT + 1)


def test_huge_representations_are_bounded() -> None:
    made = bundle(Huge())
    assert "text/html" not in made
    assert len(made["text/plain"]) <= LIMIT and made["text/plain"].endswith("characters left out")


class Answers:
    """Has every attribute that is asked for, as mocks and remote objects do."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: object()


def test_an_object_that_has_every_attribute_is_shown_plainly() -> None:
    assert list(bundle(Answers())) == ["text/plain"]


def test_a_repr_that_fails_is_told() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise KeyError("k")

    assert "whose repr raised KeyError" in bundle(Odd())["text/plain"]
