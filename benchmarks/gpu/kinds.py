"""Tiny models of each kind that trees serve, on a GPU: are their tokens plain vLLM's?

``python -m benchmarks.gpu.kinds KIND FOLDER`` compares one kind and prints a line of JSON.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import DRAFT, TARGET
from sequoia_vllm.bench import methods
from sequoia_vllm.bench.engines import BenchEngine
from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.hardware import graph_sizes
from sequoia_vllm.hardware.graph_sizes import ContextRule
from sequoia_vllm.measuring.step_recorder import EXTENSION

TOKENS = 32
# With graphs, unlike the tests' engines.
_OPTIONS = {
    "enforce_eager": False, "max_model_len": 256, "max_num_seqs": 4, "gpu_memory_utilization": 0.02,
    "kv_cache_memory_bytes": 256 << 20, "worker_extension_cls": EXTENSION,
}  # fmt: skip
_MODELS = Path(TARGET).parent
Saved = tuple[str, dict[str, Any], dict[str, Any]]
"""The target, keys of ``speculative_config``, arguments of `vllm.LLM`."""


def _embedded(folder: Path, dtype: str, cache: str = "auto", **keys: Any) -> Saved:
    return TARGET, keys or {"model": DRAFT}, {"dtype": dtype, "kv_cache_dtype": cache}


def _architecture(folder: Path, name: str, dtype: str) -> Saved:
    from tests.support.architectures import save_architecture

    layers = None if name == "gemma4" else 2  # it describes each of its layers
    model = str(save_architecture(folder / name, name, layers=layers))
    return model, {"model": model}, {"dtype": dtype, "skip_tokenizer_init": True}


def _hybrid(folder: Path, **keys: Any) -> Saved:
    from tests.support.recurrent import save_hybrid_pair

    # vLLM's kernels for prompts want keys and values of one size, and may be FlashInfer's.
    target, draft = save_hybrid_pair(folder, 0.1, key=64, value=64, experts=False)
    options = {"dtype": "bfloat16", "skip_tokenizer_init": True}
    options["gdn_prefill_backend"] = "triton"
    return target, keys or {"model": draft}, options


def _images(folder: Path, name: str) -> Saved:
    from tests.support.multimodal import save_multimodal

    paths = save_multimodal(folder, name)
    options = {"dtype": "bfloat16", "limit_mm_per_prompt": {"image": 2}}
    return paths["target"], {"model": paths["draft"]}, {**options, "image": name}


KINDS: dict[str, Callable[[Path], Saved]] = {
    "draft-float32": partial(_embedded, dtype="float32"),
    "draft": partial(_embedded, dtype="bfloat16"),
    "flash": partial(_embedded, dtype="bfloat16"),
    "lookup-float32": partial(_embedded, dtype="float32", drafter="lookup"),
    "lookup": partial(_embedded, dtype="bfloat16", drafter="lookup"),
    "eagle3": partial(_embedded, dtype="bfloat16", model=str(_MODELS / "eagle3")),
    "dflash": partial(_embedded, dtype="bfloat16", model=str(_MODELS / "dflash")),
    "fp8-cache": partial(_embedded, dtype="bfloat16", cache="fp8"),
    "gemma4-float32": partial(_architecture, name="gemma4", dtype="float32"),
    "gemma4": partial(_architecture, name="gemma4", dtype="bfloat16"),
    "gemma2": partial(_architecture, name="gemma2", dtype="bfloat16"),
    "hybrid": _hybrid,
    "hybrid-lookup": partial(_hybrid, drafter="lookup"),
    "qwen2-vl": partial(_images, name="qwen2_vl"),
    "qwen3-vl": partial(_images, name="qwen3_vl"),
    "gemma3": partial(_images, name="gemma3"),
}


def compare_kind(kind: str, folder: Path) -> dict[str, Any]:
    """Greedy and seeded answers of trees and of plain vLLM."""
    from tests.support.engines import noting, running
    from tests.support.generating import random_prompts, speculated

    target, keys, options = KINDS[kind](folder)
    if image := options.pop("image", None):
        from tests.support.multimodal import IMAGE, requests_with_images

        requests = requests_with_images(IMAGE[image])
    else:
        requests = random_prompts([5, 60, 9, 20], 64)  # of ids that every tiny vocabulary has
    tree = {"tree": {"size": 16, "depth": 4}, "adapt": False}
    options = {"model": target, **_OPTIONS, **options}
    begun = time.monotonic()
    rule = ContextRule(0, 0) if kind == "flash" else None
    with (
        patched(graph_sizes, "usual_rule", lambda _on_cpu: rule),
        noting(torch.cuda.CUDAGraph, "replay", id) as replays,
        running({"method": "sequoia", **tree, **keys}, **options) as llm,
    ):
        found: dict[str, Any] = {"start_s": round(time.monotonic() - begun, 1)}
        replays.clear()
        ours = _all_answers(llm, requests)
        found |= {"replays": len(replays), **speculated(llm)}
    with running(None, **options) as llm:
        plain = _all_answers(llm, requests)
        for how, answers in plain.items():
            found[how] = [a == b for a, b in zip(ours[how], answers, strict=True)]
        if image is None:
            engine = BenchEngine(methods.PLAIN, llm)
            for name, given in (("worst_gap", ours), ("worst_gap_of_plain", plain)):
                found[name] = [
                    round(max(engine.gaps_to_best(request["prompt_token_ids"], answer)), 4)
                    for request, answer in zip(requests, given["greedy"], strict=True)
                ]
    return found


def _all_answers(llm: Any, requests: list[Any]) -> dict[str, list[list[int]]]:
    from vllm import SamplingParams

    from tests.support.engines import generated

    common = {"max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
    greedy = SamplingParams(temperature=0, **common)
    return {
        "greedy": generated(llm, requests, greedy),
        "seeded": generated(llm, requests, SamplingParams(temperature=0.8, seed=3, **common)),
        "alone": generated(llm, requests[:1], greedy),
    }


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the graphs are this process's
    name, folder = sys.argv[1:]
    print("KIND", json.dumps({"kind": name, **compare_kind(name, Path(folder) / name)}), flush=True)
