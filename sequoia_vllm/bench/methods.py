"""Ways to decode, each with the configuration of its engine."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

from sequoia_vllm.drafters.recognition import recognise
from sequoia_vllm.drafters.registry import (
    DRAFTERS,
    Fields,
    draft_option,
    drafter,
    drafts_from_text,
    is_kind_alone,
)
from sequoia_vllm.engine.compat.contract import current_device
from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.json_input import read_json
from sequoia_vllm.library.tree_library import find_tree, is_tree_file

AUTO = "auto"
SERVED = "served"
"""The tree of ``--speculative-config sequoia``: of all its options only the draft is given."""
DRAWN, LOOKUP, TRAVERSAL, DYNAMIC = "drawn", "lookup", "traversal", "dynamic"
"""`SERVED` without retrieval, without a draft model, with another verification, and with dynamic
trees, which CPUs have by default."""
_AS_SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    SERVED: ("Sequoia", {}), DRAWN: ("Sequoia, no retrieval", {"retrieval": False}),
    LOOKUP: ("Sequoia, lookup", {"drafter": LOOKUP}),
    TRAVERSAL: ("Sequoia, traversal", {"verification": TRAVERSAL}),
    DYNAMIC: ("Sequoia, dynamic trees", {"dynamic_tree": True}),
}  # fmt: skip
_NGRAM: dict[str, Any] = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
_SHAPE = re.compile(r"(\d+)x(\d+)")
# Size assumed for a tree whose size is not known before its engine starts.
_AUTO_SIZE = 128

Sampling = tuple[str, ...]
"""How vLLM's chain draws and verifies drafts above temperature 0; empty: vLLM's default.
"probabilistic" draws from the draft's distribution instead of taking the likeliest tokens.
"block" verifies a whole chain at once instead of token by token."""

DEFAULT: Sampling = ()
_KEYS = {"probabilistic": "draft_sample_method", "block": "rejection_sample_method"}
_LENGTHS = re.compile(r"([1-9]\d*)((?:/\d+@[1-9]\d*)*)")  # 4, or 4/2@9/0@33
NGRAM, SUFFIX, ADAPTIVE, FULL = "ngram", "suffix", "adaptive", "full"
_ADAPTIVE_KEY = "enable_adaptive_verification"
ARCTIC = "arctic-inference==0.1.1"
"""The package that vLLM's suffix decoding asks for."""


class BenchError(SequoiaError, ValueError):
    """A measurement is impossible as asked for; the message names the fix."""


class Kind(StrEnum):
    """Families of methods."""

    PLAIN = "plain"
    CHAIN = "chain"
    SEQUOIA = "sequoia"


@dataclass(frozen=True)
class Method:
    """One way to decode."""

    name: str
    kind: Kind
    speculative_config: dict[str, Any] | None  # argument of ``vllm.LLM``; None: plain decoding
    most_drafts: int
    sampling: Sampling = DEFAULT
    full_graphs: bool = False  # every step in one CUDA graph, also those that read prompts

    @property
    def engine_options(self) -> dict[str, Any]:
        """Further arguments of ``vllm.LLM``."""
        full = {"compilation_config": {"cudagraph_mode": "FULL"}}
        return full if self.full_graphs else {}

    def chain_drafts(self, batch_size: int) -> int:
        """Drafts of each request of a chain, with ``batch_size`` requests (1 or more) at once."""
        ranges = (self.speculative_config or {}).get("num_speculative_tokens_per_batch_size", ())
        found = [drafts for first, _, drafts in ranges if first <= batch_size]
        return found[-1] if found else self.most_drafts


def is_known(sampling: Sampling) -> bool:
    """Whether the installed vLLM's speculative configuration has keys and values of a sampling."""
    if sampling == DEFAULT:
        return True
    from vllm.config import SpeculativeConfig

    allowed = {field.name: get_args(field.type) for field in dataclasses.fields(SpeculativeConfig)}
    return all(word in allowed.get(_KEYS.get(word, ""), ()) for word in sampling)


PLAIN = Method("plain vLLM", Kind.PLAIN, None, 0)
"""vLLM without speculation."""
PLAIN_FULL = Method("plain vLLM, full graphs", Kind.PLAIN, None, 0, full_graphs=True)
"""The same beside chains with full graphs, so that each has what the other has."""


