"""Drafts with another vocabulary than the target's: token-level intersection.

A draft's distribution over its own tokens becomes one over the target's. A token that both have,
by its text (`match`), keeps its probability; all others get none. This is a distribution Q like
any other: what is drawn from it and verified against it follows the target's law. A wrong match
costs acceptance and nothing else.
"""

from sequoia_vllm.vocabulary.mapped import MappedVocabulary, SharedVocabulary
from sequoia_vllm.vocabulary.matching import Matching, match
from sequoia_vllm.vocabulary.tokens import Vocabulary, load_tokenizer, read_vocabulary

__all__ = [
    "MappedVocabulary",
    "Matching",
    "SharedVocabulary",
    "Vocabulary",
    "load_tokenizer",
    "match",
    "read_vocabulary",
]
