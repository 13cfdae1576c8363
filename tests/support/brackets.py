"""Reasoning parsers for the tests' targets, as `--reasoning-parser-plugin` takes them."""

from collections.abc import Sequence

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser


class BracketParser(BaseThinkingReasoningParser):
    """Its thinking is what it writes between brackets."""

    start_token = "("
    end_token = ")"


class OpenedParser(DeepSeekR1ReasoningParser):
    """Its thinking has begun in the prompt, and ends with a bracket."""

    start_token = "<s>"
    end_token = ")"

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Counts from the first token on; vLLM's counts from a start in the output."""
        found = list(token_ids)
        return found.index(self.end_token_id) if self.end_token_id in found else len(found)


class WordParser(BaseThinkingReasoningParser):
    """Thinks between two words of `models.save_word_tokenizer`."""

    start_token = "w5"
    end_token = "w4"


ReasoningParserManager.register_module("brackets", module=BracketParser)
ReasoningParserManager.register_module("words", module=WordParser)
ReasoningParserManager.register_module("opened", module=OpenedParser)
