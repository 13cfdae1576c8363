"""Targets that published heads were made for."""

from collections.abc import Mapping
from typing import NamedTuple

from sequoia_vllm.drafters.registry import KnownDrafter

# Names of a target that heads were made for: also of its quantized versions, not of its base.
LLAMA_3_1_8B = r"(.*/)?(Meta-)?Llama-3\.1-8B-Instruct(-.*)?"
LLAMA_3_3_70B = r"(.*/)?Llama-3\.3-70B-Instruct(-.*)?"
QWEN3 = r"(.*/)?Qwen3-{}(?!-Base)(-(?!Instruct|Thinking).*)?"
QWEN3_2507 = r"(.*/)?Qwen3-{}-Instruct-2507(-.*)?"
QWEN3_CODER = r"(.*/)?Qwen3-Coder-{}-Instruct(-.*)?"
QWEN3_VL = r"(.*/)?Qwen3-VL-{}(-.*)?"
QWEN3_5 = r"(.*/)?Qwen3\.5-{}(?!-Base)(-.*)?"
QWEN3_6 = r"(.*/)?Qwen3\.6-{}(-.*)?"
QWEN3_CODER_NEXT = r"(.*/)?Qwen3-Coder-Next(?!-Base)(-.*)?"
KIMI = r"(.*/)?Kimi-K{}(-.*)?"
GEMMA_4 = r"(.*/)?gemma-4-{}-it(-.*)?"
GPT_OSS = r"(.*/)?gpt-oss-{}(-.*)?"
MINIMAX = r"(.*/)?MiniMax-M{}(-.*)?"

SPECULATORS = "vllm-project/speculators: README.md"
HUB = "its page on huggingface.co"


class Publisher(NamedTuple):
    """Who publishes heads."""

    named_in: str  # repository and file that names them beside their targets, or `HUB`
    architecture: str  # what vLLM loads their format as, by the name in its model registry


def known_heads(
    publishers: Mapping[str, Publisher], heads: Mapping[str, list[str]]
) -> tuple[KnownDrafter, ...]:
    """Known heads of one kind, by the pattern of their target's name, preferred heads first.
    Publishers are named by a head's whole name, or else by the owner in it."""
    return tuple(
        KnownDrafter(target, head, *(publishers.get(head) or publishers[head.partition("/")[0]]))
        for target, names in heads.items()
        for head in names
    )
