"""The base class of everything that result files store, and a function that checks the content of a file.

`Stored` is a frozen pydantic model. Code can only set the fields that a class declares. In contrast, `parse` ignores
unknown keys in a file, so that results of a newer version can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reefknot.errors import DataError


def _is_none(value: Any) -> bool:
    return value is None


OMIT_NONE: Any = Field(exclude_if=_is_none)
"""Annotation of a field that is left out of the file if it is None."""


class Stored(BaseModel):
    """Base class of the immutable objects in a stored file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

    def record(self) -> dict[str, Any]:
        """Return the fields that were set as plain JSON."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def replace(self, **fields: Any) -> Self:
        """Return a validated copy with new values for some fields."""
        old_fields = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**old_fields | fields)


StoredType = TypeVar("StoredType", bound=Stored)


def parse(stored_class: type[StoredType], content: Mapping[str, Any], source: Path | str) -> StoredType:
    """Return the content of a file as an object of `stored_class`. Unknown keys are ignored.

    Args:
        stored_class: A subclass of `Stored`.
        content: The content of the file, as JSON values.
        source: The name of the file, for error messages.

    Raises:
        DataError: A value is missing or invalid.
    """
    try:
        return stored_class.model_validate(content, extra="ignore")
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
        key = ".".join(map(str, first_error["loc"]))
        reason = first_error["msg"]
        if key:
            reason = f"{key}: {reason}"
        raise DataError(f"{source} cannot be read ({reason}); restore the file or run the row again") from None
