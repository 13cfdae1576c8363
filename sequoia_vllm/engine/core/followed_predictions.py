"""Counts what becomes of predictions that the device follows (Model Runner V2).

The device says nothing of them. But what it told of a request before a step follows from the tokens
up to there. So the engine core follows the predictions, too, of requests that ask for counts.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from sequoia_vllm.drafting.draft_plan import depths_by_drafts
from sequoia_vllm.engine.common.step_messages import Predicted
from sequoia_vllm.engine.core.eligibility import may_branch_on_v2
from sequoia_vllm.engine.core.prediction_option import foretold, is_counted
from sequoia_vllm.tree import TokenTree
from sequoia_vllm.verification.prediction import Prediction, PredictionCounts

_FIRST_ROOM = 256  # tokens


class _Followed:
    """One request's prediction, and what it has emitted."""

    def __init__(self, tokens: Sequence[int], may_branch: bool) -> None:
        self.may_branch = may_branch
        self.prediction, self.counts = Prediction(tokens), PredictionCounts()
        self._room = np.empty(_FIRST_ROOM, dtype=np.int32)  # for the output, which begins it

    def add(self, emitted: Sequence[int], drafts: int, depth: int) -> None:
        """Takes a step's tokens. Its tree of so many drafts had what was told down to its depth, or
        a branch was in its place."""
        branch = min(self.prediction.branch, drafts) if self.may_branch else 0
        scored = int((self.prediction.told(max(depth, branch)) >= 0).sum())
        written = self.prediction.seen
        end = written + len(emitted)
        if end > len(self._room):
            self._room = np.concatenate([self._room[:written], np.empty(end, dtype=np.int32)])
        self._room[written:end] = emitted
        self.counts.add(self.prediction, self._room[:end], scored)
        self.prediction.follow(self._room[:end])


class FollowedPredictions:
    """The predictions of unfinished requests that ask for counts."""

    def __init__(self, tree: TokenTree, has_branches: bool) -> None:
        self._depths, self._has_branches = depths_by_drafts(tree), has_branches
        self.requests: dict[str, _Followed] = {}

    def start(self, request_id: str, sampling_params: Any) -> None:
        """Notes a new request."""
        tokens = foretold(sampling_params)
        if tokens is not None and is_counted(sampling_params):
            may_branch = self._has_branches and may_branch_on_v2(sampling_params)
            self.requests[request_id] = _Followed(tokens, may_branch)

    def forget(self, ended: Collection[str]) -> None:
        """Drops requests that have ended."""
        for name in self.requests.keys() & ended:
            del self.requests[name]

    def count(
        self, drafts: Mapping[str, Sequence[int]], outputs: Iterable[Any]
    ) -> dict[str, Predicted]:
        """What became of these requests' predictions so far, by request.

        Args:
            drafts: Those that the step scored, by request.
            outputs: vLLM's `EngineCoreOutput` of each request that emits tokens.
        """
        found = {}
        for one in outputs:
            if (followed := self.requests.get(one.request_id)) is not None:
                scored = len(drafts.get(one.request_id, ()))
                followed.add(one.new_token_ids, scored, self._depths[scored])
                found[one.request_id] = astuple(followed.counts)
        return found