def chain(draft: str, drafts: int, sampling: Sampling = DEFAULT) -> Method:
    """vLLM's own chain of ``drafts`` tokens, by a draft model or a head.
    A folder's ``config.json`` says which it is, and must be readable. "mtp" is the target's own
    layer; without weights, what followed the last tokens before is drafted."""
    if drafts_from_text(draft):
        return _ngram_chain(drafts)
    own = is_kind_alone(draft)
    kind, path = None, Path(draft, "config.json")
    if path.is_file():
        stated = read_json(path, "configuration", BenchError)
        kind = recognise(Fields(stated), lambda: stated.get("model_type")).kind
    config: dict[str, Any] = {
        "method": drafter(draft if own else kind or "model").method,
        **({} if own else {"model": draft}), "num_speculative_tokens": drafts,
        **{_KEYS[word]: word for word in sampling},
    }  # fmt: skip
    name = ", ".join([f"chain of {drafts}", *sampling])
    return Method(name, Kind.CHAIN, config, drafts, sampling)


def chain_of_words(draft: str, text: str) -> Method:
    """Parses a chain: its drafts, then words for how it drafts and runs.

    Args:
        draft: The draft model or head, "mtp" or "lookup".
        text: ``4``; or ``4/2@9/0@33`` (4 drafts, 2 from 9 requests at once, none from 33). Then
            ``:probabilistic``, ``:block``, ``:adaptive`` (vLLM's adaptive verification of DSpark
            heads), ``:ngram`` or ``:suffix`` (both without a draft), ``:full`` (full CUDA graphs).

    Raises:
        BenchError: There is no such chain, or this vLLM, device or draft cannot run it.
    """
    lengths, *words = text.strip().split(":")
    found, without = _LENGTHS.fullmatch(lengths), {NGRAM, SUFFIX} & {*words}
    sampling = tuple(word for word in _KEYS if word in words)
    known = {*without, FULL} if without else {*_KEYS, ADAPTIVE, FULL}
    if not found or {*words} - known or len({*words}) < len(words) or len(without) > 1:
        raise BenchError(
            f"chain {text!r}: give its length, from 1 up, and vLLM's sampling if it is not the "
            "default, like 4, 4:probabilistic or 4:probabilistic:block; or 4:ngram, 15:suffix, "
            "without a draft; or 4/2@9 for 2 drafts from 9 requests; 7:adaptive for DSpark heads; "
            ":full for full CUDA graphs"
        )
    if sampling and drafts_from_text(draft):
        raise BenchError(f"chain {text!r}: n-gram chains draw nothing; give {lengths}")
    if not is_known(sampling):
        raise BenchError(f"chain {text!r}: the installed vLLM has no such sampling; give {lengths}")
    ranges = [(1, int(found[1]))]
    ranges += [(int(b), int(a)) for a, _, b in (x.partition("@") for x in found[2].split("/")[1:])]
    if [first for first, _ in ranges] != sorted({first for first, _ in ranges}):
        raise BenchError(f"chain {text!r}: give numbers of requests from 2 up, in order")
    most = max(drafts for _, drafts in ranges)
    if without:
        one = _ngram_chain(most) if NGRAM in words else _suffix_chain(most)
    else:
        one = chain(draft, most, sampling)
    if len(ranges) > 1:
        one = _by_batch_size(one, ranges)
    if ADAPTIVE in words:
        one = _adaptive(one, text)
    return _full(one, text) if FULL in words else one


def _by_batch_size(one: Method, ranges: list[tuple[int, int]]) -> Method:
    """With vLLM's dynamic numbers of drafts, by (first batch size, drafts); the last goes on."""
    ends = [first - 1 for first, _ in ranges[1:]] + [ranges[-1][0]]
    key = [[first, end, drafts] for (first, drafts), end in zip(ranges, ends, strict=True)]
    later = ", ".join(f"{drafts} from {first} requests" for first, drafts in ranges[1:])
    config = {**(one.speculative_config or {}), "num_speculative_tokens_per_batch_size": key}
    name = one.name.replace(f"of {one.most_drafts}", f"of {ranges[0][1]}, {later}", 1)
    return replace(one, name=name, speculative_config=config)


def _adaptive(one: Method, text: str) -> Method:
    config = one.speculative_config or {}
    if config["method"] not in {x.method for x in DRAFTERS.values() if x.verifies_adaptively}:
        raise BenchError(
            f"chain {text!r}: vLLM verifies adaptively with DSpark heads alone: give the folder of "
            "one with --draft-model, or leave :adaptive out"
        )
    from vllm.config import SpeculativeConfig

    if _ADAPTIVE_KEY not in {field.name for field in dataclasses.fields(SpeculativeConfig)}:
        raise BenchError(f"chain {text!r}: the installed vLLM does not know it; leave it out")
    return replace(
        one, name=f"{one.name}, adaptive", speculative_config={**config, _ADAPTIVE_KEY: True}
    )


