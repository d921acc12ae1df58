"""Tokens of Moses are put together as a person writes them; where its rules are not installed, that is said."""

from __future__ import annotations

import sys

import pytest

from reefknot.errors import SettingsError
from reefknot.lab.text.detokenization import detokenizer


@pytest.mark.parametrize(
    ("language", "line", "written"),
    [
        ("de", "ein mann , der &quot; hallo &quot; sagt .", 'ein mann, der "hallo" sagt.'),
        ("de", "zwei hunde ( groß ) spielen !", "zwei hunde (groß) spielen!"),
        ("en", "it &apos;s a dog &amp; a cat", "it's a dog & a cat"),
        ("unheard-of", "a , b .", "a, b."),
        ("de", "", ""),
    ],
)
def test_lines(language: str, line: str, written: str) -> None:
    pytest.importorskip("sacremoses")
    assert detokenizer(language)(line) == written


def test_without_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(SettingsError, match="pip install 'reefknot"):
        detokenizer("de")
