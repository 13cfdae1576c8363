"""Do the tokens of two models that are to be measured mean the same?"""

from __future__ import annotations

from sequoia_vllm.engine.runner.vocabulary import Comparison, TokensOf, compare_vocabularies
from sequoia_vllm.measuring.engines import load_config


def compare_models(target: str, draft: str) -> Comparison:
    """As an engine with these models compares their vocabularies.

    Raises:
        SequoiaError: The draft cannot serve this target, or a model is not there.
    """
    found = (
        TokensOf(model, load_config(model).get_text_config().vocab_size)
        for model in (target, draft)
    )
    return compare_vocabularies(*found)
