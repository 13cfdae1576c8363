"""Which requests get trees. The others are served without drafts, exactly as by plain vLLM."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

from sequoia_vllm.engine.common.request_options import most_drafts
from sequoia_vllm.engine.core import grammar
from sequoia_vllm.metrics.prometheus import Reason


def reason_without_drafts(sampling_params: Any, thinks_first: bool) -> Reason | None:
    """Why this request gets no drafts, or None if it gets trees.

    Penalties, bad words and other edits of logits by earlier tokens are applied at each node by its
    own path. The features that are left here keep a state per request.

    Args:
        sampling_params: vLLM's `SamplingParams`, as the front end completed it.
        thinks_first: Grammars hold only once a request has ended its reasoning, which may be
            amid a tree: see `grammar`.
    """
    p = sampling_params
    if p is None:
        return "no_generation"
    if most_drafts(p) == 0:
        return "asked"
    if p.structured_outputs is not None and (
        thinks_first or p.structured_outputs._backend not in grammar.BACKENDS
    ):
        return "structured_outputs"
    if getattr(p, "logprob_token_ids", None):
        return "logprob_token_ids"
    if getattr(p, "thinking_token_budget", None):
        return "thinking_token_budget"
    return None


def has_custom_processors(vllm_config: Any) -> bool:
    """Whether an engine has logits processors of its user's: then no request of it drafts.

    They may look at the tokens of a path. vLLM loads those that it is given, and all that
    installed packages register.
    """
    return bool(vllm_config.model_config.logits_processors) or _has_installed_processors()


@cache  # asked in every step
def _has_installed_processors() -> bool:
    return bool(entry_points(group=LOGITSPROCS_GROUP))


def never_drafts(sampling_params: Any, thinks_first: bool) -> bool:
    """Whether this request gets no drafts; see `reason_without_drafts`."""
    return reason_without_drafts(sampling_params, thinks_first) is not None


def may_carry_placeholders(sampling_params: Any) -> bool:
    """Whether a request that never drafts may be scored like those that do, on Model Runner V2.

    Its first row has the logits of decoding without drafts, with penalties and edits applied, and
    no other row of it is looked at. This does not hold where vLLM keeps something for each scored
    row: a grammar's state, a thinking budget, or logprobs of chosen tokens.
    """
    p = sampling_params
    if p is None or p.structured_outputs is not None:
        return False
    return not (getattr(p, "logprob_token_ids", None) or getattr(p, "thinking_token_budget", None))
