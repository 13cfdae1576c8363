"""JSON files as pydantic models: reading with errors a user can act on, and writing."""

import json
import uuid
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from sequoia_vllm.json_input import MOST_PROBLEMS, key_name, read_json, shortened


class FileModel(BaseModel):
    """Base of every file format of this project: strict keys, finite numbers."""

    described: ClassVar[str] = ""  # what files of a format that is read are, for messages
    refused: ClassVar[type[ValueError]] = ValueError
    """Raised of files that cannot be used; `load` says more."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        populate_by_name=True,
        protected_namespaces=(),
        alias_generator=lambda name: name.removesuffix("_"),
    )

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Reads a file of this format; raises `refused`, naming every wrong field (`read_json`)."""
        data = read_json(Path(path), cls.described, cls.refused)
        return check_model(data, cls, f"{cls.described} file {path}", cls.refused)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object, keys as in the file, unset optional keys left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def save(self, path: Path) -> None:
        """Writes a file that engines may share, with its folder: whole, or not at all.

        Raises:
            OSError: It cannot be written; a former file stays as it was.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        # Engines in two containers may have one process number.
        partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        try:
            partial.write_text(dump_json(self.to_dict()), encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


Model = TypeVar("Model", bound=BaseModel)


def check_model(data: Any, model: type[Model], where: str, error: type[ValueError]) -> Model:
    """``data`` as a ``model``, or raises ``error``, which lists every wrong field, one per line."""
    if not isinstance(data, dict):
        raise error(f"{where} must hold one JSON object")
    expected = model.model_fields.get("schema_")
    if expected is not None and data.get("schema") != expected.default:
        raise error(
            f'{where}: "schema" is {shortened(data.get("schema"))}; this version reads '
            f"{expected.default!r}"
        )
    try:
        return model.model_validate(data)
    except ValidationError as problem:
        raise error(f"{where}: {_explain(problem)}") from problem


def _explain(problem: ValidationError) -> str:
    lines = []
    problems = problem.errors(include_url=False)
    for detail in problems[:MOST_PROBLEMS]:
        field = ".".join(key_name(part) for part in detail["loc"]) or "the file"
        message = detail["msg"].removeprefix("Value error, ")
        given = detail.get("input")
        shown = f" (got {shortened(given)})" if isinstance(given, (str, int, float)) else ""
        lines.append(f"{field}: {message}{shown}")
    if len(problems) > MOST_PROBLEMS:
        lines.append(f"and {len(problems) - MOST_PROBLEMS} more problems")
    return "\n  ".join(lines)


def dump_json(data: Any) -> str:
    """``data`` as JSON that is easy to read and to diff: lists of numbers on one line."""
    return _dump(data, 0) + "\n"


def _dump(value: Any, indent: int) -> str:
    pad = " " * (indent + 1)
    if isinstance(value, dict) and value:
        rows = [f"{pad}{json.dumps(key)}: {_dump(item, indent + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(rows) + "\n" + " " * indent + "}"
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        rows = [pad + _dump(item, indent + 1) for item in value]
        return "[\n" + ",\n".join(rows) + "\n" + " " * indent + "]"
    return json.dumps(value, allow_nan=False)
