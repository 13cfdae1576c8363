"""What a model's folder or the Hub has, or why a model cannot be had: the same words everywhere."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

GIVE_FOLDER = "give the path of a model's folder, or its name on the Hub"
_LOG_IN = "log in (`hf auth login`, or set HF_TOKEN)"
_OR = "give the path of a folder"
_REFUSED, _UNKNOWN = (401, 403), 404  # HTTP status
_CONFIGS = ("config.json", "params.json")
_INDEX = "model.safetensors.index.json"
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


def weight_names(model: str, revision: str | None = None) -> frozenset[str] | None:
    """The names of a checkpoint's weights, which are not read: of its index, or its files' headers.

    The index of a model on the Hub is fetched if the cache has neither it nor the weights in one
    file. None: there are no safetensors, or they cannot be had.
    """
    folder = Path(model)
    try:
        if folder.is_dir():
            index = folder / _INDEX
            files = [index] if index.is_file() else sorted(folder.glob("*.safetensors"))
        else:
            is_on_hub = not folder.exists() and not os.environ.get("VLLM_USE_MODELSCOPE")
            files = [_from_hub(model, revision)] if is_on_hub else []
        return frozenset(name for file in files for name in _names_in(file)) or None
    except Exception:  # its type depends on the HTTP library; engines say what is wrong with a file
        return None


def _from_hub(model: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    for name in (_INDEX, "model.safetensors"):
        if isinstance(path := try_to_load_from_cache(model, name, revision=revision), str):
            return Path(path)
    return Path(hf_hub_download(model, _INDEX, revision=revision, etag_timeout=_PATIENCE))


def _names_in(file: Path) -> set[str]:
    if file.name == _INDEX:
        return set(json.loads(file.read_bytes())["weight_map"])
    with file.open("rb") as opened:  # eight bytes say how long the header is, which is JSON
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return header.keys() - {"__metadata__"}


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
