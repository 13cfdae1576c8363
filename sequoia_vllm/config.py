"""What users write under ``--speculative-config``: every key, documented and checked."""

import difflib
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from sequoia_vllm.drafters.registry import DrafterKind
from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.hardware.budget import checked_ranges
from sequoia_vllm.json_input import MOST_PROBLEMS, key_name, read_json, shortened
from sequoia_vllm.library.tree_library import NamedTree, find_tree, find_vector, is_tree_file
from sequoia_vllm.tree import MOST_NODES, Acceptance, TokenTree
from sequoia_vllm.verification.methods import method_of

METHOD = "sequoia"
AUTO = "auto"
TokenIds = Annotated[list[NonNegativeInt], Field(min_length=1)]
# What pydantic calls the branches of a union in the place of a problem.
_BRANCH = re.compile(
    r"(TreeSpec|str|path|constrained-int)$|"
    r"(literal|list|json-or-python|is-instance|lax-or-strict)\[|function-"
)
MethodName = Annotated[str, AfterValidator(lambda name: method_of(name).name)]
# JSON has no tuples and no paths: all else is taken as it stands, without a conversion.
Range = Annotated[tuple[int, int, int], Field(strict=False)]
FilePath = Annotated[Path, Field(strict=False)]
Schedule = Annotated[list[Range], AfterValidator(checked_ranges)]
# By pydantic's names of problems.
_NOT_TEXT = {
    "bool_type": "Input should be true or false, without quotes",
    "int_type": "Input should be a valid integer, without quotes",
    "float_type": "Input should be a valid number, without quotes",
}


class ConfigError(SequoiaError, ValueError):
    """A Sequoia configuration that cannot be used; the message names the fix."""


class _Strict(BaseModel):
    """Refuses unknown keys by name, with the nearest valid one, and values of another type."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, data: Any) -> Any:
        names = sorted(cls.model_fields)
        for key in data if isinstance(data, dict) else ():
            if key not in names:
                near = difflib.get_close_matches(str(key)[:99], names, n=1)
                hint = (
                    f"did you mean {near[0]!r}?" if near else f"valid keys are {', '.join(names)}."
                )
                raise ValueError(f"unknown key {shortened(str(key))}: {hint}")
        return data


class TreeSpec(_Strict):
    """A tree to build when the engine starts, best for ``acceptance``."""

    size: int = Field(ge=2, le=MOST_NODES, description="Nodes, the root included: size - 1 drafts.")
    depth: int | None = Field(default=None, ge=1, le=64)
    """Most edges from the root to a leaf; none: no limit."""
    branch: int | None = Field(default=None, ge=1, le=64)
    """Most children of a node; none: no limit."""


class OffloadSpec(_Strict):
    """Where the target's layers are kept when they are not in memory (on CPUs)."""

    weights: Literal["disk"] = Field(default="disk", description="What holds them.")
    directory: FilePath
    """On a disk with room for them, best a local one that nothing else reads from. Its file has no
    name: nothing is left there however the engine ends."""
    memory_gib: float = Field(default=0.0, ge=0)
    """GiB of the first layers that stay in memory all the same."""
    buffers: int = Field(default=3, ge=2, le=64)
    """Layers in memory at once: being computed or read."""

    @property
    def name(self) -> str:
        """What trees and times of engines that offload so are kept under."""
        return f"{self.weights}-{self.memory_gib:g}gib"


