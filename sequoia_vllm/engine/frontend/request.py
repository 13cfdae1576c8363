"""Reads what the user asks for, and shows what is wrong with it as vLLM's commands do."""

import argparse
import difflib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from sequoia_vllm.config import METHOD, ConfigError, SequoiaConfig
from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.json_input import parse_json

USAGE_ERROR = 2  # exit code


def add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    """Adds vLLM's; ``--speculative-config sequoia`` and ``--spec-method sequoia`` parse, too."""
    parser = original(parser)
    for action in parser._actions:
        if action.dest == "speculative_config":
            action.type = partial(_json_or_shorthand, action.type)
        elif action.dest == "spec_method" and action.choices is not None:
            action.choices = [*action.choices, METHOD]
    return parser


def _json_or_shorthand(parse: Callable[[str], Any], value: str) -> Any:
    if value.strip() == METHOD:
        return {"method": METHOD}
    try:
        found = parse(value)
    except (ValueError, RecursionError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(_not_a_config(value, error)) from error
    try:
        if isinstance(found, dict) and names_sequoia(found):
            SequoiaConfig.parse(found)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return found


def _not_a_config(value: str, error: Exception) -> str:
    """Says what to write instead of this ``--speculative-config``."""
    example = f"""'{{"method": "{METHOD}", "model": "DRAFT"}}'"""
    if value.lstrip().startswith("{"):
        # vLLM's own message shows the address of json.loads; its cause says what is wrong.
        return (
            f"{value!r} is not valid JSON: {error.__cause__ or error}. Give the JSON in single "
            f"quotes, with double ones inside: {example}"
        )
    is_near = difflib.get_close_matches(value.strip().lower(), [METHOD])
    question = f" (did you mean {METHOD}?)" if is_near else ""
    return (
        f"{value!r} is neither a JSON object nor the word {METHOD}{question}. Write {METHOD} "
        f"alone for a target with a known draft, or {example}"
    )


def sequoia_request(args: EngineArgs) -> dict[str, Any] | None:
    """The Sequoia configuration in these engine arguments, or None if there is none."""
    request = args.speculative_config
    if isinstance(request, str):
        with suppress(ValueError):
            request = {"method": METHOD} if request.strip() == METHOD else parse_json(request)
    if request is not None and not isinstance(request, dict):
        return None  # vLLM reports what is wrong with it
    merged = dict(request or {})
    flags = {
        "method": args.spec_method,
        "model": args.spec_model,
        "num_speculative_tokens": args.spec_tokens,
    }
    for key, value in flags.items():
        if value is None:
            continue
        if key in merged and merged[key] != value:
            raise ConfigError(f"{key} is given twice: {merged[key]!r} and {value!r}")
        merged[key] = value
    return merged if names_sequoia(merged) else None


def names_sequoia(request: dict[str, Any]) -> bool:
    """Whether this speculative configuration is ours; refuses one whose method is misspelt."""
    method = request.get("method")
    if method == METHOD:
        return True
    if method is None and isinstance(request.get("tree"), (str, dict)):
        raise ConfigError(f'"tree" is a key of method {METHOD!r}: add "method": "{METHOD}"')
    # No method of vLLM's is nearly called like ours.
    if difflib.get_close_matches(str(method).strip().lower(), [METHOD], cutoff=0.75):
        raise ConfigError(f"there is no method {method!r}: did you mean {METHOD!r}?")
    return False


@contextmanager
def short_in_commands() -> Iterator[None]:
    """Ends vLLM's own commands at an error of ours; any other program sees the exception."""
    try:
        yield
    except SequoiaError as error:
        if not is_vllms_command():
            raise
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(USAGE_ERROR) from None


def is_vllms_command() -> bool:
    """Whether this process is ``vllm ...``, or ``python -m vllm...``."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    module = spec.name if spec is not None else ""
    return module.startswith("vllm.") or Path(sys.argv[0]).stem == "vllm"
