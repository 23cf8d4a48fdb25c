"""The keys of a config and the types of their values; what a kernel decides is checked later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autotune.errors import InputError, UnknownNameError, shown
from autotune.strict_yaml import Document


class _Strict(BaseModel):
    """Unknown keys and near-miss types are errors. A field's description says what is allowed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Budget(_Strict):
    """Limits for one problem; a field that is not set (`model_fields_set`) is no limit."""

    trials: int = Field(default=0, ge=1, le=2**31, description="a whole number from 1 to 2^31")
    seconds: float = Field(
        default=0.0, gt=0, allow_inf_nan=False, description="a number of seconds above 0"
    )


_BUDGET = "a mapping with trials, seconds or both"


class ProblemEntry(_Strict):
    """One entry of `problems:`, before its matrix is expanded."""

    kernel: str = Field(description="the name of a kernel, or package.module:ATTRIBUTE")
    name: str | None = Field(
        default=None,
        max_length=200,
        pattern=r"^[^\p{C}\p{Zl}\p{Zp}]+$",  # no control characters, no line breaks
        description="a line of 1 to 200 characters",
    )
    shape: dict[str, Any] = Field(default={}, description="a mapping of axes to whole numbers")
    options: dict[str, Any] = Field(default={}, description="a mapping of the kernel's options")
    dtype: str = Field(default="bfloat16", description="the name of a dtype")
    matrix: dict[str, list[Any]] = Field(
        default={}, description="a mapping of axes, options or dtype to lists of values"
    )
    space: dict[str, Any] = Field(
        default={}, description="a mapping of tunables to a value or a list of values"
    )
    budget: Budget = Field(default=Budget(), description=_BUDGET)


class File(_Strict):
    """A whole config. `device` is checked where the known ones are."""

    device: Any = None
    budget: Budget = Field(default=Budget(), description=_BUDGET)
    problems: list[ProblemEntry] = Field(
        min_length=1, description="a list of problems, at least one"
    )


_MODELS: Mapping[str, type[_Strict]] = {"problems": ProblemEntry, "budget": Budget}


def parse(document: Document) -> File:
    """The file with known keys and right types. Raises InputError for its topmost fault."""
    if not isinstance(document.value, dict):
        text = f"{shown(document.value)} is not allowed; a mapping with the keys "
        raise document.error((), text + ", ".join(File.model_fields))
    try:
        return File.model_validate(document.value)
    except ValidationError as error:
        faults = [_fault(document, fault) for fault in error.errors(include_url=False)]
        raise min(faults, key=lambda fault: document.line(fault.path)) from None


def _fault(document: Document, fault: Any) -> InputError:
    """pydantic's fault in our words."""
    keys: tuple[str | int, ...] = tuple(fault["loc"])
    model: type[_Strict] = File
    for key in keys[:-1]:
        model = _MODELS.get(str(key), model)
    field = next((f for k in reversed(keys) if (f := model.model_fields.get(str(k)))), None)
    allowed = field.description if field and field.description else "another value"
    if fault["type"] == "missing":
        return document.error(keys[:-1], f"lacks the key {keys[-1]!r}; {allowed}")
    if fault["type"] == "extra_forbidden":
        return document.error(keys, str(UnknownNameError("key", str(keys[-1]), model.model_fields)))
    if fault["type"] == "list_type" and "matrix" in keys[:-1]:
        allowed = "a list of values"
    if isinstance(keys[-1], int) and keys[:-1] == ("problems",):
        allowed = f"a mapping with the keys {', '.join(ProblemEntry.model_fields)}"
    return document.error(keys, f"{shown(fault['input'])} is not allowed; {allowed}")
