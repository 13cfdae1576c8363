"""Draft models: they read tokens alone."""

from sequoia_vllm.drafters.registry import Drafter, KnownDrafter, Sign, register

_MEDUSA, _SPECULATOR = "a set of Medusa heads", "an MLP speculator"

# By their targets. Targets that read images have the tokens of a text model.
_SMALLEST = {
    r"Qwen2\.5-(VL-)?(7|14|32|72)B": "Qwen/Qwen2.5-0.5B-Instruct",
    r"Qwen2\.5-Coder-(7|14|32)B": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    r"Qwen3-VL-(8|32)B": "Qwen/Qwen3-0.6B",
    r"gemma-2-27b": "google/gemma-2-2b-it",
    r"gemma-3-(4|12|27)b": "google/gemma-3-270m-it",
    r"EXAONE-4\.0-32B": "LGAI-EXAONE/EXAONE-4.0-1.2B",
    r"ERNIE-4\.5-(21B-A3B|300B-A47B)": "baidu/ERNIE-4.5-0.3B-PT",
}


@register
class StandaloneModel(Drafter):
    """A model of its own. Trees draft with no other checkpoints that have a model's signs."""

    kind = "model"
    name = "a draft model"
    rank = 9
    method = "draft_model"
    on_v2 = "sequoia_vllm.drafters.model.v2.ModelDrafter"
    on_v1 = "sequoia_vllm.drafters.model.v1.ModelDrafterV1"
    ran_on = "an H100"
    is_head = False
    signs = (
        Sign("architecture", r"Medusa.*", _MEDUSA, drafts=False),
        Sign("architecture", r"MLPSpeculator.*", _SPECULATOR, drafts=False),
        Sign("model_type", "medusa", _MEDUSA, drafts=False),
        Sign("model_type", "mlp_speculator", _SPECULATOR, drafts=False),
    )
    known = (
        KnownDrafter(
            r".*Llama-2-(7|13|70)b.*", "JackFram/llama-68m",
            "the paper's draft for Llama-2 targets",
        ),
        KnownDrafter(
            r".*vicuna-(7|13)b.*", "JackFram/llama-68m",
            "Vicuna is a fine-tuned Llama with its tokenizer",
        ),
        KnownDrafter(
            r".*Llama-3\.[123]-(8|70|405)B.*", "meta-llama/Llama-3.2-1B-Instruct",
            "the smallest model with Llama 3's tokenizer",
        ),
        KnownDrafter(
            r".*Qwen3-(4|8|14|32)B.*", "Qwen/Qwen3-0.6B", "the smallest Qwen3 model"
        ),
        *(
            KnownDrafter(rf"(.*/)?{targets}.*", draft, "the smallest model of its kind")
            for targets, draft in _SMALLEST.items()
        ),
        KnownDrafter(
            r"(.*/)?examples/models/target/?", "{0}/draft", "the pair in this repository"
        ),
        KnownDrafter(
            r"(.*/)?SmolLM2-135M-Instruct/?", "{1}/examples/models/smollm2-draft",
            "which this repository has for it",
            target_sha256="7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
        ),
    )  # fmt: skip
