"""The base class of all parts of a result file, and a function that checks the content of a file.

Code can only set the fields that a class declares. Unknown keys in a file are ignored, so that results of a newer
version can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reefknot.errors import DataError

OMIT_NONE: Any = Field(exclude_if=lambda value: value is None)
"""Annotation of a field that is left out of the file if it is None."""


class Stored(BaseModel):
    """An immutable part of a stored file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

    def record(self) -> dict[str, Any]:
        """Return the fields that were set as plain JSON."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def replace(self, **fields: Any) -> Self:
        """Return a validated copy with new values for some fields."""
        return type(self)(**{name: getattr(self, name) for name in self.model_fields_set} | fields)


S = TypeVar("S", bound=Stored)


def parse(kind: type[S], raw: Mapping[str, Any], where: Path | str) -> S:
    """Return the content of a file as an object of the class `kind`. Unknown keys are ignored.

    Args:
        kind: The class.
        raw: The content of the file, as JSON values.
        where: The name of the file, for error messages.

    Raises:
        DataError: A value is missing or invalid.
    """
    try:
        return kind.model_validate(raw, extra="ignore")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        reason = f"{key}: {first['msg']}" if key else first["msg"]
        raise DataError(f"{where} cannot be read ({reason}); restore the file or run the row again") from None