class _OwnKeys(_Strict):
    """The keys that we read."""

    method: Literal["sequoia"] = Field(default="sequoia", description="Selects this plugin.")
    model: str | None = None
    """Draft model (name or path), best with the target's tokens, or a head that was trained for the
    target. None: the known one of that target, see `sequoia_vllm.drafters`."""
    drafter: DrafterKind | None = None
    """What "model" is: a "model" of its own, or an "eagle3", "dflash" or "dspark" head; or "mtp",
    where none is given, as a layer of the target's own checkpoint drafts. "lookup" drafts without a
    model from what followed before. None: recognised by the configuration of "model"; where none is
    given or known, "mtp" if the target has such a layer, or else "lookup"."""
    tree: str | TreeSpec | InstanceOf[NamedTree] | None = None
    """"auto": chosen for the device, the model pair and the batch size, which may be no speculation
    at all; the name of a library tree; a path to a tree file (.json), or what is in it ({"parents":
    [-1, 0, ...]}), for engines that start on other machines; or {"size": n, "depth": d}. None: as
    "auto", but always with some tree."""
    acceptance: list[float] | list[list[float]] | FilePath | InstanceOf[Acceptance] | None = None
    """Acceptance vector p[k] or p[d][k], a file with one, or the name of one of the library, like
    shipped, that trees are optimised for. None: a published vector."""
    num_speculative_tokens: int | None = Field(default=None, ge=1)
    """Upper bound on drafts per step: larger trees are trimmed."""
    num_speculative_tokens_per_batch_size: Schedule | None = None
    """[[first, last, drafts], ...]: drafts per step by batch size (vLLM's key), from batch size 1
    without gaps; the last range goes on. Each request drafts that prefix of the tree; 0 turns
    speculation off."""
    draft_vocabulary: PositiveInt | TokenIds | FilePath | None = None
    """The tokens that a draft model computes logits of; it drafts no others. A number keeps the
    first by the tokenizer's merges. Or give a list of the target's token ids, or a file with one.
    Levels are cheaper, and acceptance is lower. None: all tokens."""
    retrieval: bool = True
    """Where the last tokens of a request's text occurred in it before, draft what followed them
    there first, beside what the drafter predicts. It helps answers that repeat what was said:
    edits, extraction, code."""
    recycling: bool = True
    """With "lookup": draft what the target's logits said of each token before, in any request.
    False: requests learn nothing of each other, and only their own texts tell what to draft."""
    history: bool = False
    """Draft what earlier answers said, in requests of the same cache_salt and LoRA adapter that
    bring no prediction. It helps agents, which make the same calls again. Users who share a salt,
    or have none, may learn by response times that an answer was given before
    (docs/predicted-outputs.md)."""
    dynamic_tree: bool | None = None
    """Greedy requests score the nodes that are likeliest by what the draft says in this step,
    instead of a fixed topology. On CPUs they share the nodes of a step. On GPUs each has as many,
    in steps in which all requests are greedy. None: true with a draft model on vLLM's V1 runner,
    which CPUs take (docs/trees.md)."""
    verification: MethodName | None = None
    """How sampled trees are verified; output has the target's law by either. With "sequoia" by the
    paper's Algorithm 2, one decision after another. With "traversal" whole paths at once (arXiv
    2505.12398), which accepts more tokens from the same drafts. None:
    "sequoia"; on GPUs "traversal" once it has run on one here (docs/gpus.md)."""
    adapt: bool | None = None
    """While serving, draft as much of the tree as pays by what the engine measures, which may be
    nothing. It is learned for each pair and device, and kept for the next start. False: as
    configured. None: true, unless num_speculative_tokens_per_batch_size is given."""
    offload: OffloadSpec | None = None
    """On CPUs: read the target's layers from a disk in every pass, for models that do not fit in
    memory: {"weights": "disk", "directory": ..., "memory_gib": ...}. (For GPUs vLLM has
    --cpu-offload-gb and --offload-backend, from the host's memory.)"""


