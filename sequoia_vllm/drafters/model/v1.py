"""Draft models on the V1 runner."""

import torch
from torch import Tensor
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from sequoia_vllm.engine.runner.vocabulary import draft_vocabulary
from sequoia_vllm.engine.v1.proposer import DrafterV1


class ModelDrafterV1(DrafterV1):
    """Reads and drafts the target's tokens, also where the model has another vocabulary."""

    def load(self, chains: DraftModelProposer) -> torch.nn.Module:
        """See `DrafterV1.load`; also matches the vocabularies."""
        self._model = DraftModelProposer._get_model(chains)
        self._vocabulary = draft_vocabulary(chains.vllm_config, self._model, chains.device)
        return self._model

    def logits(self, tokens: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor:
        """See `DrafterV1.logits`."""
        read = self._vocabulary.read(tokens)
        hidden = self._model(input_ids=read, positions=positions, inputs_embeds=None)
        logits = self._model.compute_logits(hidden if rows is None else hidden[rows])
        return self._vocabulary.target_logits(logits)
