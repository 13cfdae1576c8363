"""Kinds of drafters: what each is called, how it is recognised, and what runs it.

A kind is one class in a folder of `sequoia_vllm.drafters`, or in a module of yours that is imported
before vLLM starts. `register` checks that it has what the engine asks for.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field

from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.installed import file_hash, find_checkout
from sequoia_vllm.json_file import FileModel


class ShapeError(SequoiaError, ValueError):
    """A configuration that says too little, or describes what the cost model does not cover."""


class Fields:
    """The fields of one configuration.

    Args:
        config: An object or mapping with Hugging Face's names (``hidden_size``).
        name: Whose it is, in messages.
    """

    def __init__(self, config: Any, name: str = "the draft") -> None:
        self.config = config
        self.name = name

    def value(self, key: str) -> Any:
        """A field; None where there is none of this name."""
        return _field(self.config, key)

    def nested(self, place: str, key: str) -> Any:
        """A field of one of the fields; None where there is none."""
        return _field(self.value(place), key)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive number.

        Raises:
            ShapeError: The field is missing and has no default, or is something else.
        """
        found = self.value(key)
        found = default if found is None else found
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            what = "has no" if found is None else f"has {found!r} as"
            raise ShapeError(f"the configuration of {self.name} {what} {key}")
        return found

    def hidden_state_layers(self) -> list[int]:
        """Layers of the target whose hidden states a head reads; empty: left to vLLM's defaults."""
        names = "eagle_aux_hidden_state_layer_ids", "dspark_target_layer_ids", "target_layer_ids"
        places = self.config, self.value("eagle_config"), self.value("dflash_config")
        found = next((f for place in places for name in names if (f := _field(place, name))), ())
        return [int(layer) for layer in found]


def _field(place: Any, key: str) -> Any:
    return place.get(key) if isinstance(place, Mapping) else getattr(place, key, None)


@dataclass(frozen=True)
class Sign:
    """Something in a configuration that tells what a checkpoint is."""

    place: Literal["architecture", "model_type", "field"]
    pattern: str
    """Pattern of the whole architecture's name, or of the whole model type, or a field's name."""
    name: str | None = None
    """What it tells, in words with an article; None: the kind that lists the sign."""
    drafts: bool = True  # whether trees draft with it
    chains: str | None = None
    """vLLM's own method for it where trees do not draft with it; None: not every vLLM that we
    support has one."""
    model_type: str | None = None  # the model type beside an architecture; None: any


_MOST_HASHED = 1 << 29  # bytes; larger files take longer than a start should, and are others


@dataclass(frozen=True)
class KnownDrafter:
    """A published drafter for a family of targets."""

    target: str  # pattern for the whole target name, case-insensitive
    draft: str  # its name; ``{0}`` is the target's folder, ``{1}`` the checkout of this repository
    note: str  # why this one; for a head, where its publisher or vLLM names it
    architecture: str | None = None
    """For a head: what vLLM loads its publisher's format as, by the name in its model registry."""
    target_sha256: str | None = None  # of the target's ``model.safetensors``, in any folder

    def name_for(self, target: str) -> str:
        """The drafter's name or path, for a target of this name or path."""
        return self.draft.format(Path(target).parent, find_checkout())

    def fits(self, target: str) -> bool:
        """Whether it is for this target, by its name, path or weights; and is there."""
        if "{1}" in self.draft and not Path(self.name_for(target), "config.json").is_file():
            return False
        if re.fullmatch(self.target, target, flags=re.IGNORECASE):
            return True
        weights = Path(target, "model.safetensors")
        return (
            self.target_sha256 is not None
            and weights.is_file()
            and weights.stat().st_size <= _MOST_HASHED
            and file_hash(weights) == self.target_sha256
        )


