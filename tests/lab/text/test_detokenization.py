"""Moses tokens are joined into normal text, and a missing package is reported."""

from __future__ import annotations

import sys

import pytest

from reefknot.errors import SettingsError
from reefknot.lab.text.detokenization import build_detokenizer


@pytest.mark.parametrize(
    ("language", "line", "text"),
    [
        ("de", "ein mann , der &quot; hallo &quot; sagt .", 'ein mann, der "hallo" sagt.'),
        ("de", "zwei hunde ( groß ) spielen !", "zwei hunde (groß) spielen!"),
        ("en", "it &apos;s a dog &amp; a cat", "it's a dog & a cat"),
        ("unheard-of", "a , b .", "a, b."),
        ("de", "", ""),
    ],
)
def test_tokens_are_joined_into_normal_text(language: str, line: str, text: str) -> None:
    pytest.importorskip("sacremoses")
    assert build_detokenizer(language)(line) == text


def test_missing_sacremoses_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(SettingsError, match="pip install 'reefknot"):
        build_detokenizer("de")
