"""EAGLE-3 heads: one layer that reads tokens and hidden states, in a pass for each level."""

from types import MappingProxyType
from typing import Any

from sequoia_vllm.drafters import known_heads as targets
from sequoia_vllm.drafters.known_heads import HUB, SPECULATORS, Publisher, known_heads
from sequoia_vllm.drafters.registry import Drafter, Fields, HeadShape, Sign, register

_EAGLE = "SafeAILab/EAGLE: README.md"
_VLLM = "vllm-project/vllm: tests/models/registry.py"
_BUNDLE = "sgl-project/SpecForge: docs/community_resources/specbundle.md"
# Heads in the speculators' format; with a configuration of a model; and made with SpecForge.
_PUBLISHERS = {
    "RedHatAI": Publisher(SPECULATORS, "Eagle3LlamaForCausalLM"),
    "yuhuili": Publisher(_EAGLE, "Eagle3LlamaForCausalLM"),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": Publisher(_VLLM, "Eagle3LlamaForCausalLM"),
    "AngelSlim": Publisher("Tencent/AngelSlim: README.md", "LlamaForCausalLMEagle3"),
    "lmsys": Publisher(_BUNDLE, "LlamaForCausalLMEagle3"),
    "lmsys/Qwen3-235B-A22B-EAGLE3": Publisher(_EAGLE, "LlamaForCausalLMEagle3"),
    "zhuyksir": Publisher(_BUNDLE, "LlamaForCausalLMEagle3"),
    "Tengyunw": Publisher(_EAGLE, "LlamaForCausalLMEagle3"),
    "nvidia": Publisher(_EAGLE, "LlamaForCausalLMEagle3"),
    "nvidia/gpt-oss-120b-Eagle3-v3": Publisher(
        "vllm-project/recipes: models/openai/gpt-oss-120b.yaml", "LlamaForCausalLMEagle3"
    ),
    "taobao-mnn": Publisher(HUB, "Eagle3Qwen3vlForCausalLM"),
    "taobao-mnn/Qwen3-VL-8B-Instruct-Eagle3": Publisher(_VLLM, "Eagle3Qwen3vlForCausalLM"),
    "Rayzl": Publisher(_VLLM, "Eagle3Qwen2_5vlForCausalLM"),
    "AQ-MedAI": Publisher(HUB, "LlamaForCausalLMEagle3"),
    "AQ-MedAI/Kimi-K2-Instruct-eagle3": Publisher(_BUNDLE, "LlamaForCausalLMEagle3"),
    "asherszhang": Publisher(HUB, "LlamaForCausalLMEagle3"),
    "IamBerbec": Publisher(HUB, "LlamaForCausalLMEagle3"),
}
# Hidden states that vLLM gives heads that do not say which they read.
_DEFAULT_READS = 3
_P_EAGLE = Sign(
    "architecture", r"P[Ee]agle.*", "a P-EAGLE head, which drafts in parallel", drafts=False,
    chains="eagle3",
)  # fmt: skip
# Fields of heads that draft in parallel: the token that stands for those not drafted yet.
_PARALLEL = ("ptd_token_id", "pard_token")