class Drafter:
    """One kind of drafter. Subclasses say how it differs from a draft model."""

    kind: ClassVar[str]  # what users write as ``"drafter"``
    name: ClassVar[str]  # the kind in words, with an article
    rank: ClassVar[int]
    """Kinds are tried in this order, as drafters known for a target and to recognise one."""
    method: ClassVar[str]  # vLLM's speculative method whose loading and scheduling it takes
    on_v2: ClassVar[str]  # dotted path of what runs it on Model Runner V2, a `TreeDrafter`
    on_v2_by_architecture: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Other such classes, by the draft's architecture."""
    on_v1: ClassVar[str | None] = None
    """Dotted path of the class that runs it on the V1 runner, a `DrafterV1`; None: it needs V2."""
    signs: ClassVar[tuple[Sign, ...]] = ()  # how its configuration is recognised, in this order
    known: ClassVar[tuple[KnownDrafter, ...]] = ()  # published ones, preferred ones first
    is_head: ClassVar[bool] = True
    """Whether it runs on its target's hidden states, embedding and tokens, without a tokenizer."""
    has_weights: ClassVar[bool] = True
    """Whether there is a checkpoint of it. If not, it drafts from text for any target
    (`TextDrafterV1`, `TextDrafter`), and is taken where no other is known."""
    acceptance: ClassVar[tuple[tuple[float, ...], ...] | None] = None
    """Acceptance vectors by depth that its trees are made for; None: a published one."""
    in_one_pass: ClassVar[bool] = False  # whether one pass drafts all levels of a tree
    is_targets_own: ClassVar[bool] = False  # whether it is a layer of the target's own checkpoint
    verifies_adaptively: ClassVar[bool] = False  # whether vLLM has adaptive verification for it
    ran_on: ClassVar[str | None] = "a GPU"
    """The GPU on which speed with trained weights was measured; None: none."""
    layers: ClassVar[int | None] = None  # number of layers; None: what its configuration says
    speculators: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """vLLM's architectures, by their names in the format of vllm-project/speculators."""
    may_look_like_model: ClassVar[bool] = False
    """Whether some have the configuration of a model: users name the kind."""

    @property
    def short_name(self) -> str:
        """The name without its article."""
        return self.name.partition(" ")[2]

    @property
    def by_default(self) -> bool:
        """Whether a known one is taken where the user names no kind and no draft."""
        return self.has_weights and (not self.is_head or self.ran_on is not None)

    def look_alike(self, config: Fields) -> tuple[Sign, str] | None:
        """What looks like this kind and is something else: with the field that says so."""
        return None

    def problem(self, config: Fields) -> str | None:
        """A part of it that neither trees nor vLLM's chains run; None: there is none."""
        return None

    def complete(self, config: Any) -> None:
        """Says in a loaded configuration what vLLM reads under another name; in place."""

    def target_problem(self, target: Any, layers: Any) -> str | None:
        """The reason why a target's own layers do not draft trees; None: they do."""
        return None

    def lies_in(self, target: Mapping[str, Any]) -> bool:
        """Whether a target's ``config.json`` says that its checkpoint has one which drafts."""
        return False

    def is_own_weight(self, name: str, layers: int) -> bool:
        """Whether a weight of a checkpoint is of its layer.

        Args:
            name: The weight's name.
            layers: Number of the target's own layers.
        """
        return True

    def levels(self, config: Fields) -> int | None:
        """Levels of the deepest tree that it drafts; None: any number."""
        return None

    def head_shape(self, config: Fields) -> "HeadShape | None":
        """The parts of a head besides its layers; None for a draft model.

        Raises:
            ShapeError: The configuration says too little.
        """
        return None

    def input_parameters(self, shape: Any) -> int:
        """Parameters that its layers have beyond a model's of this `ModelShape`."""
        return 0

    def on_v2_for(self, architectures: list[str]) -> str:
        """`on_v2` for a checkpoint of these architectures."""
        others = self.on_v2_by_architecture
        return next((others[name] for name in architectures if name in others), self.on_v2)


DRAFTERS: dict[str, Drafter] = {}
"""All kinds by name, in the order of `Drafter.rank`."""

AnyDrafter = TypeVar("AnyDrafter", bound=type[Drafter])


def register(found: AnyDrafter) -> AnyDrafter:
    """Adds a kind of drafters; a decorator of its class.

    Raises:
        TypeError: The class lacks something that the engine asks for, or has it wrong.
    """
    if problems := _problems(found):
        raise TypeError(f"drafter {found.__name__}: {'; '.join(problems)}")
    in_order = sorted([*DRAFTERS.values(), found()], key=lambda each: (each.rank, each.kind))
    DRAFTERS.clear()
    DRAFTERS.update({drafter.kind: drafter for drafter in in_order})
    return found


