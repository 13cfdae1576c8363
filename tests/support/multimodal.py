"""Tiny random multimodal targets with drafts that read text, and requests with images."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from sequoia_vllm.engine.common.patched import patched
from tests.support.adapters import RANK, two_adapters
from tests.support.calling import DEADLINE, call_in_process, environment_with
from tests.support.engines import (
    chain_of,
    lookup_trees,
    metric,
    running,
    scheduler_of,
    whole_trees,
)
from tests.support.expert_layers import OWN_NAMES, add_layer
from tests.support.generating import SPEC_DECODE, completions, generate_speculating, joined
from tests.support.heads import save_eagle3
from tests.support.models import SMALL
from tests.support.recurrent import STATES, run_chains, run_in_float32
from tests.support.serving import ROOT

TORCHVISION = ROOT / ".venv" / "torchvision-for-tests"  # `make setup` fetches it
VOCABULARY = 128
_SPECIAL = (
    "<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<start_of_image>", "<end_of_image>", "<image_soft_token>",
    "\n", "\n\n", "\n\n\n", "\n\n\n\n",
)  # fmt: skip
_WORDS = {f"w{index}": index for index in range(VOCABULARY - len(_SPECIAL))}
_TOKENS = _WORDS | {word: len(_WORDS) + index for index, word in enumerate(_SPECIAL)}
_TEXT = {
    **SMALL, "vocab_size": VOCABULARY, "num_hidden_layers": 2, "max_position_embeddings": 1024,
    "pad_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
_VISION = {"depth": 1, "hidden_size": 64, "num_heads": 2, "patch_size": 14}
_QWEN3_VISION = {
    **_VISION, "intermediate_size": 64, "out_hidden_size": 64, "hidden_size": 32,
    "num_position_embeddings": 64,
}  # fmt: skip
_QWEN_IDS = {
    "image_token_id": _TOKENS["<|image_pad|>"],
    "video_token_id": _TOKENS["<|video_pad|>"],
    "vision_start_token_id": _TOKENS["<|vision_start|>"],
    "vision_end_token_id": _TOKENS["<|vision_end|>"],
    "tie_word_embeddings": False,
}
_PIXELS = {"shortest_edge": 784, "longest_edge": 784 * 16}
_QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor", "merge_size": 2, "temporal_patch_size": 2,
    "patch_size": 14, "size": _PIXELS,
}  # fmt: skip
_QWEN3_PROCESSOR = {"processor_class": "Qwen3VLProcessor", **_QWEN_IMAGES}
_GEMMA_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
_QWEN_IMAGE = "<|vision_start|> <|image_pad|> <|vision_end|>"
IMAGE = {
    **dict.fromkeys(("qwen2_vl", "qwen3_vl", "qwen3_5"), _QWEN_IMAGE), "gemma3": "<start_of_image>",
}  # fmt: skip


def _qwen2_vl() -> tuple[Any, dict[str, Any]]:
    config = hf.Qwen2VLConfig(
        text_config={**_TEXT, "rope_parameters": _AXES},
        vision_config={**_VISION, "embed_dim": 32, "mlp_ratio": 2},
        **_QWEN_IDS,
    )
    processor = {"processor_class": "Qwen2VLProcessor", **_QWEN_IMAGES}
    return hf.Qwen2VLForConditionalGeneration(config), processor


def _qwen3_vl() -> tuple[Any, dict[str, Any]]:
    config = hf.Qwen3VLConfig(
        text_config={**_TEXT, "rope_parameters": {**_AXES, "mrope_interleaved": True}},
        vision_config={**_QWEN3_VISION, "deepstack_visual_indexes": [0]},
        **_QWEN_IDS,
    )
    return hf.Qwen3VLForConditionalGeneration(config), _QWEN3_PROCESSOR


def _qwen3_5() -> tuple[Any, dict[str, Any]]:
    axes = {**_AXES, "mrope_interleaved": True, "partial_rotary_factor": 1.0}
    config = hf.Qwen3_5Config(
        text_config={
            **_TEXT, **STATES, "rope_parameters": axes, "mtp_num_hidden_layers": 1,
            "layer_types": ["linear_attention", "full_attention"],
        },
        vision_config=_QWEN3_VISION,
        **_QWEN_IDS,
    )  # fmt: skip
    return hf.Qwen3_5ForConditionalGeneration(config), _QWEN3_PROCESSOR


def _gemma3() -> tuple[Any, dict[str, Any]]:
    config = hf.Gemma3Config(
        text_config={
            **_TEXT, "sliding_window": 40, "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
        },
        mm_tokens_per_image=4,
        boi_token_index=_TOKENS["<start_of_image>"],
        eoi_token_index=_TOKENS["<end_of_image>"],
        image_token_index=_TOKENS["<image_soft_token>"],
    )  # fmt: skip
    return hf.Gemma3ForConditionalGeneration(config), {
        "processor_class": "Gemma3Processor",
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 56, "width": 56},
        "image_seq_length": 4,
    }


LIMITS: dict[str, Any] = {"limit_mm_per_prompt": {"image": 2}, "block_size": 32}
_MAKERS = {
    "qwen2_vl": _qwen2_vl, "qwen3_vl": _qwen3_vl, "qwen3_5": _qwen3_5, "gemma3": _gemma3,
}  # fmt: skip


def save_multimodal(folder: Path, name: str) -> dict[str, str]:
    """A target of this kind, and as its draft a text model with its text part's weights.

    So the draft is right about text, as M-RoPE's axes are one there, and not about images. Qwen3.5
    has a layer of its own for a draft, and mostly follows from the token before. Transformers would
    read a tokenizer beside its configuration as the published ones.
    """
    torch.manual_seed(7)
    model, processor = _MAKERS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15)
        if name == "qwen3_5":
            model.get_input_embeddings().weight.mul_(20)
    beside = "tokenizer" if name == "qwen3_5" else "draft"
    paths = {"target": folder / name, beside: folder / f"{name}-{beside}"}
    model.float().save_pretrained(paths["target"])
    if name == "gemma3":
        _name_as_published(paths["target"] / "model.safetensors")
    if name == "qwen3_5":
        add_layer(paths["target"], "model.language_model.layers.1.", "mtp.layers.0", OWN_NAMES, 0.2)
    else:
        _save_draft(model, paths["draft"])
    for path in paths.values():
        _save_tokenizer(path, _GEMMA_TOKENS if name == "gemma3" else {})
    for file in ("preprocessor_config.json", "processor_config.json"):
        (paths["target"] / file).write_text(json.dumps(processor), encoding="utf-8")
    return {what: str(path) for what, path in paths.items()}


def save_glm_ocr(target: Path, vocab: int) -> str:
    """A tiny GLM-OCR whose text model has a layer of multi-token prediction (MTP), its last again.

    It is for text alone. Both know a little that after a token comes the next one.
    """
    config = hf.GlmOcrConfig(
        text_config={
            **_TEXT, "vocab_size": vocab, "num_nextn_predict_layers": 1,
            "rope_parameters": {**_AXES, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5},
        },
        vision_config={**_VISION, "intermediate_size": 64, "out_hidden_size": 64},
        **_QWEN_IDS,
    )  # fmt: skip
    torch.manual_seed(7)
    model = hf.GlmOcrForConditionalGeneration(config).float()
    embedding = torch.randn(vocab, SMALL["hidden_size"])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.1)
        model.get_input_embeddings().weight.copy_(embedding)
        model.lm_head.weight.copy_(0.2 * embedding.roll(1, 0))
    model.save_pretrained(target)
    layer = "model.language_model.layers.2"
    names = (f"{layer}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
    add_layer(target, "model.language_model.layers.1.", layer, tuple(names), states=0.5)
    return str(target)


def _name_as_published(file: Path) -> None:
    """Transformers 5 leaves a part of the vision model's names out, which vLLM expects."""
    weights = {
        name.replace("vision_tower.", "vision_tower.vision_model."): weight
        for name, weight in load_file(file).items()
    }
    save_file(weights, file, {"format": "pt"})


