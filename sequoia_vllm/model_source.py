"""Why a model cannot be had, and what to do: the same words in all commands and the engine."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

GIVE_FOLDER = "give the path of a model's folder, or its name on the Hub"
_LOG_IN = "log in (`hf auth login`, or set HF_TOKEN)"
_OR = "give the path of a folder"
_REFUSED, _UNKNOWN = (401, 403), 404  # HTTP status
_CONFIGS = ("config.json", "params.json")
_PATIENCE = 10  # seconds in which the Hub must answer


def folder_problem(role: str, model: str) -> str | None:
    """Says why a path gives no model for a role ("target" or "draft").
    Names on the Hub are not looked up. "~" is a folder like any other, as for vLLM.

    Returns:
        The problem and the fix; None: a model's folder, a GGUF file, or a name.
    """
    path = Path(model)
    if not model or not path.exists():
        if model.startswith(("/", "~", "./", "../")) or not model:
            return f"there is no {role} model at {model!r}: {GIVE_FOLDER}"
    elif path.is_file():
        if path.suffix != ".gguf":
            return (
                f"the {role} model {model!r} is a file: give the folder that it lies in, "
                f"{str(path.parent)!r}"
            )
    elif not any((path / name).exists() for name in _CONFIGS):
        return f"no {role} model lies in {model!r}, as it has no config.json: {GIVE_FOLDER}"
    return None


def name_problem(role: str, model: str, revision: str | None = None) -> str | None:
    """Why the Hub gives no model of this name to this role, and the fix; None: it does, or its
    cache has it. It is asked once, without retries. Other sources of models are not asked."""
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not Path(model).exists()
    if not is_name or os.environ.get("VLLM_USE_MODELSCOPE"):
        return None
    from huggingface_hub import HfApi, try_to_load_from_cache

    cached = (try_to_load_from_cache(model, name, revision=revision) for name in _CONFIGS)
    if any(isinstance(path, str) for path in cached):
        return None
    try:
        HfApi().model_info(model, revision=revision, timeout=_PATIENCE)
    except Exception as error:  # its type depends on the HTTP library
        return f"the {role} {model!r} is no folder here, and {hub_problem(model, error)}"
    return None


def hub_problem(model: str, error: BaseException) -> str:
    """Says in one line why the Hub does not give a model, and the fix; ``error`` is
    huggingface_hub's, or raised because of one."""
    from huggingface_hub import constants

    causes = list(_causes(error))
    # By name, as errors are passed on by libraries that wrap or copy them.
    names = {kind.__name__ for cause in causes for kind in type(cause).__mro__}
    words = " ".join(map(str, causes)).lower()
    status = next((code for cause in causes if (code := _status(cause)) is not None), None)
    if "GatedRepoError" in names or "gated repo" in words:
        return f"{model!r} is gated on the Hub: accept its licence there and {_LOG_IN}, or {_OR}"
    if (
        "RepositoryNotFoundError" in names
        or "is not a valid model identifier" in words
        or status == _UNKNOWN
    ):
        return (
            f"the Hub has no {model!r}, or it is private: check the name; if it is private, "
            f"{_LOG_IN}, or {_OR}"
        )
    if status in _REFUSED:
        return (
            f"the Hub refuses {model!r} (HTTP {status}): {_LOG_IN}, accept the model's licence "
            f"there if it has one, or {_OR}"
        )
    first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
    return f"{constants.ENDPOINT} does not give {model!r}: {first}; {_OR}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        todo += [one.__context__, one.__cause__]


def _status(error: BaseException) -> int | None:
    code = getattr(getattr(error, "response", None), "status_code", None)
    return code if isinstance(code, int) else None
