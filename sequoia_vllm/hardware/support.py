"""Kinds of models that trees do not serve: one check and one text, for engines and commands.

An engine asks vLLM what its models are (`sequoia_vllm.engine.frontend.refusals`). Commands that
start no engine read the configuration (`kinds_of`). A test compares both over vLLM's models.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

Kind = Literal[
    "mla", "sparse", "indexed", "ngram", "attention", "chunked", "alibi", "recurrent", "hybrid",
    "diffusion", "realtime", "mrope", "multimodal", "encoder-decoder", "pooling",
]  # fmt: skip
Role = Literal["target", "draft"]

UNSUPPORTED: dict[Kind, str] = {
    "mla": "uses multi-head latent attention (MLA)",
    "sparse": "chooses the tokens that it attends to (sparse MLA: a tree's nodes would have to "
    "choose among their ancestors)",
    "indexed": "chooses the tokens that it attends to by an indexer (DeepSeek Sparse Attention)",
    "ngram": "embeds a token with those before it (n-grams: rows before a tree's node are no "
    "ancestors of it)",
    "attention": "has attention layers of its own, which trees do not know",
    "chunked": "uses chunked local attention",
    "alibi": "uses ALiBi (a bias by distance, which tree attention does not add)",
    "recurrent": "has recurrent layers of a kind that trees do not know",
    "hybrid": "has recurrent layers (Gated DeltaNet, Kimi Delta Attention, linear attention, "
    "Mamba2 or short convolutions)",
    "diffusion": "denoises blocks of tokens (diffusion)",
    "realtime": "reads audio beside every token that it generates",
    "mrope": "uses multi-axis RoPE (M-RoPE)",
    "multimodal": "is multimodal",
    "encoder-decoder": "is an encoder-decoder model",
    "pooling": "is a pooling model",
}  # kinds of models, each with what makes trees impossible

_TARGETS: frozenset[Kind] = frozenset(
    {"mla", "indexed", "chunked", "hybrid", "mrope", "multimodal"}
)
"""Kinds that trees serve as targets. A draft reads tokens, each with one position, and has a KV
cache alone, of which it sees all or a window."""

NOT_ON_CPUS: dict[Kind, str] = {
    "hybrid": "trees over recurrent layers are for GPUs, as vLLM's CPUs run such layers by other "
    "code: serve this target on a GPU, or without Sequoia",
    "indexed": "trees over DeepSeek Sparse Attention are for GPUs, as vLLM's CPUs run it for one "
    "token of a request: serve this target on a GPU, or without Sequoia",
    "chunked": "trees over chunked local attention are for GPUs, as vLLM's CPUs cut requests for "
    "it: serve this target on a GPU, or without Sequoia",
}
"""Kinds of targets that trees serve on GPUs alone, and what an engine on CPUs says."""
RUNS_ON = "it runs on CUDA GPUs and x86 CPUs, not on {} (use vLLM's method draft_model there)"

FIX: dict[Role, str] = {
    "target": "serve it without Sequoia, or choose another target model",
    "draft": "choose another draft model",
}

# Fields that only models of a kind have, unless the field is false or empty.
_FIELDS: dict[Kind, tuple[str, ...]] = {
    "mla": ("kv_lora_rank", "compress_ratios"),
    "sparse": ("index_topk", "compress_ratios"),
    "ngram": ("ngram_vocab_size_ratio", "engram_layer_ids", "ple_layer_ids"),
    "attention": ("rswa_window", "param_sink_number"),
    "chunked": ("attention_chunk_size",),
    "alibi": ("alibi",),
    "recurrent": (
        "linear_num_key_heads", "linear_attn_config", "mamba_d_state", "mamba_num_heads",
        "mamba_n_heads", "ssm_cfg", "ssm_state_size", "state_size",
    ),
    "mrope": ("mrope_section", "xdrope_section"),
    "multimodal": ("vision_config", "audio_config", "thinker_config"),
    "encoder-decoder": ("is_encoder_decoder",),
}  # fmt: skip
# Architectures, where no field tells.
_ARCHITECTURES: dict[Kind, str] = {
    # vLLM serves these by one class, which has a cache of an indexer's keys beside the latents.
    "indexed": r"(DeepseekV32|GlmMoeDsa|HYV4)ForCausalLM",
    "ngram": r"(DeepseekV41|LongcatFlashNgram|Qwen4Exp).*",
    "attention": r"(HrmText|Inkling|MiniMaxM3).*",
    "alibi": r"Bloom.*",
    "recurrent": r"(Bailing(MoeV2_5|MoeV3)|Falcon(H1|Mamba)|Glm5Next|GraniteMoeHybrid|InternS2|"
    r"Jamba|Kimi(K3|Linear)|Lfm2|Mamba|MiniCPMV4_[67]|NemotronH|OlmoHybrid|Qwen3(Next|_5)|Qwen4Exp|"
    r"Zamba).*",
    # vLLM's classes of these layers are those that ours extend; it serves other models by others.
    "hybrid": r"(Bailing(MoeV2_5|MoeV3)|FalconH1|GraniteMoeHybrid|InternS2Preview|Kimi(K3|Linear)|"
    r"Lfm2|MiniCPMV4_[67]|NemotronH|Qwen3(Next|_5)|Zamba2).*",
    "diffusion": r"Diffusion.*",
    "realtime": r".*RealtimeGeneration",
    "multimodal": r"(?!ChatGLM|Inkling).*ForConditionalGeneration|"
    r"(DeepseekVLV2|Deepseek(OCR2?|V41)|Dots3Note|DotsOCR|GLM4V|MiMoV2Omni|Molmo|Moondream3|"
    r"MoonshotKimia|Ovis2_6(_Moe)?|Phi3V|Phi4MM|UnlimitedOCR)ForCausalLM|Phi4ForCausalLMV|"
    r"(H2OVL|InternVL|SkyworkR1V)ChatModel|(MossAudio|Qwen2_5Omni|Ultravox|MiDashengLM)Model|"
    r"Llama_Nemotron_Nano_VL|NemotronH_(Nano_VL_V2|.*Omni_Reasoning_V3)|MiniCPM[OV]|Ovis(2_5)?|"
    r"HfMoondream|NVLM_D|OpenVLA.*|DiffusionGemma.*|.*RealtimeGeneration",
    "encoder-decoder": r"(Whisper|M?Bart|M?T5|Florence2|NemotronParse)ForConditionalGeneration",
    "pooling": r".*(Classification|ForMaskedLM|ForTextEncoding|ForRetrieval|ForRanking|"
    r"(?<!Chat)(?<!LMHead)(?<!ChatGLM)(?<!Omni)(?<!Audio)(?<!Ultravox)(?<!MiDashengLM)Model)",
}
# Low ranks of keys and values that vLLM does not keep in its cache.
_KEEPS_KEYS = frozenset({"minicpm3"})
# Where a model of several parts describes its text model.
_TEXT_MODELS = ("text_config", "language_config", "llm_config", "thinker_config")


def refused_kinds(role: Role, kinds: Collection[Kind]) -> list[Kind]:
    """The kinds of a model that trees do not serve in this role."""
    found = set(kinds) - (_TARGETS if role == "target" else set())
    return [kind for kind in UNSUPPORTED if kind in found]


def faults(name: str, role: Role, kinds: Collection[Kind]) -> list[str]:
    """The reasons why trees do not serve a model; none: they do."""
    return [f"the {role} model {name} {UNSUPPORTED[kind]}" for kind in refused_kinds(role, kinds)]


def refusal(name: str, role: Role, kinds: Collection[Kind], see: str = "") -> str | None:
    """The message that refuses a model, with the fix, and what to see; None: trees serve it."""
    found = [f"{fault}: {FIX[role]}{see}" for fault in faults(name, role, kinds)]
    return as_error(found) if found else None


def as_error(reasons: list[str]) -> str:
    """The message of all reasons together."""
    return "Sequoia cannot run with this set-up: " + "; ".join(reasons)


def kinds_of(config: Mapping[str, Any]) -> set[Kind]:
    """The kinds of model that a configuration, ``config.json`` as it is on the disk, describes."""
    parts = list(_parts(config))
    names = [str(name) for name in config.get("architectures") or ()]
    found = {
        kind
        for kind in UNSUPPORTED
        if any(part.get(field) for part in parts for field in _FIELDS.get(kind, ()))
        or any(re.fullmatch(_ARCHITECTURES.get(kind, "(?!)"), name) for name in names)
        or any(_is_told(kind, part) for part in parts)
    }
    if any(part.get("model_type") in _KEEPS_KEYS for part in parts):
        found.discard("mla")
    if any(name.startswith("MiMoV2") for name in names):
        found.discard("chunked")  # its checkpoints name chunks that neither they nor vLLM use
    if any(has_only_attention(part.get("layer_types")) for part in parts):
        found -= {"recurrent", "hybrid"}
    if "hybrid" in found:  # recurrent layers of a kind that is served
        found.discard("recurrent")
    if "indexed" in found:  # sparse attention of a kind that is served
        found.discard("sparse")
    return found


def has_only_attention(layer_types: Collection[str] | None) -> bool:
    """Whether a checkpoint of a hybrid class has no recurrent layer, as vLLM tells it."""
    return bool(layer_types) and all(
        kind in ("attention", "full_attention") for kind in layer_types or ()
    )


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The configuration, and those of its text models."""
    yield config
    for key in _TEXT_MODELS:
        if isinstance(part := config.get(key), Mapping):
            yield from _parts(part)


def _is_told(kind: Kind, part: Mapping[str, Any]) -> bool:
    """Whether the value of a field tells that a model is of this kind."""
    if kind == "alibi":
        attention = part.get("attn_config")
        types = part.get("position_encoding_type"), part.get("position_embedding_type")
        return "alibi" in types or bool(isinstance(attention, Mapping) and attention.get("alibi"))
    if kind == "recurrent":
        words = re.compile(r".*(linear|mamba|recurrent|conv|ssm).*")
        return any(words.fullmatch(str(layer)) for layer in part.get("layer_types") or ())
    if kind == "mrope":
        rope = [part.get("rope_parameters"), part.get("rope_scaling")]
        rope += [inner for outer in rope if isinstance(outer, Mapping) for inner in outer.values()]
        return any(
            inner.get(field)
            for inner in rope
            if isinstance(inner, Mapping)
            for field in _FIELDS["mrope"]
        )
    return False
