"""Is the draft model there, and what vLLM's complaints about it mean."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from sequoia_vllm.config import ConfigError

_GIVE = "give the path of a model's folder, or its name on the Hub"

# In the order in which they are looked for in what vLLM says.
_FIXES = (
    ("quantization", 'mend or leave out "quantization"'),
    ("tensor_parallel", "leave draft_tensor_parallel_size out: it is the target's"),
    ("repository id", f'there is none of this name: as "model" {_GIVE}'),
)


def check_folder(role: str, model: str) -> None:
    """Whether a model that is given as a path is there; names on the Hub are not looked up.

    Args:
        role: "draft" or "target", for the message.
        model: Name or path.

    Raises:
        ConfigError: There is no such folder, or no model's configuration in it.
    """
    folder = Path(model)  # as vLLM, for which "~" is a folder like any other
    if not model or not folder.exists():
        if model.startswith(("/", "~", "./", "../")) or not model:
            raise ConfigError(f"there is no {role} model at {model!r}: {_GIVE}")
    elif folder.is_dir() and not any(
        (folder / name).exists() for name in ("config.json", "params.json")
    ):
        raise ConfigError(f"no {role} model lies in {model!r}, as it has no config.json: {_GIVE}")


def draft_problem(draft: str, error: Exception) -> str:
    """What vLLM says of a draft that it cannot use, as one line that names draft and fix."""
    said = str(error)
    if isinstance(error, ValidationError):
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
    first = (said.strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
    fix = next(
        (fix for word, fix in _FIXES if word in first.lower()),
        'choose another "model", or mend the keys that are given for it',
    )
    return f"vLLM cannot use the draft model {draft!r}: {first}; {fix}"
