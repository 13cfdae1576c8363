"""Drafts with another vocabulary than the target's: token-level intersection.

A draft's distribution over its own tokens becomes one over the target's: of each token that both
have, by its text (`match`), the probability; of all others none. It is a distribution Q like any
other, so that what is drawn from it and verified against it follows the target's law: a wrong
match costs acceptance and nothing else.
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
