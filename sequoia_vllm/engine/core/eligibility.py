"""Which requests get trees. The others are served without drafts, exactly as by plain vLLM.

Options of a request for speculation are in ``extra_args``, which HTTP clients call ``vllm_xargs``.
"""

import difflib
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

from sequoia_vllm.engine.core import grammar
from sequoia_vllm.metrics.prometheus import Reason

MOST_DRAFTS = "sequoia_max_drafts"
_OPTIONS = (MOST_DRAFTS,)
_PREFIX = "sequoia"  # of names that can only be meant for us

# A step emits one token without drafts. So a tree gains nothing before a request's last token.
_LEAST_GAIN = 2


def most_drafts(sampling_params: Any) -> int | None:
    """Most nodes, besides the root, that are drafted for a request; None: the engine decides."""
    options = sampling_params.extra_args if sampling_params is not None else None
    return options.get(MOST_DRAFTS) if options else None


def check_options(sampling_params: Any) -> None:
    """Refuses unknown options of a request, and wrong values.

    Raises:
        VLLMValidationError: One is unknown or wrong. HTTP clients get status 400.
    """
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


def reason_without_drafts(sampling_params: Any) -> Reason | None:
    """Why this request gets no drafts, or None if it gets trees.

    The features that are left here keep a state per request; others are applied by a node's path.

    Args:
        sampling_params: vLLM's `SamplingParams`, as the front end completed it; None: of pooling.
    """
    p = sampling_params
    if p is None:
        return "no_generation"
    if most_drafts(p) == 0:
        return "asked"
    if p.structured_outputs is not None and p.structured_outputs._backend not in grammar.BACKENDS:
        return "structured_outputs"
    if getattr(p, "thinking_token_budget", None) is not None:
        return "thinking_token_budget"
    if p.max_tokens is not None and p.max_tokens <= _LEAST_GAIN:  # no tree before the first token
        return "max_tokens"
    return None


def is_longer_than_draft(vllm_config: Any, prompt: Sequence[int] | None) -> bool:
    """Whether a prompt (None: unknown) ends where the target can follow, and the draft not."""
    longest: int = vllm_config.speculative_config.draft_model_config.max_model_len
    if prompt is None or longest >= vllm_config.model_config.max_model_len:
        return False
    # A tree's root is the first token after the prompt, and needs room for a child.
    return len(prompt) >= longest - 1


def has_custom_processors(vllm_config: Any) -> bool:
    """Whether an engine has logits processors of its user's, which may look at a path's tokens."""
    named = vllm_config.model_config.logits_processors
    return bool(named or entry_points(group=LOGITSPROCS_GROUP))


def most_committed(sampling_params: Any, prompt_tokens: int, longest: int) -> int:
    """The most committed tokens with which this request can use a tree; 0: it never can.

    The draft reads a request only up to there.

    Args:
        prompt_tokens: Tokens of its prompt.
        longest: The most committed tokens of any request with a tree.
    """
    if reason_without_drafts(sampling_params):
        return 0
    if sampling_params.max_tokens is not None:
        longest = min(longest, prompt_tokens + sampling_params.max_tokens - _LEAST_GAIN)
    return longest if longest > prompt_tokens else 0


def ends_with(sampling_params: Any, tokens: Sequence[int]) -> bool:
    """Whether one of the tokens that a step emitted ends this request."""
    stops = {sampling_params.eos_token_id, *(sampling_params.stop_token_ids or ())}
    return not stops.isdisjoint(tokens)


def requests_to_read(
    sampling_params: Sequence[Any],
    prompt_tokens: NDArray[np.int64],
    longest: int,
    committed: NDArray[np.int64],
    sampled: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Which requests get a tree, now or later, bool ``[requests]``: the draft reads no others.

    Args:
        longest: See `most_committed`.
        prompt_tokens: int ``[requests]``: tokens of each prompt.
        committed: int64 ``[requests]``: how many tokens each request has.
        sampled: int ``[requests, W]``: the last of them.
    """
    most = [
        most_committed(one, prompt, longest)
        for one, prompt in zip(sampling_params, prompt_tokens.tolist(), strict=True)
    ]
    reads: NDArray[np.bool_] = np.array(most) >= committed
    for row in np.flatnonzero(reads).tolist():
        reads[row] = not ends_with(sampling_params[row], sampled[row].tolist())
    return reads


def may_carry_placeholders(sampling_params: Any) -> bool:
    """Whether a request that never drafts may be scored like those that do, on Model Runner V2.

    Its first row has the logits of decoding without drafts, with penalties and edits applied, and
    no other row of it is looked at. This does not hold where vLLM keeps something for each scored
    row: a grammar's state, or a thinking budget.
    """
    p = sampling_params
    if p is None or p.structured_outputs is not None:
        return False
    return getattr(p, "thinking_token_budget", None) is None
