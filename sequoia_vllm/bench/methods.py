"""What is compared: ways to decode, each with the configuration of its engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from sequoia_vllm.bench.chain_sampling import DEFAULT, ChainSampling, is_known
from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.library.tree_reference import find_tree, is_tree_file

AUTO = "auto"
_SHAPE = re.compile(r"(\d+)x(\d+)")
# A tree whose size is not known before its engine starts is taken to be this large.
_AUTO_SIZE = 128


class BenchError(SequoiaError, ValueError):
    """Something that cannot be measured; the message names the fix."""


class Kind(StrEnum):
    """Families of methods."""

    PLAIN = "plain"
    CHAIN = "chain"
    SEQUOIA = "sequoia"


@dataclass(frozen=True)
class Method:
    """One way to decode.

    Attributes:
        name: In tables and files.
        kind: Its family.
        speculative_config: For ``vllm.LLM``; None: plain decoding.
        most_drafts: Drafts of a request and step, at most.
        sampling: Of a chain.
    """

    name: str
    kind: Kind
    speculative_config: dict[str, Any] | None
    most_drafts: int
    sampling: ChainSampling = DEFAULT


def plain() -> Method:
    """vLLM without speculation."""
    return Method("plain vLLM", Kind.PLAIN, None, 0)


def chain(draft: str, drafts: int, sampling: ChainSampling = DEFAULT) -> Method:
    """vLLM's own speculation with a draft model: a chain of ``drafts`` tokens."""
    config: dict[str, Any] = {
        "method": "draft_model", "model": draft, "num_speculative_tokens": drafts, **sampling.keys,
    }  # fmt: skip
    name = ", ".join([f"chain of {drafts}", *sampling.words])
    return Method(name, Kind.CHAIN, config, drafts, sampling)


def chain_of_words(draft: str, text: str) -> Method:
    """A chain as it is written in options: ``4``, ``4:probabilistic``, ``4:probabilistic:block``.

    Raises:
        BenchError: If there is no such chain, or the installed vLLM has no such sampling.
    """
    length, *words = text.strip().split(":")
    sampling = ChainSampling.of_words(words)
    if not length.isdecimal() or int(length) < 1 or sampling is None:
        raise BenchError(
            f"chain {text!r}: give its length, from 1 up, and vLLM's sampling if it is not the "
            "default, like 4, 4:probabilistic or 4:probabilistic:block"
        )
    if not is_known(sampling):
        raise BenchError(f"chain {text!r}: the installed vLLM has no such sampling; give {length}")
    return chain(draft, int(length), sampling)


def sequoia(draft: str, tree: str, acceptance: Path | None = None) -> Method:
    """Sequoia with a tree.

    Args:
        draft: Draft model.
        tree: "auto"; ``16x4`` (16 nodes, root included, at most 4 deep); a
            tree file (``.json``); or a name in the library.
        acceptance: File that ``16x4`` trees are optimised for; None: a published vector.

    Raises:
        TreeError, LibraryError: If there is no such tree.
        BenchError: If a shape is too small.
    """
    config: dict[str, Any] = {"method": "sequoia", "model": draft, "tree": tree}
    if tree == AUTO:
        return Method("Sequoia auto", Kind.SEQUOIA, config, _AUTO_SIZE - 1)
    config["adapt"] = False  # what is compared is this tree
    if shape := _SHAPE.fullmatch(tree):
        size, depth = int(shape[1]), int(shape[2])
        if size < 2 or depth < 1:
            raise BenchError(f"tree {tree!r}: give at least 2 nodes and depth 1, like 16x4")
        config["tree"] = {"size": size, "depth": depth}
        if acceptance is not None:
            config["acceptance"] = str(acceptance)
        return Method(f"Sequoia {tree}", Kind.SEQUOIA, config, size - 1)
    found = find_tree(tree).tree
    name = Path(tree).stem if is_tree_file(tree) else tree
    return Method(f"Sequoia {name}", Kind.SEQUOIA, config, found.num_speculative_tokens)


def methods(
    draft: str, chains: list[str], trees: list[str], acceptance: Path | None = None
) -> list[Method]:
    """Plain decoding, then these chains (`chain_of_words`), then these trees.

    Raises:
        BenchError, TreeError, LibraryError: If one of them cannot be, or two are alike.
    """
    found = [plain(), *(chain_of_words(draft, text) for text in chains)]
    found += [sequoia(draft, tree, acceptance) for tree in trees]
    names = [method.name for method in found]
    for name in names:
        if names.count(name) > 1:
            raise BenchError(f"{name!r} is given twice: give each chain and tree once")
    return found