class SequoiaConfig(_OwnKeys):
    """``{"method": "sequoia", ...}``: our keys, and vLLM's own for the draft model."""

    quantization: str | None = Field(default=None, description="The draft's quantization.")
    revision: str | None = Field(default=None, description="The draft's revision.")
    code_revision: str | None = Field(default=None, description="The draft's code revision.")
    draft_tensor_parallel_size: int | None = Field(default=None, ge=1)
    """The draft's tensor parallel size; must be the target's."""
    max_model_len: int | None = Field(default=None, ge=1)
    """The draft's length; longer requests are not drafted for."""
    draft_load_config: dict[str, Any] | None = None
    """How the draft's weights are loaded (vLLM's LoadConfig)."""

    @field_validator("tree", mode="before")
    @classmethod
    def _inline_tree(cls, value: Any) -> Any:
        is_tree = isinstance(value, dict) and "parents" in value
        return NamedTree("given as parents", TokenTree.from_dict(value)) if is_tree else value

    @property
    def adapts(self) -> bool:
        """``adapt``, or what it stands for where it is not given."""
        if self.adapt is None:
            return self.num_speculative_tokens_per_batch_size is None
        return self.adapt

    @property
    def is_tree_chosen(self) -> bool:
        """Whether the tree is left to us: it then depends on what is known of pair and device."""
        return self.tree in (None, AUTO) and self.acceptance is None

    @classmethod
    def parse(cls, request: str | dict[str, Any]) -> Self:
        """Reads ``"sequoia"`` or the JSON object; dashes in keys count as underscores.

        Raises:
            ConfigError: A key or value is wrong; the message names each.
        """
        data = {"method": request} if isinstance(request, str) else request
        keys = [str(key).replace("-", "_") for key in data]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise ConfigError(f"{twice!r} is given twice, with dashes and with underscores")
        data = dict(zip(keys, data.values(), strict=True))
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(
                f"speculative config of method 'sequoia': {problems_of(error)}"
            ) from None

    def loaded(self) -> Self:
        """The same with the tree, acceptance vector and tokens that it names loaded.

        Raises:
            TreeError, AcceptanceError, LibraryError, ConfigError: One of these cannot be used.
        """
        tree, vector, tokens = self.tree, self.acceptance, self.draft_vocabulary
        if isinstance(tree, str) and tree != AUTO:
            # Metrics show what stands before a colon: no path of the server's.
            title = f"{Path(tree).name}: {tree}" if is_tree_file(tree) else tree
            tree = replace(find_tree(tree), title=title)
        if vector is not None and not isinstance(vector, Acceptance):
            vector = find_vector(str(vector)) if isinstance(vector, Path) else Acceptance.of(vector)
        if isinstance(tokens, Path):
            read = read_json(tokens, "draft_vocabulary", ConfigError)
            tokens = SequoiaConfig.parse({"draft_vocabulary": read}).draft_vocabulary
        update = {"tree": tree, "acceptance": vector, "draft_vocabulary": tokens}
        return self.model_copy(update=update)

    def draft_keys(self) -> dict[str, Any]:
        """The keys that are vLLM's own, as given."""
        return self.model_dump(exclude=set(_OwnKeys.model_fields), exclude_none=True)


def problems_of(error: ValidationError) -> str:
    """All problems in one line; a union's branches are reported once, by the matching branch."""
    lines: list[str] = []
    for problem in error.errors():
        if len(lines) == MOST_PROBLEMS:
            lines.append("and more")
            break
        parts = (part for part in problem["loc"] if not _BRANCH.match(str(part)))
        place = [key_name(part) for part in parts]
        if problem["type"] == "is_instance_of":
            continue  # what `loaded` puts in
        if problem["type"] == "model_type" and place == ["tree"]:
            continue  # of the tree's union; its string_type says what all of them take
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "bool_type" or isinstance(problem["input"], str):
            message = _NOT_TEXT.get(problem["type"], message)
        if problem["type"] == "model_type":
            message = "Input should be a JSON object"
        if problem["type"] == "string_type" and place == ["tree"]:
            if isinstance(problem["input"], dict):
                continue  # the problems of {"size": ...} follow
            message = (
                'Input should be "auto", a name, a path, {"parents": [...]} or '
                '{"size": n, "depth": d}'
            )
        line = f"{'.'.join(place)}: {message}" if place else message
        if line not in lines:
            lines.append(line)
    return "; ".join(lines or [str(error)])
