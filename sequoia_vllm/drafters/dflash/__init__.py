"""DFlash heads and their kin: one pass over a block drafts all levels.

The kin are DFlash2, LiLiCorr, and JetSpec (arXiv 2606.18394), whose positions see no later ones.
"""

from types import MappingProxyType
from typing import Any

from sequoia_vllm.drafters import known_heads as targets
from sequoia_vllm.drafters.known_heads import HUB, SPECULATORS, Publisher, known_heads
from sequoia_vllm.drafters.registry import Drafter, Fields, HeadShape, Sign, register

_PUBLISHERS = {
    "RedHatAI": Publisher(SPECULATORS, "DFlashDraftModel"),
    "RedHatAI/Qwen3-4B-speculator.dflash2": Publisher(HUB, "DFlash2DraftModel"),
    "RedHatAI/Qwen3-8B-speculator.dflash2": Publisher(HUB, "DFlash2DraftModel"),
    "RedHatAI/gemma-4-31B-it-speculator.dflash2": Publisher(HUB, "DFlash2DraftModel"),
    "JetSpec": Publisher("hao-ai-lab/JetSpec: README.md", "DFlashDraftModel"),
    "z-lab": Publisher("z-lab/dflash: README.md", "DFlashDraftModel"),
    "z-lab/Qwen3.8-27B-DFlash2": Publisher(HUB, "DFlash2DraftModel"),
}
_V2 = "sequoia_vllm.drafters.dflash.v2"


class BlockHead(Drafter):
    """A head that drafts a block: a position for each level, and one before them for the root."""

    in_one_pass = True

    def levels(self, config: Fields) -> int | None:
        """See `Drafter.levels`; the root's own position counts only if it predicts, too."""
        block = self._block_size(config)
        before = 0 if self._root_predicts(config) else 1
        return None if block is None else max(int(block) - before, 1)

    def head_shape(self, config: Fields) -> HeadShape:
        """See `Drafter.head_shape`; matrices that correct by drafted tokens are not counted."""
        width = config.count("target_hidden_size", config.count("hidden_size"))
        own = config.value("draft_vocab_size")
        layers = len(config.hidden_state_layers()) or config.count("num_hidden_layers")
        return HeadShape(
            kind=self.kind,
            reads=layers * width,
            output_vocab=None if own in (None, config.count("vocab_size")) else own,
            levels=self.levels(config),
        )

    def _block_size(self, config: Fields) -> int | None:
        return config.value("block_size")

    def _root_predicts(self, config: Fields) -> bool:
        """Whether a block's first position predicts the first level."""
        nested = config.nested("dflash_config", "sample_from_anchor")
        return bool(nested or config.value("sample_from_anchor"))


