"""Overrides are parsed and merged into settings."""

from __future__ import annotations

from typing import Any

import pytest

from reefknot.errors import SettingsError
from reefknot.lab.config.overrides import merge, override, parse_override


def test_changes_are_merged_into_the_base() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": [1, 2]}
    assert merge(base, {"a": {"c": 3}, "d": [9]}) == {"a": {"b": 1, "c": 3}, "d": [9]}
    assert merge(base, {"a": 5}) == {"a": 5, "d": [1, 2]}
    assert merge(base, {"e": {"f": 1}})["e"] == {"f": 1}
    assert base == {"a": {"b": 1, "c": 2}, "d": [1, 2]}


def test_new_kind_replaces_a_part_and_other_settings_are_merged() -> None:
    base = {"classifier": {"kind": "plain", "table": "words", "bias": False}}
    assert merge(base, {"classifier": {"kind": "projected", "table": "words"}}) == {
        "classifier": {"kind": "projected", "table": "words"}
    }
    assert merge(base, {"classifier": {"kind": "plain", "table": "classes"}}) == {
        "classifier": {"kind": "plain", "table": "classes"}
    }
    merged = {"classifier": {"kind": "plain", "table": "classes", "bias": False}}
    assert merge(base, {"classifier": {"table": "classes"}}) == merged


def test_value_default_removes_a_setting() -> None:
    base = {"vocabulary": {"min_count": 3, "max_size": 100}, "seed": 1}
    assert merge(base, {"vocabulary": {"max_size": "default"}}) == {"vocabulary": {"min_count": 3}, "seed": 1}
    assert merge(base, {"vocabulary": "default"}) == {"seed": 1}
    assert merge(base, {"nothing": "default"})["nothing"] == "default"  # rejected later, like a misspelt key
    assert list(merge({"a": 1, "b": 2}, {"a": 3})) == ["a", "b"]  # random tables are initialised in this order


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training.epochs=3", (["training", "epochs"], 3)),
        ("a=1.5", (["a"], 1.5)),
        ("a = true ", (["a"], True)),
        ("corpus.name=ptb", (["corpus", "name"], "ptb")),
        ('corpus.name="ptb"', (["corpus", "name"], "ptb")),
        ("corpus.name=/data/my text", (["corpus", "name"], "/data/my text")),
        ("corpus.part=1/2", (["corpus", "part"], "1/2")),
        ("a={ kind = 'x', b = [1, 2] }", (["a"], {"kind": "x", "b": [1, 2]})),
        ("a=b=c", (["a"], "b=c")),
        ("a=", (["a"], "")),
        ("a=1\nb=2", (["a"], "1\nb=2")),
    ],
)
def test_override_values_are_toml_or_plain_text(text: str, expected: tuple[list[str], Any]) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["epochs", "=3", "a..b=1", ".=1", ""])
def test_invalid_overrides_are_rejected(text: str) -> None:
    with pytest.raises(SettingsError, match="is not key=value"):
        parse_override(text)


BASE: dict[str, Any] = {
    "tables": {"classifier": {"kind": "word", "dim": 4}},
    "output": {"kind": "softmax", "classifier": {"kind": "plain", "table": "classifier", "bias": False}},
}


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        (["output.classifier.kind=projected"], {"kind": "projected", "table": "classifier", "bias": False}),
        (["output.classifier.kind=plain"], {"kind": "plain", "table": "classifier", "bias": False}),
        (
            ["output.classifier.bias=true", "output.classifier.kind=drill"],
            {"kind": "drill", "table": "classifier", "bias": True},
        ),
        (["output.classifier.kind=drill", "output.classifier.bias=default"], {"kind": "drill", "table": "classifier"}),
        (["output.classifier={kind='drill'}"], {"kind": "drill"}),
        (["output.classifier.kind=nothing"], {"kind": "nothing"}),
        (["output.classifier.kind=3"], {"kind": 3}),
        (["output.kind=mixture"], BASE["output"]["classifier"]),
    ],
)
def test_changing_only_the_kind_keeps_common_settings(overrides: list[str], changed: dict[str, Any]) -> None:
    assert override(BASE, overrides)["output"]["classifier"] == changed


@pytest.mark.parametrize(
    ("overrides", "search"),
    [
        (["evaluation.search={beam=4}"], {"beam": 4}),
        (["evaluation.search={}"], {}),
        (["evaluation={search={beam=4}}"], {"beam": 4}),
        (["evaluation.search={beam=4}", "evaluation.search.longest=3"], {"beam": 4, "longest": 3}),
        (["evaluation.search.longest=3", "evaluation.search={beam=4}"], {"beam": 4, "longest": 3}),
        (["evaluation.search.beam=4"], {"beam": 4, "length_penalty": 0.6}),
        (["evaluation={search={longest=3}}", "evaluation.search={beam=4}"], {"beam": 4}),
        (["evaluation.search={beam=4}", "evaluation={search={longest=3}}"], {"beam": 4}),
        (["evaluation.search={longest=3}", "evaluation.search={beam=4}"], {"beam": 4}),
        (["evaluation.search.beam=4", "evaluation={search={beam=3}}"], {"beam": 4}),
    ],
)
def test_table_in_braces_replaces_the_whole_table(overrides: list[str], search: dict[str, Any]) -> None:
    base = {"evaluation": {"search": {"beam": 5, "length_penalty": 0.6}}, "seed": 1}
    settings = override(base, overrides)
    assert settings["evaluation"]["search"] == search
    assert list(settings) == ["evaluation", "seed"]
    assert base["evaluation"] == {"search": {"beam": 5, "length_penalty": 0.6}}


@pytest.mark.parametrize(
    "overrides", [["encoder={dropout=0.1}", "encoder.kind=gru"], ["encoder={kind='gru', dropout=0.1}"]]
)
def test_kind_and_braces_are_merged_in_any_order(overrides: list[str]) -> None:
    base = {"encoder": {"kind": "lstm", "hidden_dim": 8}}
    for ordered in (overrides, overrides[::-1]):
        assert override(base, ordered) == {"encoder": {"kind": "gru", "dropout": 0.1}}


def test_table_may_have_the_name_of_a_part() -> None:
    assert override(BASE, ["tables.classifier.kind=banded"])["tables"]["classifier"] == {"kind": "banded", "dim": 4}
    assert override(BASE, ["tables.new.kind=word"])["tables"]["new"] == {"kind": "word"}
    assert override({"tables": 3}, ["tables.new.kind=word"])["tables"] == {"new": {"kind": "word"}}