def _save_draft(model: Any, path: Path) -> None:
    text = model.config.get_text_config().to_dict()
    kinds = {"qwen2_vl_text": hf.Qwen2Config, "qwen3_vl_text": hf.Qwen3Config}
    kind = kinds.get(text["model_type"], hf.Gemma3TextConfig)
    dropped = {"model_type", "architectures", "dtype"}
    if kind is not hf.Gemma3TextConfig:
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
        dropped |= {"layer_types", "rope_scaling"}
    config = kind(**{name: value for name, value in text.items() if name not in dropped})
    draft = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {
        name.replace("model.language_model.", "model."): weight
        for name, weight in model.state_dict().items()
    }
    missing, _ = draft.load_state_dict(weights, strict=False)
    assert not missing, missing
    draft.save_pretrained(path)


def _save_tokenizer(path: Path, named: dict[str, str]) -> None:
    words = Tokenizer(models.WordLevel(_TOKENS, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(list(_SPECIAL))
    hf.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w2", pad_token="<|endoftext|>", eos_token="<|im_end|>",
        **named,
    ).save_pretrained(path)  # fmt: skip


def requests_with_images(image: str) -> list[dict[str, Any]]:
    """Text alone, one image, two, and the first image again behind the same words."""
    from PIL import Image

    noise = np.random.default_rng(3)
    first, second, third = (
        Image.fromarray(noise.integers(0, 255, (*size, 3), dtype=np.uint8))
        for size in ((56, 84), (112, 56), (28, 28))
    )
    words = " ".join(f"w{7 * index % 100}" for index in range(40))  # more than a block
    return [
        {"prompt": "w5 w9 w11 w40"},
        {"prompt": f"w5 {image} {words}", "multi_modal_data": {"image": first}},
        {"prompt": f"w3 {image} w4 {image} w8", "multi_modal_data": {"image": [second, third]}},
        {"prompt": f"w5 {image} {words} w31", "multi_modal_data": {"image": first}},
    ]


def requests_with_three_images(image: str) -> list[dict[str, Any]]:
    """Four requests, each with three images of its own, which have 16 tokens each, the most."""
    from PIL import Image

    noise = np.random.default_rng(4)

    def seen() -> Any:
        return Image.fromarray(noise.integers(0, 255, (112, 112, 3), dtype=np.uint8))

    return [
        {
            "prompt": f"w{place} {image} w9 w10 {image} {image} w{40 + place}",
            "multi_modal_data": {"image": [seen() for _ in range(3)]},
        }
        for place in range(4)
    ]


# The cache of what the vision model computed takes 16 tokens: as many as the largest image has.
ONE_IMAGE: dict[str, Any] = {"max_num_batched_tokens": 12, "enable_chunked_prefill": True}
MOST_STEPS = 500  # within which these requests end: they take some 80


def answer_one_by_one(paths: dict[str, str], image: str, trees: bool) -> dict[str, Any]:
    """Tokens of requests side by side, with trees in an engine that keeps one image at a time.

    Plain vLLM keeps all: on CPUs it cannot read a seeded request's prompt in pieces.
    """
    common = {"max_tokens": 16, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0.8 * (place % 2), seed=place, **common) for place in range(4)
    ]

    def ends(step: int) -> None:
        assert step < MOST_STEPS, "requests wait for each other"

    settings = {
        **LIMITS, "limit_mm_per_prompt": {"image": 3, "video": 0},
        "tokenizer": paths.get("tokenizer"), **(ONE_IMAGE if trees else {}),
    }  # fmt: skip
    config = _trees_of(paths) if trees else None
    with running(config, model=paths["target"], **settings) as llm:
        kept = scheduler_of(llm).encoder_cache_manager.cache_size
        requests = requests_with_three_images(image)
        tokens = joined(llm, requests, params, every=1, before_step=ends)
        accepted = metric(llm, "vllm:spec_decode_num_accepted_tokens") if config else 0
    return {"tokens": tokens, "kept": kept, "accepted": accepted}


