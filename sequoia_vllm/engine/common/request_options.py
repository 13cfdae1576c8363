"""Options of a request for speculation: ``extra_args``, which HTTP clients call ``vllm_xargs``."""

import difflib
from typing import Any

from vllm.exceptions import VLLMValidationError

MOST_DRAFTS = "sequoia_max_drafts"
_OPTIONS = (MOST_DRAFTS,)
_PREFIX = "sequoia"  # of names that can only be meant for us


def most_drafts(sampling_params: Any) -> int | None:
    """Most nodes, besides the root, that are drafted for a request; None: the engine decides."""
    options = sampling_params.extra_args if sampling_params is not None else None
    return options.get(MOST_DRAFTS) if options else None


def check_options(sampling_params: Any) -> None:
    """Refuses unknown options and wrong values (VLLMValidationError: HTTP clients get a 400)."""
    for name, value in (sampling_params.extra_args or {}).items():
        if name in _OPTIONS:
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise VLLMValidationError(
                    f"{name} is a number of drafts, 0 or more (0: no speculation for this "
                    f"request), not {value!r}",
                    parameter=name,
                    value=value,
                )
        elif isinstance(name, str) and name.lower().startswith(_PREFIX):
            near = difflib.get_close_matches(name.lower(), _OPTIONS, n=1, cutoff=0.3)
            question = f" (did you mean {near[0]}?)" if near else ""
            raise VLLMValidationError(
                f"there is no option {name!r}{question}; there is: {', '.join(_OPTIONS)}",
                parameter=name,
                value=value,
            )
