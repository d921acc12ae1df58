"""Overrides are parsed and merged into settings."""

from __future__ import annotations

from typing import Any

import pytest

from reefknot.errors import SettingsError
from reefknot.lab.config.overrides import apply_overrides, merge_settings, parse_override


def test_changes_are_merged_into_the_base() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": [1, 2]}
    assert merge_settings(base, {"a": {"c": 3}, "d": [9]}) == {"a": {"b": 1, "c": 3}, "d": [9]}
    assert merge_settings(base, {"a": 5}) == {"a": 5, "d": [1, 2]}
    assert merge_settings(base, {"e": {"f": 1}})["e"] == {"f": 1}
    assert base == {"a": {"b": 1, "c": 2}, "d": [1, 2]}


def test_new_kind_replaces_a_part_and_other_settings_are_merged() -> None:
    base = {"classifier": {"kind": "plain", "table": "words", "bias": False}}
    assert merge_settings(base, {"classifier": {"kind": "projected", "table": "words"}}) == {
        "classifier": {"kind": "projected", "table": "words"}
    }
    assert merge_settings(base, {"classifier": {"kind": "plain", "table": "classes"}}) == {
        "classifier": {"kind": "plain", "table": "classes"}
    }
    merged = {"classifier": {"kind": "plain", "table": "classes", "bias": False}}
    assert merge_settings(base, {"classifier": {"table": "classes"}}) == merged


def test_value_default_removes_a_setting() -> None:
    base = {"vocabulary": {"min_count": 3, "max_size": 100}, "seed": 1}
    assert merge_settings(base, {"vocabulary": {"max_size": "default"}}) == {"vocabulary": {"min_count": 3}, "seed": 1}
    assert merge_settings(base, {"vocabulary": "default"}) == {"seed": 1}
    assert merge_settings(base, {"nothing": "default"})["nothing"] == "default"  # rejected later, like a misspelt key
    assert list(merge_settings({"a": 1, "b": 2}, {"a": 3})) == ["a", "b"]  # random tables are initialised in this order


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
    assert apply_overrides(BASE, overrides)["output"]["classifier"] == changed


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
    settings = apply_overrides(base, overrides)
    assert settings["evaluation"]["search"] == search
    assert list(settings) == ["evaluation", "seed"]
    assert base["evaluation"] == {"search": {"beam": 5, "length_penalty": 0.6}}


@pytest.mark.parametrize(
    "overrides", [["encoder={dropout=0.1}", "encoder.kind=gru"], ["encoder={kind='gru', dropout=0.1}"]]
)
def test_kind_and_braces_are_merged_in_any_order(overrides: list[str]) -> None:
    base = {"encoder": {"kind": "lstm", "hidden_dim": 8}}
    for ordered in (overrides, overrides[::-1]):
        assert apply_overrides(base, ordered) == {"encoder": {"kind": "gru", "dropout": 0.1}}


def test_table_may_have_the_name_of_a_part() -> None:
    settings = apply_overrides(BASE, ["tables.classifier.kind=banded"])
    assert settings["tables"]["classifier"] == {"kind": "banded", "dim": 4}
    assert apply_overrides(BASE, ["tables.new.kind=word"])["tables"]["new"] == {"kind": "word"}
    assert apply_overrides({"tables": 3}, ["tables.new.kind=word"])["tables"] == {"new": {"kind": "word"}}
