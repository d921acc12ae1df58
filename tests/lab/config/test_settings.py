"""Bounds in the annotations of the library also apply to settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from reefknot.lab.config.settings import Settings, translate_bounds
from reefknot.nn import bounds
from reefknot.nn.bounds import Ge, Gt, Le, Length, Lt


@pytest.mark.parametrize(
    ("annotation", "valid", "invalid"),
    [
        (Annotated[int, Ge(1), Le(3)], [1, 3], [0, 4]),
        (Annotated[float, Gt(0.0), Lt(1.0)], [0.5], [0.0, 1.0]),
        (bounds.Dim | None, [None, 1], [0]),
        (Sequence[bounds.Count], [[1, 2], []], [[1, 0]]),
        (Annotated[Sequence[Annotated[int, Ge(0)]], Length(1, 2)], [[0], [0, 1]], [[], [-1], [0, 1, 2]]),
        (Annotated[Sequence[int], Length(1)], [[0] * 9], [[]]),
    ],
)
def test_bounds_of_annotations_are_checked(annotation: Any, valid: list[Any], invalid: list[Any]) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(translate_bounds(annotation))
    for value in valid:
        assert adapter.validate_python(value) == value
    for value in invalid:
        with pytest.raises(ValidationError):
            adapter.validate_python(value)


def test_other_annotations_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"bounds of reefknot\.nn\.bounds"):
        translate_bounds(Annotated[int, Field(ge=1)])


@pytest.mark.parametrize("annotation", [bounds.Count, bounds.Count | None, Sequence[bounds.Count]])
def test_bounds_that_pydantic_would_ignore_are_rejected(annotation: Any) -> None:
    with pytest.raises(TypeError, match=r"Wrong\.number: use the number types of reefknot\.lab\.config\.settings"):
        type("Wrong", (Settings,), {"__annotations__": {"number": annotation}})