def _trees_of(paths: dict[str, str]) -> dict[str, Any]:
    """Trees over the draft beside a target, or over the target's own layer."""
    drafter = {} if "draft" in paths else {"drafter": "mtp"}
    return whole_trees(size=8, depth=3, draft=paths.get("draft") or paths["target"], **drafter)


def answer_images(
    paths: dict[str, str], image: str, trees: bool | str, options: dict[str, Any]
) -> dict[str, Any]:
    """Greedy tokens twice, the second time from the prefix cache; seeded ones; counters.

    ``trees``: "lookup" drafts without a draft; True: the one beside the target, or its own layer.
    """
    config = _trees_of(paths) if trees else None
    if trees == "lookup":
        config = lookup_trees(size=8, depth=3)
    common = {"max_tokens": 16, "ignore_eos": True}
    settings = {
        **LIMITS, "enable_prefix_caching": True, "tokenizer": paths.get("tokenizer"), **options
    }  # fmt: skip
    requests = requests_with_images(image)
    if options.get("language_model_only"):
        requests = requests[:1]
    with running(config, model=paths["target"], **settings) as llm:
        greedy = SamplingParams(temperature=0, **common)
        rounds = [
            completions(llm.generate(requests, params, use_tqdm=False))
            for params in (greedy, greedy, SamplingParams(temperature=0.8, seed=5, **common))
        ]
        names = SPEC_DECODE if trees else ()
        return {
            "tokens": rounds,
            **{name: metric(llm, f"vllm:spec_decode_num_{name}") for name in names},
            "hits": metric(llm, "vllm:prefix_cache_hits"),
        }


