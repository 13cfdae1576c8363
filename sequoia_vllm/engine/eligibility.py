"""Which requests get trees. The others are served without drafts, exactly as by plain vLLM."""

from __future__ import annotations

from typing import Any


def reason_without_drafts(sampling_params: Any, num_output_tokens: int) -> str | None:
    """Why this request gets no drafts now, or None if it gets a tree.

    Trees need the target's distribution at a node to depend on the node's
    logits, temperature, top-k, top-p and min-p alone. What depends on the
    tokens so far (penalties, bad words, a grammar) or edits logits per request
    would have to be applied per path.

    Args:
        sampling_params: vLLM's `SamplingParams`.
        num_output_tokens: Tokens generated so far.
    """
    p = sampling_params
    if p is None:
        return "it is not a generation request"
    if p.structured_outputs is not None:
        return "structured output follows a grammar, one path at a time"
    if p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0:
        return "penalties depend on the tokens of the path"
    if p.bad_words:
        return "bad_words depend on the tokens of the path"
    if p.logit_bias or p.allowed_token_ids is not None:
        return "its logits are edited (logit_bias or allowed_token_ids)"
    if p.min_tokens > num_output_tokens:
        return "min_tokens is not reached yet"
    if getattr(p, "logprob_token_ids", None) or getattr(p, "thinking_token_budget", None):
        return "it uses a sampler extension that knows no trees"
    return None


def never_drafts(sampling_params: Any) -> bool:
    """Whether this request never gets drafts on Model Runner V2.

    There vLLM applies ``min_tokens`` by position, and a node's position is that
    of its depth: it holds on every path, so it is no reason.
    """
    reached = sampling_params.min_tokens if sampling_params is not None else 0
    return reason_without_drafts(sampling_params, num_output_tokens=reached) is not None


def may_carry_placeholders(sampling_params: Any) -> bool:
    """Whether a request that never drafts may be scored like those that do, on Model Runner V2.

    Its first row has the logits of decoding without drafts, with penalties and
    edits applied, and no other row of it is looked at. Not so where vLLM keeps
    something for each scored row: a grammar's state, a thinking budget, or
    logprobs of chosen tokens.
    """
    p = sampling_params
    if p is None or p.structured_outputs is not None:
        return False
    return not (getattr(p, "logprob_token_ids", None) or getattr(p, "thinking_token_budget", None))
