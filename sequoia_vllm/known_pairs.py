"""Published drafters of targets that people serve, for ``--speculative-config sequoia``."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from sequoia_vllm.config import ConfigError
from sequoia_vllm.drafters import MODELS_ONLY, NAMES, DrafterKind, is_head, short_name


@dataclass(frozen=True)
class KnownPair:
    """A family of targets and a drafter for them.

    Attributes:
        target: Pattern for the whole target name, case-insensitive.
        draft: Name of the drafter; ``{0}`` is the folder that the target lies in.
        note: Why this one; of a head, where its publisher or vLLM names it.
        kind: What it is.
        architecture: Of a head: what vLLM loads its publisher's format as, by the name in its
            model registry.
    """

    target: str
    draft: str
    note: str
    kind: DrafterKind = "model"
    architecture: str | None = None


@dataclass(frozen=True)
class KnownDraft:
    """What to draft with.

    Attributes:
        name: Of the checkpoint.
        kind: What it is.
        why: For the log.
    """

    name: str
    kind: DrafterKind
    why: str


# Where heads are named beside their targets.
_VLLM = "vllm-project/vllm: tests/models/registry.py"
_SPECULATORS = "vllm-project/speculators: README.md"
_EAGLE = "SafeAILab/EAGLE: README.md"
_ANGELSLIM = "Tencent/AngelSlim: README.md"
_SPECBUNDLE = "sgl-project/SpecForge: docs/community_resources/specbundle.md"
_DFLASH = "z-lab/dflash: README.md"

# Names of a target that heads were made for: also of its quantized versions, not of its base.
_LLAMA_3_1_8B = r"(.*/)?(Meta-)?Llama-3\.1-8B-Instruct(-.*)?"
_LLAMA_3_3_70B = r"(.*/)?Llama-3\.3-70B-Instruct(-.*)?"
_QWEN3 = r"(.*/)?Qwen3-{}(?!-Base)(-(?!Instruct|Thinking).*)?"
_QWEN3_2507 = r"(.*/)?Qwen3-{}-Instruct-2507(-.*)?"
_QWEN3_CODER = r"(.*/)?Qwen3-Coder-{}-Instruct(-.*)?"
_GPT_OSS = r"(.*/)?gpt-oss-{}(-.*)?"


def _eagle_3(target: str, draft: str, note: str, architecture: str) -> KnownPair:
    return KnownPair(target, draft, note, "eagle3", architecture)


def _dflash(target: str, draft: str, note: str) -> KnownPair:
    return KnownPair(target, draft, note, "dflash", "DFlashDraftModel")


# Heads in the speculators' format; with a configuration of a model; and made with SpecForge.
_OF_SPECULATORS = _OF_EAGLE = "Eagle3LlamaForCausalLM"
_OF_SPECFORGE = "LlamaForCausalLMEagle3"

# The first of several that fit a target and an engine is taken, so the preferred ones come
# first: heads made with vLLM's own library, which are served with vLLM where they are made.
EAGLE_3_HEADS = (
    _eagle_3(
        _LLAMA_3_1_8B, "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", _SPECULATORS,
        _OF_SPECULATORS,
    ),
    _eagle_3(_LLAMA_3_1_8B, "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", _VLLM, _OF_EAGLE),
    _eagle_3(
        _LLAMA_3_3_70B, "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3", _SPECULATORS,
        _OF_SPECULATORS,
    ),
    _eagle_3(_LLAMA_3_3_70B, "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", _EAGLE, _OF_EAGLE),
    _eagle_3(
        r"(.*/)?DeepSeek-R1-Distill-Llama-8B(-.*)?",
        "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B", _EAGLE, _OF_EAGLE,
    ),
    _eagle_3(
        r"(.*/)?vicuna-13b-v1\.3(-.*)?", "yuhuili/EAGLE3-Vicuna1.3-13B", _EAGLE, _OF_EAGLE
    ),
    _eagle_3(
        _QWEN3.format("1.7B"), "AngelSlim/Qwen3-1.7B_eagle3", _ANGELSLIM, _OF_SPECFORGE
    ),
    _eagle_3(_QWEN3.format("4B"), "AngelSlim/Qwen3-4B_eagle3", _ANGELSLIM, _OF_SPECFORGE),
    _eagle_3(
        _QWEN3.format("8B"), "RedHatAI/Qwen3-8B-speculator.eagle3", _SPECULATORS, _OF_SPECULATORS
    ),
    _eagle_3(_QWEN3.format("8B"), "AngelSlim/Qwen3-8B_eagle3", _VLLM, _OF_SPECFORGE),
    _eagle_3(
        _QWEN3.format("14B"), "RedHatAI/Qwen3-14B-speculator.eagle3", _SPECULATORS, _OF_SPECULATORS
    ),
    _eagle_3(_QWEN3.format("14B"), "AngelSlim/Qwen3-14B_eagle3", _ANGELSLIM, _OF_SPECFORGE),
    _eagle_3(
        _QWEN3.format("32B"), "RedHatAI/Qwen3-32B-speculator.eagle3", _SPECULATORS, _OF_SPECULATORS
    ),
    _eagle_3(_QWEN3.format("32B"), "AngelSlim/Qwen3-32B_eagle3", _ANGELSLIM, _OF_SPECFORGE),
    _eagle_3(_QWEN3.format("30B-A3B"), "AngelSlim/Qwen3-a3B_eagle3", _ANGELSLIM, _OF_SPECFORGE),
    _eagle_3(
        _QWEN3_2507.format("30B-A3B"),
        "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3", _SPECULATORS, _OF_SPECULATORS,
    ),
    _eagle_3(
        _QWEN3.format("235B-A22B"), "RedHatAI/Qwen3-235B-A22B-speculator.eagle3", _SPECULATORS,
        _OF_SPECULATORS,
    ),
    _eagle_3(
        _QWEN3_2507.format("235B-A22B"),
        "RedHatAI/Qwen3-235B-A22B-Instruct-2507-speculator.eagle3", _SPECULATORS, _OF_SPECULATORS,
    ),
    _eagle_3(
        _QWEN3_CODER.format("30B-A3B"),
        "lmsys/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct-SpecForge", _SPECBUNDLE, _OF_SPECFORGE,
    ),
    _eagle_3(
        _QWEN3_CODER.format("480B-A35B"),
        "lmsys/SGLang-EAGLE3-Qwen3-Coder-480B-A35B-Instruct-SpecForge-EigenAI", _SPECBUNDLE,
        _OF_SPECFORGE,
    ),
    _eagle_3(
        _GPT_OSS.format("20b"), "RedHatAI/gpt-oss-20b-speculator.eagle3", _SPECULATORS,
        _OF_SPECULATORS,
    ),
    _eagle_3(
        _GPT_OSS.format("120b"), "RedHatAI/gpt-oss-120b-speculator.eagle3", _SPECULATORS,
        _OF_SPECULATORS,
    ),
    _eagle_3(
        _GPT_OSS.format("120b"), "lmsys/EAGLE3-gpt-oss-120b-bf16", _SPECBUNDLE, _OF_SPECFORGE
    ),
)  # fmt: skip

DFLASH_HEADS = (
    _dflash(_LLAMA_3_1_8B, "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", _DFLASH),
    _dflash(_QWEN3.format("4B"), "z-lab/Qwen3-4B-DFlash-b16", _DFLASH),
    _dflash(_QWEN3.format("8B"), "RedHatAI/Qwen3-8B-speculator.dflash", _SPECULATORS),
    _dflash(_QWEN3.format("8B"), "z-lab/Qwen3-8B-DFlash-b16", _DFLASH),
    _dflash(_QWEN3.format("30B-A3B"), "RedHatAI/Qwen3-30B-A3B-speculator.dflash", _SPECULATORS),
    _dflash(
        _QWEN3_2507.format("30B-A3B"),
        "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash", _SPECULATORS,
    ),
    _dflash(_QWEN3_CODER.format("30B-A3B"), "z-lab/Qwen3-Coder-30B-A3B-DFlash", _DFLASH),
    _dflash(_GPT_OSS.format("20b"), "z-lab/gpt-oss-20b-DFlash", _DFLASH),
    _dflash(_GPT_OSS.format("120b"), "z-lab/gpt-oss-120b-DFlash", _DFLASH),
)  # fmt: skip

DRAFT_MODELS = (
    KnownPair(
        target=r".*Llama-2-(7|13|70)b.*",
        draft="JackFram/llama-68m",
        note="the paper's draft for Llama-2 targets",
    ),
    KnownPair(
        target=r".*vicuna-(7|13)b.*",
        draft="JackFram/llama-68m",
        note="Vicuna is a fine-tuned Llama with its tokenizer",
    ),
    KnownPair(
        target=r".*Llama-3\.[123]-(8|70|405)B.*",
        draft="meta-llama/Llama-3.2-1B-Instruct",
        note="the smallest model with Llama 3's tokenizer",
    ),
    KnownPair(
        target=r".*Qwen3-(4|8|14|32)B.*",
        draft="Qwen/Qwen3-0.6B",
        note="the smallest Qwen3 model",
    ),
    KnownPair(
        target=r"(.*/)?examples/models/target/?",
        draft="{0}/draft",
        note="the pair in this repository",
    ),
)

# Of the most tokens per second to the least, where all of them can be run: a pass of a DFlash
# head drafts any depth, and one of an EAGLE-3 head is one layer.
KNOWN_PAIRS = (*DFLASH_HEADS, *EAGLE_3_HEADS, *DRAFT_MODELS)


def known_drafts(target: str, kinds: Collection[DrafterKind] = MODELS_ONLY) -> list[KnownDraft]:
    """The drafters of this target that an engine can run, the best first.

    Args:
        target: Name or path.
        kinds: What the engine can run.

    Raises:
        ConfigError: If none is known; shows the JSON to write instead.
    """
    fitting = [pair for pair in KNOWN_PAIRS if _fits(pair, target)]
    found = [
        KnownDraft(pair.draft.format(Path(target).parent), pair.kind, _why(pair, fitting, kinds))
        for pair in fitting
        if pair.kind in kinds
    ]
    if not found:
        raise ConfigError(_none_known(target, kinds, fitting))
    return found


def _none_known(target: str, kinds: Collection[DrafterKind], others: list[KnownPair]) -> str:
    """The message where only ``others`` are known, if any."""
    wanted = " or ".join(short_name(kind) for kind in kinds)
    named = f"no {wanted} is known for the target {target!r}"
    if others:
        other = others[0]
        named += f", but {NAMES[other.kind]} ({other.draft})"
        named += (
            ", which needs vLLM's Model Runner V2 (GPUs use it)"
            if is_head(other.kind)
            else ': leave "drafter" out for it'
        )
    which = "made for it" if "model" not in kinds else "that has the same tokenizer"
    example = '--speculative-config \'{"method": "sequoia", "model": "DRAFT"}\''
    return f"{named}. Name one {which}: {example}"


def _fits(pair: KnownPair, target: str) -> bool:
    return re.fullmatch(pair.target, target, flags=re.IGNORECASE) is not None


def _why(chosen: KnownPair, fitting: list[KnownPair], kinds: Collection[DrafterKind]) -> str:
    """What it is and why; and what would be better, and does not run here."""
    words = f"{NAMES[chosen.kind]}, {chosen.note}"
    if chosen.kind != "model":
        words = f"{NAMES[chosen.kind]} made for this target ({chosen.note})"
    better = {pair.kind: pair for pair in reversed(fitting[: fitting.index(chosen)])}
    for kind, pair in better.items():
        if kind not in kinds:
            words += f"; {NAMES[kind]} exists, too ({pair.draft}): not on this runner"
    return words
