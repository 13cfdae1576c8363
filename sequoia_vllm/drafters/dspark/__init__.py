"""DSpark heads: a block like DFlash's, corrected by the tokens drafted in it."""

from types import MappingProxyType

from sequoia_vllm.drafters.dflash import BlockHead
from sequoia_vllm.drafters.known_heads import HUB, QWEN3, Publisher, known_heads
from sequoia_vllm.drafters.registry import Fields, Sign, register

_PUBLISHERS = {
    "deepseek-ai": Publisher(HUB, "Qwen3DSparkModel"),
    "RedHatAI": Publisher(HUB, "Qwen3DSparkModel"),
}
_OTHER = "a DSpark head of another architecture than Qwen3's"


@register
class DSpark(BlockHead):
    """A head of Qwen3's architecture whose Markov matrix corrects each level's prediction."""

    kind = "dspark"
    name = "a DSpark head"
    rank = 1
    ran_on = None
    method = "dspark"
    verifies_adaptively = True
    on_v2 = "sequoia_vllm.drafters.dspark.v2.MarkovDrafter"
    speculators = MappingProxyType({"dspark": "Qwen3DSparkModel"})
    signs = (
        Sign("architecture", r"DSparkDraftModel", model_type="qwen3"),
        Sign("architecture", r"Qwen3DSparkModel"),
        Sign("architecture", r".*DSpark.*", _OTHER, drafts=False, chains="dspark"),
        Sign("field", "markov_rank", _OTHER, drafts=False, chains="dspark"),
        Sign("field", "dspark_block_size", _OTHER, drafts=False, chains="dspark"),
    )
    known = known_heads(_PUBLISHERS, {
        QWEN3.format("4B"): [
            "deepseek-ai/dspark_qwen3_4b_block7", "RedHatAI/Qwen3-4B-speculator.dspark",
        ],
        QWEN3.format("8B"): ["deepseek-ai/dspark_qwen3_8b_block7"],
    })  # fmt: skip

    def _block_size(self, config: Fields) -> int | None:
        found = super()._block_size(config)
        return config.value("dspark_block_size") if found is None else found

    def _root_predicts(self, config: Fields) -> bool:
        return config.value("sample_from_anchor") is not False