def answer_beside_others(folder: str, name: str, trees: bool) -> dict[str, Any]:
    """Tokens of requests with images: with adapters, with a grammar, and beside one that ends.

    The third request is aborted while all run, after their first step.
    """
    paths = save_multimodal(Path(folder), name)
    adapters = two_adapters(
        Path(folder), scale=0.3, target=paths["target"], layers="model.language_model.layers"
    )
    words = StructuredOutputsParams(regex="(w2(w3|w4|w5)|w3(w0|w2))+")
    common = {"max_tokens": 16, "ignore_eos": True}
    greedy = {"temperature": 0, **common}
    own = greedy, {"temperature": 0.8, "seed": 5, **common}, greedy
    params = [SamplingParams(**one) for one in (*own, {"structured_outputs": words, **greedy})]
    config = whole_trees(size=8, depth=3, draft=paths["draft"]) if trees else None
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    with running(config, model=paths["target"], **options, **LIMITS) as llm:
        requests = requests_with_images(IMAGE[name])
        tokens = joined(llm, requests, params, aborted=2, every=0, adapters=2 * adapters)
        accepted = metric(llm, "vllm:spec_decode_num_accepted_tokens") if trees else 0
        without = completions(llm.generate(requests[0], params[0], use_tqdm=False))
    return {"tokens": tokens, "accepted": accepted, "without adapters": without[0]}


def answer_with_a_head(folder: str) -> dict[str, Any]:
    """Plain vLLM's tokens, and those of an EAGLE-3 head of Qwen3-VL: chains and a tree.

    Requests choose among few tokens, or the head, which is random, would rarely be right.
    """
    paths, tokens = save_multimodal(Path(folder), "qwen3_vl"), [20, 40, 60, 80]
    head = save_eagle3(Path(folder) / "head", paths["draft"], tokens)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, allowed_token_ids=tokens)
    requests = requests_with_images(IMAGE["qwen3_vl"])
    vllms = {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
    tree = whole_trees(size=8, depth=3, draft=head)
    methods = {"plain": None, "tree": tree, "chain": chain_of(head, 3), "vLLM's chain": vllms}
    return {
        name: generate_speculating(config, requests, params, model=paths["target"], **LIMITS)
        for name, config in methods.items()
    }


def answer_with_its_layer(folder: str) -> dict[str, Any]:
    """Chains of Qwen3.5's own layer: vLLM's, ours, and ours if the layer reads no images."""
    from sequoia_vllm.engine.v2.drafting.target_states import ImageRows

    run_in_float32()
    run_chains()
    paths = save_multimodal(Path(folder), "qwen3_5")
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    chain = chain_of(paths["target"], 3, drafter="mtp")
    given: Any = requests_with_images(IMAGE["qwen3_5"]), params
    options: dict[str, Any] = {
        "model": paths["target"], "tokenizer": paths["tokenizer"], **LIMITS,
        "enable_prefix_caching": False,
    }  # fmt: skip
    vllms = {"method": "mtp", "num_speculative_tokens": 3}
    found = {
        name: generate_speculating(config, *given, **options)
        for name, config in (("vLLM's", vllms), ("ours", chain))
    }
    with patched(ImageRows, "of", lambda *_: None):
        return {**found, "blind": generate_speculating(chain, *given, **options)}


def call_with_images(
    function: Callable[..., Any], directory: Path, environment: dict[str, str] | None = None,
    **arguments: Any,
) -> Any:  # fmt: skip
    """What `function(**arguments)` returns where vLLM can read images: on V1, unless told so."""
    assert (TORCHVISION / "torchvision").is_dir(), "run `make setup`: it fetches torchvision"
    environment = environment or environment_with()
    environment["PYTHONPATH"] += f":{TORCHVISION}"
    return call_in_process(function, directory, environment, DEADLINE, ROOT, **arguments)
