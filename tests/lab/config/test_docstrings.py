"""Descriptions of arguments are read from the `Args:` section of a docstring."""

from __future__ import annotations

import pytest

from reefknot.lab.config.registry import parse_argument_descriptions


def documented(docstring: str | None) -> object:
    def function() -> None: ...

    function.__doc__ = docstring
    return function


def test_args_section_ends_with_its_indentation() -> None:
    section = """A summary.

    More: not an argument.

    Args:
        one: The first: with a colon.
        two: A description that needs
            a second line.

    Returns:
        three: Not an argument.
    """
    expected = {"one": "The first: with a colon.", "two": "A description that needs a second line."}
    assert parse_argument_descriptions(documented(section)) == expected


@pytest.mark.parametrize("docstring", [None, "", "A summary.", "A summary.\n\n    Args:\n"])
def test_docstring_without_args_has_no_descriptions(docstring: str | None) -> None:
    assert parse_argument_descriptions(documented(docstring)) == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no description", "has the line 'no description'"),
        ("one:", "has the line 'one:'"),
        ("one: Again.", "lists one twice"),
        (" odd: Indented by five.", None),
    ],
)
def test_invalid_lines_in_args_are_rejected(line: str, message: str | None) -> None:
    docstring = f"A summary.\n\n    Args:\n        one: The first.\n        {line}\n"
    if message is None:
        assert parse_argument_descriptions(documented(docstring)) == {"one": "The first. odd: Indented by five."}
        return
    with pytest.raises(ValueError, match=message):
        parse_argument_descriptions(documented(docstring))