@register
class Eagle3(Drafter):
    """A head whose queries, keys and values are made of a token's embedding and a hidden state."""

    kind = "eagle3"
    name = "an EAGLE-3 head"
    rank = 3
    ran_on = "an H100"
    method = "eagle3"
    on_v2 = "sequoia_vllm.drafters.eagle3.v2.LevelHeadDrafter"
    may_look_like_model = True
    speculators = MappingProxyType({
        "eagle3": "Eagle3LlamaForCausalLM", "peagle": "PeagleLlamaForCausalLM",
    })  # fmt: skip
    signs = (
        _P_EAGLE, Sign("architecture", r"Eagle3.*|.*Eagle3"),
        Sign("architecture", r"Eagle.*", "an EAGLE-1 head", drafts=False, chains="eagle"),
        Sign("field", "draft_vocab_size"), Sign("field", "eagle_config"),
        Sign("field", "eagle_aux_hidden_state_layer_ids"),
    )  # fmt: skip
    # The first that fits target and engine is taken. Heads made with vLLM's own library come
    # first: they are served with vLLM where they are made.
    known = known_heads(_PUBLISHERS, {
        targets.LLAMA_3_1_8B: [
            "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
            "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
            "lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge",
        ],
        targets.LLAMA_3_3_70B: [
            "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3",
            "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
            "lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge",
        ],
        r"(.*/)?DeepSeek-R1-Distill-Llama-8B(-.*)?": [
            "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
        ],
        r"(.*/)?vicuna-13b-v1\.3(-.*)?": ["yuhuili/EAGLE3-Vicuna1.3-13B"],
        targets.QWEN3.format("1.7B"): ["AngelSlim/Qwen3-1.7B_eagle3"],
        targets.QWEN3.format("4B"): ["AngelSlim/Qwen3-4B_eagle3"],
        targets.QWEN3.format("8B"): [
            "RedHatAI/Qwen3-8B-speculator.eagle3", "AngelSlim/Qwen3-8B_eagle3",
            "Tengyunw/qwen3_8b_eagle3",
        ],
        targets.QWEN3.format("14B"): [
            "RedHatAI/Qwen3-14B-speculator.eagle3", "AngelSlim/Qwen3-14B_eagle3",
        ],
        targets.QWEN3.format("32B"): [
            "RedHatAI/Qwen3-32B-speculator.eagle3", "AngelSlim/Qwen3-32B_eagle3",
        ],
        targets.QWEN3.format("30B-A3B"): [
            "AngelSlim/Qwen3-a3B_eagle3", "Tengyunw/qwen3_30b_moe_eagle3",
        ],
        targets.QWEN3_2507.format("30B-A3B"): [
            "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3",
            "lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex",
        ],
        targets.QWEN3.format("235B-A22B"): [
            "RedHatAI/Qwen3-235B-A22B-speculator.eagle3", "nvidia/Qwen3-235B-A22B-Eagle3",
            "lmsys/Qwen3-235B-A22B-EAGLE3",
        ],
        targets.QWEN3_2507.format("235B-A22B"): [
            "RedHatAI/Qwen3-235B-A22B-Instruct-2507-speculator.eagle3",
            "lmsys/SGLang-EAGLE3-Qwen3-235B-A22B-Instruct-2507-SpecForge-Meituan",
        ],
        targets.QWEN3_CODER.format("30B-A3B"): [
            "lmsys/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct-SpecForge",
        ],
        targets.QWEN3_CODER.format("480B-A35B"): [
            "lmsys/SGLang-EAGLE3-Qwen3-Coder-480B-A35B-Instruct-SpecForge-EigenAI",
        ],
        r"(.*/)?Qwen3-Next-80B-A3B-Instruct(-.*)?": [
            "lmsys/SGLang-EAGLE3-Qwen3-Next-80B-A3B-Instruct-FP8-perfect-blend-regenerated",
        ],
        r"(.*/)?Qwen2\.5-VL-7B-Instruct(-.*)?": ["Rayzl/qwen2.5-vl-7b-eagle3-sgl"],
        targets.QWEN3_VL.format("2B-Instruct"): ["taobao-mnn/Qwen3-VL-2B-Instruct-Eagle3"],
        targets.QWEN3_VL.format("4B-Thinking"): ["taobao-mnn/Qwen3-VL-4B-Thinking-Eagle3"],
        targets.QWEN3_VL.format("8B-Instruct"): ["taobao-mnn/Qwen3-VL-8B-Instruct-Eagle3"],
        targets.KIMI.format("2-Instruct(?!-0905)"): ["AQ-MedAI/Kimi-K2-Instruct-eagle3"],
        targets.KIMI.format(r"2\.5"): ["AQ-MedAI/Kimi-K25-eagle3"],
        targets.KIMI.format(r"2\.7-Code"): ["AQ-MedAI/Kimi-K2.7-Code-eagle3"],
        targets.GPT_OSS.format("20b"): [
            "RedHatAI/gpt-oss-20b-speculator.eagle3", "zhuyksir/EAGLE3-gpt-oss-20b-bf16",
        ],
        targets.GPT_OSS.format("120b"): [
            "RedHatAI/gpt-oss-120b-speculator.eagle3", "lmsys/EAGLE3-gpt-oss-120b-bf16",
            "nvidia/gpt-oss-120b-Eagle3-v3", "nvidia/gpt-oss-120b-Eagle3",
        ],
        targets.MINIMAX.format("2.5"): ["IamBerbec/MiniMax-M2.5-Eagle3"],
        targets.MINIMAX.format("2.7"): ["asherszhang/MiniMax-M2.7-EAGLE3-draft-vocab32k"],
    })  # fmt: skip

    def look_alike(self, config: Fields) -> tuple[Sign, str] | None:
        """See `Drafter.look_alike`."""
        token = next((key for key in _PARALLEL if config.value(key) is not None), None)
        return (_P_EAGLE, token) if token else None

    def head_shape(self, config: Fields) -> HeadShape:
        """See `Drafter.head_shape`."""
        width = config.count("target_hidden_size", config.count("hidden_size"))
        layers = len(config.hidden_state_layers()) or _DEFAULT_READS
        combines = config.nested("eagle_config", "use_aux_hidden_state") is not False
        return HeadShape(
            kind=self.kind,
            reads=config.count("num_aux_hidden_states", layers) * width if combines else 0,
            output_vocab=config.value("draft_vocab_size") or config.count("vocab_size"),
        )

    def input_parameters(self, shape: Any) -> int:
        """See `Drafter.input_parameters`; the layer's queries, keys, values read two vectors."""
        return shape.hidden * shape.head_size * (shape.heads + 2 * shape.kv_heads)
