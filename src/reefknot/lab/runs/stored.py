"""The base of every typed part of a result, and how a stored file becomes one.

A part has only the fields that its class names: constructing one with another name is an error. Reading is lenient, so
that a result of a newer version with more fields can still be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reefknot.errors import DataError

OMIT_NONE: Any = Field(exclude_if=lambda value: value is None)
"""Annotates a field that is left out of the file when it is None."""


class Stored(BaseModel):
    """A part of a stored file. Values never change once they are set."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

    def record(self) -> dict[str, Any]:
        """Return the fields that were set as plain JSON."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def replace(self, **fields: Any) -> Self:
        """Return a copy with other values in some fields, checked like the first ones."""
        return type(self)(**{name: getattr(self, name) for name in self.model_fields_set} | fields)


S = TypeVar("S", bound=Stored)


def parse(kind: type[S], raw: Mapping[str, Any], where: Path | str) -> S:
    """Check what was read from a file. Keys that this version does not know are ignored."""
    try:
        return kind.model_validate(raw, extra="ignore")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        reason = f"{key}: {first['msg']}" if key else first["msg"]
        raise DataError(f"{where} cannot be read ({reason}); restore the file or run the row again") from None