@register
class DFlash(BlockHead):
    """All nodes of a level have the same Q, or one corrected by their tokens (its kin)."""

    kind = "dflash"
    name = "a DFlash head"
    rank = 2
    ran_on = None
    method = "dflash"
    on_v2 = f"{_V2}.BlockDrafter"
    on_v2_by_architecture = MappingProxyType({
        "DFlash2DraftModel": f"{_V2}.CandidateDrafter",
        "LiLiCorrDraftModel": f"{_V2}.CandidateDrafter",
    })  # fmt: skip
    speculators = MappingProxyType({
        "dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel",
    })  # fmt: skip
    signs = (
        Sign(
            "architecture", r".*XPress.*",
            "an XPress drafter, which refines the tokens of a block together", drafts=False,
        ),
        Sign("architecture", r"DFlash2DraftModel", "a DFlash2 head"),
        Sign("architecture", r"LiLiCorrDraftModel", "a LiLiCorr head"),
        Sign(
            "architecture", r"DFlash2.*", "a DFlash2 head of another architecture", drafts=False,
            chains="dflash",
        ),
        Sign(
            "architecture", r"DFlashLaguna.*", "a DFlash head of Laguna", drafts=False,
            chains="dflash",
        ),
        Sign("architecture", r"DFlash.*|.*DFlash|MuseGlimmerAssistantModel"),
        Sign("field", "dflash_config"),
    )  # fmt: skip
    known = known_heads(_PUBLISHERS, {
        targets.LLAMA_3_1_8B: ["z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"],
        targets.QWEN3.format("4B"): [
            "z-lab/Qwen3-4B-DFlash-b16", "RedHatAI/Qwen3-4B-speculator.dflash2",
        ],
        targets.QWEN3.format("8B"): [
            "RedHatAI/Qwen3-8B-speculator.dflash", "z-lab/Qwen3-8B-DFlash-b16",
            "RedHatAI/Qwen3-8B-speculator.dflash2", "JetSpec/jetspec-qwen3-8b",
        ],
        targets.QWEN3.format("30B-A3B"): [
            "RedHatAI/Qwen3-30B-A3B-speculator.dflash", "JetSpec/jetspec-qwen3-30b-a3b",
        ],
        targets.QWEN3_CODER_NEXT: ["z-lab/Qwen3-Coder-Next-DFlash"],
        targets.QWEN3_5.format("4B"): ["z-lab/Qwen3.5-4B-DFlash"],
        targets.QWEN3_5.format("9B"): ["z-lab/Qwen3.5-9B-DFlash"],
        targets.QWEN3_5.format("27B"): ["z-lab/Qwen3.5-27B-DFlash"],
        targets.QWEN3_5.format("35B-A3B"): ["z-lab/Qwen3.5-35B-A3B-DFlash"],
        targets.QWEN3_5.format("122B-A10B"): ["z-lab/Qwen3.5-122B-A10B-DFlash"],
        targets.QWEN3_6.format("27B"): ["z-lab/Qwen3.6-27B-DFlash"],
        targets.QWEN3_6.format("35B-A3B"): [
            "z-lab/Qwen3.6-35B-A3B-DFlash", "JetSpec/jetspec-Qwen3.6-35B-A3B",
        ],
        r"(.*/)?Qwen3\.8-27B(-.*)?": ["z-lab/Qwen3.8-27B-DFlash2"],
        targets.GEMMA_4.format("26B-A4B"): [
            "z-lab/gemma-4-26B-A4B-it-DFlash", "JetSpec/jetspec-gemma4-26B-A4B0-it",
        ],
        targets.GEMMA_4.format("31B"): [
            "z-lab/gemma-4-31B-it-DFlash", "RedHatAI/gemma-4-31B-it-speculator.dflash2",
        ],
        targets.MINIMAX.format("2.5"): ["z-lab/MiniMax-M2.5-DFlash"],
        targets.KIMI.format(r"2\.5"): ["z-lab/Kimi-K2.5-DFlash"],
        targets.QWEN3_2507.format("30B-A3B"): [
            "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash",
        ],
        targets.QWEN3_CODER.format("30B-A3B"): ["z-lab/Qwen3-Coder-30B-A3B-DFlash"],
        targets.GPT_OSS.format("20b"): ["z-lab/gpt-oss-20b-DFlash", "JetSpec/jetspec-gpt-oss-20b"],
        targets.GPT_OSS.format("120b"): ["z-lab/gpt-oss-120b-DFlash"],
    })  # fmt: skip

    def look_alike(self, config: Fields) -> tuple[Sign, str] | None:
        """See `Drafter.look_alike`: drafters with a DFlash head that draft in another way."""
        others = {
            "selector_rank": "a DFlash2 head under the name of another architecture",
            "projector_type": "a Domino drafter, which vLLM does not run",
        }
        for key, name in others.items():
            if key in (config.value("dflash_config") or {}):
                return Sign("field", key, name, drafts=False), key
        return None

    def complete(self, config: Any) -> None:
        """See `Drafter.complete`: JetSpec's heads call ``causal`` ``causal_head``."""
        own = getattr(config, "dflash_config", None) or {}
        if "causal_head" in own:
            own.setdefault("causal", bool(own["causal_head"]))

    def problem(self, config: Fields) -> str | None:
        """See `Drafter.problem`."""
        if self._root_predicts(config):
            return "drafts its first token at the root's own position"
        return None
