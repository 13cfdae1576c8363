"""Lookup on the V1 runner."""

import torch
from torch import Tensor
from vllm.config import VllmConfig

from sequoia_vllm.drafters.lookup.table import Successors, continuations
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.v1.draft_progress import CommittedTokens
from sequoia_vllm.engine.v1.proposer import TextDrafterV1


class LookupDrafterV1(TextDrafterV1):
    """Keeps each request's continuation between a step's levels."""

    def prepare(self, vllm_config: VllmConfig, max_requests: int) -> None:
        """See `TextDrafterV1.prepare`."""
        vocab_size = vllm_config.model_config.get_vocab_size()
        self._successors = Successors(vocab_size, torch.float32, torch.device("cpu"))
        depth = SequoiaSettings.of(vllm_config).tree.depth
        self._continuations = torch.full((max_requests, depth), -1)

    def learn(self, tokens: Tensor, logits: Tensor) -> None:
        """See `TextDrafterV1.learn`."""
        self._successors.learn(tokens, logits)

    def read(self, committed: CommittedTokens, texts: Tensor) -> Tensor:
        """See `TextDrafterV1.read`; looks for matches."""
        requests = torch.from_numpy(committed.requests)
        roots = torch.from_numpy(committed.last)
        lengths = torch.from_numpy(committed.positions)[roots] + 1
        depth = self._continuations.shape[1]
        found = continuations(texts, torch.arange(len(texts)), lengths, depth)
        self._continuations[requests] = found
        return self._successors.logits(torch.from_numpy(committed.tokens)[roots, None], found, 0)

    def logits(self, tokens: Tensor, requests: Tensor, depth: int) -> Tensor:
        """See `TextDrafterV1.logits`."""
        return self._successors.logits(tokens, self._continuations[requests], depth)
