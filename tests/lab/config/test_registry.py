"""Registries derive settings from constructors, resolve references and build parts."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from types import ModuleType
from typing import Any, Literal

import pytest
from pydantic import TypeAdapter, ValidationError

from reefknot.errors import SettingsError
from reefknot.lab.config.parts import FAMILIES
from reefknot.lab.config.registry import DERIVED_ARGUMENTS, Registry, derive_settings, parse_argument_descriptions
from reefknot.lab.config.settings import WRONG_KIND
from reefknot.nn.bounds import Dim, Probability
from reefknot.nn.models.regularisation import RegularisationSettings


class Table:
    """An object that parts share."""


class Place(Table):
    """A shared object with a separate section."""


class Inner:
    """The base class of nested parts."""


SHARED = {f"{__name__}:Place": "elsewhere", f"{__name__}:Table": "tables"}


class Leaf(Inner):
    """A nested part."""

    def __init__(self, table: Table, vocab_size: int, sharp: bool = True) -> None:
        self.table, self.vocab_size, self.sharp = table, vocab_size, sharp


class Twig(Inner):
    """A nested part without settings."""


INNER = Registry("inner", {"leaf": "tests_of_registry:Leaf", "twig": "tests_of_registry:Twig"}, shared=SHARED)


class Branch:
    """A part with every kind of argument.

    More about it.

    Args:
        width: How wide it is.
        inner: The parts inside, or a table
            that stands for them.
        spare: Another table.
    """

    def __init__(
        self,
        width: Dim,
        inner: Sequence[Inner] | Table,
        rate: Probability = 0.5,
        mode: Literal["a", "b"] = "a",
        spare: Table | None = None,
        other: Place | None = None,
    ) -> None:
        self.width, self.inner, self.rate, self.mode = width, inner, rate, mode
        self.spare, self.other = spare, other


def grow(parameters: list[int], speed: float = 1.0) -> tuple[list[int], float]:
    """A function is a part too."""
    return parameters, speed


OUTER = Registry(
    "outer",
    {"branch": "tests_of_registry:Branch", "grow": "tests_of_registry:grow"},
    nested={f"{__name__}:Inner": INNER},
    shared=SHARED,
)
VALID = {"kind": "branch", "width": 4, "inner": {"kind": "leaf", "table": "words"}}


@pytest.fixture(autouse=True)
def part_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("tests_of_registry")
    module.Leaf, module.Twig, module.Branch, module.grow = Leaf, Twig, Branch, grow  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tests_of_registry", module)


def read(raw: Any) -> Any:
    return TypeAdapter(OUTER.entry_type()).validate_python(raw)


def problems(raw: dict[str, Any]) -> set[tuple[str, str]]:
    """Return the setting and the type of every validation error."""
    with pytest.raises(ValidationError) as raised:
        read(raw)
    return {(str((error["loc"] or ("",))[-1]), error["type"]) for error in raised.value.errors()}


def test_settings_are_the_constructor_arguments() -> None:
    fields = OUTER.settings_class("branch").model_fields
    assert set(fields) == {"kind", "width", "inner", "rate", "mode", "spare", "other"}
    assert {name for name, field in fields.items() if field.is_required()} == {"kind", "width", "inner"}
    assert fields["rate"].default == 0.5
    assert fields["width"].description == "How wide it is."
    assert fields["inner"].description == "The parts inside, or a table that stands for them."
    assert fields["spare"].description == "Another table. The name of an entry in [tables]."
    assert fields["rate"].description is None


def test_arguments_given_by_the_model_are_not_settings() -> None:
    assert "vocab_size" in DERIVED_ARGUMENTS
    assert set(INNER.settings_class("leaf").model_fields) == {"kind", "table", "sharp"}
    assert problems(VALID | {"inner": {"kind": "leaf", "table": "words", "vocab_size": 3}}) == {
        ("vocab_size", "extra_forbidden")
    }


def test_wrong_types_and_bounds_are_rejected() -> None:
    assert problems(VALID | {"width": 0}) == {("width", "greater_than_equal")}
    assert problems(VALID | {"width": "4"}) == {("width", "int_type")}
    assert problems(VALID | {"width": 4.0}) == {("width", "int_type")}
    assert problems(VALID | {"width": True}) == {("width", "int_type")}
    assert problems(VALID | {"rate": 1.0}) == {("rate", "less_than")}
    assert problems(VALID | {"rate": float("nan")}) == {("rate", "finite_number")}
    assert problems(VALID | {"mode": "c"}) == {("mode", "literal_error")}
    assert problems(VALID | {"spare": 3}) == {("spare", "string_type")}


def test_all_problems_are_reported_at_once() -> None:
    raw = {"kind": "branch", "width": -1, "rat": 1, "inner": {"kind": "leaf", "sharp": "no"}}
    assert {name for name, _ in problems(raw)} == {"width", "rat", "table", "sharp"}


def test_kind_selects_the_part() -> None:
    assert read({"kind": "grow"}).speed == 1.0
    assert problems({"kind": "grow", "width": 3}) == {("width", "extra_forbidden")}
    assert problems({"kind": "stem", "width": -1}) == {("", WRONG_KIND)}
    assert problems({"kind": 3}) == {("", WRONG_KIND)}
    assert problems({}) == {("", WRONG_KIND)}
    assert problems(VALID | {"inner": {"kind": "laef"}}) == {("inner", WRONG_KIND)}
    assert problems(VALID | {"inner": 3}) == {("inner", "value_error")}


def test_validated_settings_can_be_validated_again() -> None:
    assert read(read(VALID)) == read(VALID)


def test_settings_are_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        read(VALID).width = 5


def test_build_makes_the_part_and_nested_parts() -> None:
    objects = {"vocab_size": 7, "tables": {"words": "THE TABLE"}, "elsewhere": {}}
    branch = OUTER.build(read(VALID | {"rate": 0.25}), objects)
    assert (branch.width, branch.rate, branch.mode, branch.spare) == (4, 0.25, "a", None)
    assert isinstance(branch.inner, Leaf)
    assert (branch.inner.table, branch.inner.vocab_size, branch.inner.sharp) == ("THE TABLE", 7, True)
    assert OUTER.build(read({"kind": "grow", "speed": 2.0}), {"parameters": [1, 2]}) == ([1, 2], 2.0)
    assert isinstance(OUTER.build(read(VALID | {"inner": {"kind": "twig"}}), objects).inner, Twig)


def test_shared_object_is_not_copied() -> None:
    table = object()
    objects = {"vocab_size": 7, "tables": {"words": table}, "elsewhere": {}}
    branch = OUTER.build(read(VALID | {"spare": "words"}), objects)
    assert branch.spare is branch.inner.table is table


def test_references_include_nested_parts() -> None:
    settings = read(VALID | {"spare": "classes", "other": "place"})
    assert sorted(OUTER.references(settings, "tables")) == ["classes", "words"]
    assert list(OUTER.references(settings, "elsewhere")) == ["place"]
    assert list(OUTER.references(read({"kind": "grow"}), "tables")) == []


def test_unknown_kind_is_rejected_with_suggestions() -> None:
    for look_up in (OUTER.location, OUTER.load, OUTER.summary):
        with pytest.raises(SettingsError, match="no outer is called 'stem'; there are: branch, grow"):
            look_up("stem")
        with pytest.raises(SettingsError, match=r"no outer is called 'brnach'; did you mean branch\?"):
            look_up("brnach")


PARTS = [(family, kind) for family in FAMILIES for kind in family]


def test_every_part_loads_and_has_a_summary() -> None:
    for family, kind in PARTS:
        assert family.summary(kind) == family.load(kind).__doc__.strip().partition("\n")[0] != ""


def test_every_argument_of_every_part_is_documented() -> None:
    """Also arguments that are not settings, because `help` shows the `Args:` section."""
    for family, kind in PARTS:
        part = family.load(kind)
        signature = list(inspect.signature(part).parameters)
        assert list(parse_argument_descriptions(part)) == signature, f"{family.family}.{kind}"
        described = {name for name, field in family.settings_class(kind).model_fields.items() if field.description}
        assert described == set(family.settings_class(kind).model_fields) - {"kind"}, f"{family.family}.{kind}"


def test_settings_are_derived_from_a_dataclass() -> None:
    settings = derive_settings(RegularisationSettings)
    assert settings.__name__ == "RegularisationSettings"
    assert settings().model_dump() == asdict(RegularisationSettings())
    assert all(field.description for field in settings.model_fields.values())
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        settings(activation=-1.0)


def test_families_have_unique_names() -> None:
    assert len({family.family for family in FAMILIES}) == len(FAMILIES)
    assert len({*FAMILIES, *FAMILIES}) == len(FAMILIES)


def test_listing_parts_does_not_import_torch() -> None:
    script = (
        "import sys; from reefknot.lab.config.parts import FAMILIES\n"
        "for family in FAMILIES: [family.summary(kind) for kind in family]\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
