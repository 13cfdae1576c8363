"""Which requests get trees. The others are served without drafts, exactly as by plain vLLM.

Options of a request for speculation are in ``extra_args``, which HTTP clients call ``vllm_xargs``.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, cached_load_custom_logitsprocs
from vllm.v1.worker.gpu.sample.logits_processor import loader

from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.core import grammar
from sequoia_vllm.engine.core.prediction_option import COUNTED, PREDICTION, check_prediction
from sequoia_vllm.kernels.modes import GREEDY, SAMPLED, SEEDED, SKIP
from sequoia_vllm.metrics.prometheus import Reason
from sequoia_vllm.verification.sampling import is_greedy

MOST_DRAFTS = "sequoia_max_drafts"
_OPTIONS = (MOST_DRAFTS, PREDICTION, COUNTED)
_PREFIX = "sequoia"  # of names that can only be meant for us

# A step emits one token without drafts. So a tree gains nothing before a request's last token.
_LEAST_GAIN = 2

_FOLLOWS = "sequoia_trees"  # an attribute of classes of custom logits processors
_ON_V2 = loader.LogitsProcessor


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
        if name == PREDICTION:
            check_prediction(value)
        elif name == COUNTED:
            if value not in (False, True):  # over HTTP 0 and 1
                raise VLLMValidationError(
                    f"{name} is true or false, not {value!r}", parameter=name, value=value
                )
        elif name == MOST_DRAFTS:
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


def processors_without_trees(vllm_config: Any) -> list[str]:
    """Names of logits processors of the engine's user that cannot run on the nodes of a tree."""
    return [kind.__qualname__ for kind in _processors(vllm_config) if not follows_trees(kind)]


def _processors(vllm_config: Any) -> Sequence[type]:
    """The logits processors of the engine's user."""
    load = (
        loader._cached_load_v2_logitsprocs
        if vllm_config.use_v2_model_runner
        else cached_load_custom_logitsprocs
    )
    kinds: Sequence[type] = load(tuple(vllm_config.model_config.logits_processors or ()))
    return kinds


def has_branches_on_v2(vllm_config: Any) -> bool:
    """Whether requests on Model Runner V2 may have branches (`kernels.told_branches`).

    They need tables of each request's own tree, and are deeper than the engine's. What is made for
    that depth stands against them: recurrent layers, sparse attention, and users' processors.
    """
    model = vllm_config.model_config
    is_sparse = getattr(model.hf_text_config, "index_topk", None) is not None
    by_depth = model.is_hybrid or model.has_inner_state or is_sparse or _processors(vllm_config)
    return SequoiaSettings.of(vllm_config).dynamic_tree and not by_depth


def may_branch_on_v2(sampling_params: Any) -> bool:
    """Whether a request may, where any may: a grammar's masks are made for the engine's tree."""
    return sampling_params.structured_outputs is None


def follows_trees(kind: type) -> bool:
    """Whether a class of custom logits processors can run on the nodes of a tree.

    Its attribute ``sequoia_trees`` says so, or not. Else those can that are called with a history:
    `wraps_callables` on Model Runner V1, and all on V2, where vLLM's own drafts ask for it.
    """
    can: bool = getattr(kind, _FOLLOWS, wraps_callables(kind) or issubclass(kind, _ON_V2))
    return can


def wraps_callables(kind: type) -> bool:
    """Whether a class is vLLM's wrapper of one callable for each request, with nothing changed."""
    return issubclass(kind, AdapterLogitsProcessor) and all(
        getattr(kind, name) is getattr(AdapterLogitsProcessor, name)
        for name in ("apply", "update_state", "_new_state")
    )


@dataclass(frozen=True)
class TreeTerms:
    """What trees a request may have: known when it begins, and the same in all of its steps."""

    drafts_by: int  # of `kernels.modes`: how children are drawn and verified; SKIP: no drafts
    most_drafts: int | None  # see `most_drafts`
    most_committed: int
    """The most committed tokens with which it can use a tree, and up to which the draft reads it.
    0: it never can."""
    is_static: bool
    """Whether its trees keep the engine's topology. A greedy request without a grammar may have
    others. Sampled children must be drawn from Q, and masks are made for the engine's tree."""
    stops: frozenset[int]  # tokens that end it

    @classmethod
    def of(cls, sampling_params: Any, prompt_tokens: int, longest: int) -> "TreeTerms":
        """The terms of a request with a prompt of so many tokens.

        Args:
            longest: The most committed tokens of any request with a tree.
        """
        p = sampling_params
        if reason_without_drafts(p):
            return WITHOUT_TREES
        greedy = is_greedy(p.temperature)
        if p.max_tokens is not None:
            longest = min(longest, prompt_tokens + p.max_tokens - _LEAST_GAIN)
        return cls(
            drafts_by=GREEDY if greedy else SAMPLED if p.seed is None else SEEDED,
            most_drafts=most_drafts(p),
            most_committed=longest if longest > prompt_tokens else 0,
            is_static=not greedy or p.structured_outputs is not None,
            stops=frozenset({p.eos_token_id, *(p.stop_token_ids or ())}),
        )


WITHOUT_TREES = TreeTerms(SKIP, 0, 0, is_static=False, stops=frozenset())


def requests_to_read(
    terms: Sequence[TreeTerms], committed: NDArray[np.int64], sampled: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which requests get a tree, now or later, bool ``[requests]``: the draft reads no others.

    Args:
        terms: Each request's.
        committed: int64 ``[requests]``: how many tokens each request has.
        sampled: int ``[requests, W]``: the last of them.
    """
    reads: NDArray[np.bool_] = np.array([one.most_committed for one in terms]) >= committed
    for row in np.flatnonzero(reads).tolist():
        reads[row] = terms[row].stops.isdisjoint(sampled[row].tolist())
    return reads


def may_carry_placeholders(sampling_params: Any) -> bool:
    """Whether a request that never drafts may be scored like those that do, on Model Runner V2.

    Its first row has the logits of decoding without drafts, with penalties and edits applied, and
    no other row of it is looked at. This does not hold where vLLM keeps something for each scored
    row: a grammar's state.
    """
    return sampling_params is not None and sampling_params.structured_outputs is None