def drafter(kind: str) -> Drafter:
    """The drafter of this kind.

    Raises:
        ValueError: There is none; the message lists the kinds.
    """
    if kind not in DRAFTERS:
        *others, last = map(repr, DRAFTERS)
        raise ValueError(f"Input should be {', '.join(others)} or {last}")
    return DRAFTERS[kind]


def drafts_from_text(draft: str) -> bool:
    """Whether a draft's name is that of a kind without weights."""
    return draft in DRAFTERS and not DRAFTERS[draft].has_weights


def is_kind_alone(draft: str) -> bool:
    """Whether a draft's name is that of a kind without a checkpoint of its own: without weights, or
    a layer of the target's."""
    kind = DRAFTERS.get(draft)
    return kind is not None and (kind.is_targets_own or not kind.has_weights)


def draft_option(draft: str) -> dict[str, str]:
    """What ``--speculative-config`` says of a draft: its model, or its kind (`is_kind_alone`)."""
    return {"drafter" if is_kind_alone(draft) else "model": draft}


def known_for(target: str) -> list[tuple[Drafter, KnownDrafter]]:
    """Published drafters of a target, by its name, path or weights; the best first."""
    every = [(kind, known) for kind in DRAFTERS.values() for known in kind.known]
    return [(kind, known) for kind, known in every if known.fits(target)]


DrafterKind = Annotated[str, AfterValidator(lambda kind: drafter(kind).kind)]
"""Name of a registered kind; pydantic refuses others."""


class HeadShape(FileModel):
    """Matrices of a head that a draft model does not have.

    A matrix takes the target's hidden states to the head's width when committed tokens are read,
    vLLM's ``fc``, whole on each device. MTP layers have none. The embedding is the target's.
    """

    kind: DrafterKind
    reads: int = Field(
        ge=0,
        description="Width of what it reads of the target for one token, the hidden states of "
        "some layers side by side; 0: one hidden state, as it is.",
    )
    output_vocab: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of its own output matrix; none: it uses the target's.",
    )
    levels: int | None = Field(
        default=None, ge=1, description="Most levels that it drafts; none: any number."
    )


def drafts_in_one_pass(head: HeadShape | None) -> bool:
    """Whether a draft with this head drafts all levels of a tree in the step's first pass."""
    return head is not None and drafter(head.kind).in_one_pass


def _problems(found: type[Drafter]) -> list[str]:
    """Lists what a class lacks, or has in another form than the engine needs."""
    surface = {name for name in (*vars(Drafter), *Drafter.__annotations__) if name[0] != "_"}
    problems = []
    for name in {name for cls in found.__mro__[:-1] for name in vars(cls) if name[0] != "_"}:
        if name not in surface:
            near = difflib.get_close_matches(name, surface, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            problems.append(f"the engine asks for no {name}{hint}")
    missing = [name for name in Drafter.__annotations__ if not hasattr(found, name)]
    if missing:
        return sorted([*problems, *(f"{name} is missing" for name in missing)])
    for name, asked in vars(Drafter).items():
        if isinstance(asked, FunctionType) and name[0] != "_":
            given, parameters = getattr(found, name), list(signature(asked).parameters)
            if not callable(given) or list(signature(given).parameters) != parameters:
                problems.append(f"{name} is no method of ({', '.join(parameters)})")
    if found.kind in DRAFTERS and type(DRAFTERS[found.kind]) is not found:
        problems.append(f"there is a kind {found.kind!r} already")
    problems += [
        f"{path!r} is no dotted path of a class"
        for path in (found.on_v2, *found.on_v2_by_architecture.values(), found.on_v1 or found.on_v2)
        if not re.fullmatch(r"\w+(\.\w+)+", path)
    ]
    if " " not in found.name:
        problems.append(f"the name {found.name!r} has no article")
    if not found.is_head and (found.in_one_pass or found.is_targets_own):
        problems.append("only heads draft in one pass or are the target's own")
    for pattern in (*(s.pattern for s in found.signs), *(k.target for k in found.known)):
        re.compile(pattern)
    return sorted(problems)