def _full(one: Method, text: str) -> Method:
    if current_device() != "gpu":
        raise BenchError(f"chain {text!r}: CUDA graphs need a GPU; leave :full out")
    return replace(one, name=f"{one.name}, full graphs", full_graphs=True)


def usual_chains(draft: str, temperatures: Sequence[float]) -> list[str]:
    """vLLM's chains where none is named (`chain_of_words`).
    On GPUs they draw from the draft's distribution if some requests are sampled, which accepts
    more than vLLM's default does."""
    draws = max(temperatures) > 0 and current_device() == "gpu" and not drafts_from_text(draft)
    return [f"{drafts}:probabilistic" if draws else str(drafts) for drafts in (1, 2, 4)]


def _ngram_chain(drafts: int) -> Method:
    """vLLM's drafts without a model: what followed the last tokens before."""
    method = "ngram" if current_device() == "cpu" else "ngram_gpu"
    config = {"method": method, "num_speculative_tokens": drafts, **_NGRAM}
    return Method(f"n-gram chain of {drafts}", Kind.CHAIN, config, drafts)


def _suffix_chain(drafts: int) -> Method:
    """vLLM's suffix decoding with its defaults: what followed in this text and earlier answers."""
    from vllm.utils.import_utils import has_arctic_inference

    if not has_arctic_inference():
        raise BenchError(
            f"chain '{drafts}:suffix': vLLM's suffix decoding needs Arctic Inference: pip install "
            f"{ARCTIC}"
        )
    config = {"method": "suffix", "num_speculative_tokens": drafts}
    return Method(f"suffix chain of {drafts}", Kind.CHAIN, config, drafts)


def sequoia(draft: str, tree: str) -> Method:
    """Sequoia with a tree; refuses one that there is not, or a shape that is too small.

    Args:
        tree: `SERVED`; `DRAWN`; `LOOKUP`; `TRAVERSAL`; `DYNAMIC`; "auto"; ``16x4`` (16 nodes, root
            included, at most 4 deep); a tree file (``.json``); or a name in the library.
    """
    config: dict[str, Any] = {"method": "sequoia", **draft_option(draft)}
    if tree in _AS_SERVED:
        name, keys = _AS_SERVED[tree]
        config = {"method": "sequoia", **keys} if tree == LOOKUP else config | keys
        return Method(name, Kind.SEQUOIA, config, _AUTO_SIZE - 1)
    config["tree"] = tree
    if tree == AUTO:
        return Method("Sequoia auto", Kind.SEQUOIA, config, _AUTO_SIZE - 1)
    config["adapt"] = False  # compare the whole tree: adaptation might draft a part of it
    if shape := _SHAPE.fullmatch(tree):
        size, depth = int(shape[1]), int(shape[2])
        if size < 2 or depth < 1:
            raise BenchError(f"tree {tree!r}: give at least 2 nodes and depth 1, like 16x4")
        config["tree"] = {"size": size, "depth": depth}
        return Method(f"Sequoia {tree}", Kind.SEQUOIA, config, size - 1)
    found = find_tree(tree).tree
    name = Path(tree).stem if is_tree_file(tree) else tree
    return Method(f"Sequoia {name}", Kind.SEQUOIA, config, found.num_speculative_tokens)


def methods(draft: str, chains: Sequence[str], trees: Sequence[str]) -> list[Method]:
    """Plain decoding (with full graphs, too, where a chain has them), then these chains
    (`chain_of_words`), then these trees (`sequoia`).

    Raises:
        BenchError, TreeError, LibraryError: One is not possible, or two are equal.
    """
    found = [chain_of_words(draft, text) for text in chains]
    full = [PLAIN_FULL] if any(method.full_graphs for method in found) else []
    found = [PLAIN, *full, *found, *(sequoia(draft, tree) for tree in trees)]
    for place, method in enumerate(found):
        for other in found[:place]:
            if method.name == other.name:
                raise BenchError(f"{method.name!r} is given twice: give each chain and tree once")
            same = method.speculative_config == other.speculative_config
            if same and method.full_graphs == other.full_graphs:
                raise BenchError(
                    f"{other.name!r} and {method.name!r} are the same without a draft model: give "
                    "one of the two, or a draft model with --draft-model"
                )
    return found
