"""Reads drafts as vLLM will: of what kind they are, and whether they fit the target."""

import logging
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

from pydantic import ValidationError
from vllm import envs
from vllm.config.speculative import SpeculativeConfig
from vllm.platforms import current_platform
from vllm.transformers_utils.config import get_config, get_hf_text_config
from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

from sequoia_vllm.config import ConfigError, SequoiaConfig
from sequoia_vllm.drafters import recognition
from sequoia_vllm.drafters.recognition import Recognised, target_differences
from sequoia_vllm.drafters.registry import DRAFTERS, Drafter, Fields, ShapeError, drafter
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.hardware.model_config import read_shape
from sequoia_vllm.hardware.models import ModelShape
from sequoia_vllm.library.pair_key import PairShapes
from sequoia_vllm.model_source import hub_problem, name_problem, weight_names

logger = logging.getLogger("vllm.sequoia")

# In the order in which they are looked for in vLLM's message.
_FIXES = (
    ("quantization", 'mend or leave out "quantization"'),
    ("tensor_parallel", "leave draft_tensor_parallel_size out: it is the target's"),
)
_UNREADABLE = (OSError, ValueError, RuntimeError)
"""Errors of a configuration that cannot be read. vLLM reads it again, and says what is wrong."""


class DraftReader:
    """Reads the configurations of the drafts that one engine may take, each once.

    vLLM makes its configuration of the draft only later, when it must know the number of drafts.
    """

    def __init__(self, target: Any, config: SequoiaConfig) -> None:
        self.target = target
        self.config = config
        self._found: dict[str, Any] = {}

    def read(self, draft: str) -> Any:
        """Reads a draft's configuration like vLLM; not to be changed. May fail (`_UNREADABLE`)."""
        if draft not in self._found:
            try:
                self._found[draft] = self._read(draft)
            except _UNREADABLE as error:
                self._found[draft] = error
        if isinstance(found := self._found[draft], Exception):
            raise found
        return found

    def _read(self, draft: str) -> Any:
        target, keys = self.target, self.config.draft_keys()
        overrides = target.hf_overrides
        found = get_config(
            draft,
            target.trust_remote_code,
            keys.get("revision"),
            keys.get("code_revision"),
            target.config_format,
            None,
            overrides if callable(overrides) else None,
        )
        if isinstance(found, SpeculatorsConfig):
            # vLLM keeps the fields that it needs: not a DFlash head's number of levels.
            stated, _ = SpeculatorsConfig.get_config_dict(draft, revision=keys.get("revision"))
            found.block_size = stated.get("block_size")
        return found

    def kind(self, draft: str) -> Drafter:
        """The kind of a checkpoint; its path does not matter.

        Raises:
            ConfigError: Trees do not draft with it, ``"drafter"`` says another kind, it is another
                target's head, the target's own layers do not draft trees, or the Hub does not give
                it.
        """
        given = None if self.config.drafter is None else drafter(self.config.drafter)
        if given is not None and given.is_targets_own:
            if problem := self._problem_of_own(given):
                raise ConfigError(
                    f'"drafter": "{given.kind}": {self.target.model} {problem}: give "model" an '
                    "EAGLE-3 or DFlash head or a draft model that was made for it"
                )
            return given
        # vLLM would ask the Hub again and again, for minutes.
        if problem := name_problem("draft", draft, self.config.revision):
            raise ConfigError(problem)
        try:
            config = self.read(draft)
            found = recognise(config)
        except _UNREADABLE:
            return given or DRAFTERS["model"]
        kind = _agreed(found, draft, given)
        if kind.is_head:
            _check_head(kind, Fields(config), draft, self.target)
        return kind

    def own_layer(self) -> Drafter | None:
        """The kind of layer in the target's own checkpoint that drafts trees; None: it has none."""
        stated = self.target.hf_config.to_dict()
        for kind in DRAFTERS.values():
            if not kind.lies_in(stated):
                continue
            problem = self._problem_of_own(kind)
            if problem is None:
                return kind
            model = self.target.model
            logger.info("Sequoia: the target does not draft for itself: %s %s", model, problem)
        return None

    def _problem_of_own(self, kind: Drafter) -> str | None:
        target = self.target
        layers = SpeculativeConfig.hf_config_override(deepcopy(target.hf_config))
        if problem := kind.target_problem(target, layers):
            return problem
        weights = weight_names(target.model, target.revision)
        number = target.hf_config.get_text_config().num_hidden_layers
        if weights is None or any(kind.is_own_weight(name, number) for name in weights):
            return None
        return f"names {kind.name} in its configuration, and has no weights of it"

    def levels(self, draft: str, kind: Drafter) -> int | None:
        """Levels of the deepest tree that this draft drafts; None: any number."""
        if not kind.in_one_pass:
            return None
        try:
            return kind.levels(Fields(self.read(draft)))
        except _UNREADABLE:
            return None

    def shapes(self, draft: str, kind: Drafter, has_fp8_cache: bool = False) -> PairShapes:
        """Shapes of the target and of this draft, and which of them are not known."""
        problems: list[str] = []
        cache = {"kv_value_bytes": 1.0} if has_fp8_cache else {}
        target, quantization = self.target, self.config.draft_keys().get("quantization")

        def found(shape: Callable[[], ModelShape]) -> ModelShape | None:
            try:
                return shape().model_copy(update=cache)
            except ShapeError as error:
                problems.append(str(error))
                return None

        return PairShapes(
            target=found(
                partial(read_shape, target.hf_text_config, target.model, target.quantization)
            ),
            draft=found(
                lambda: read_shape(self._text_config(draft), draft, quantization, kind.kind)
            ),
            head=kind.kind if kind.is_head else None,
            problem="; ".join(problems) or None,
        )

    def _text_config(self, draft: str) -> Any:
        try:
            return get_hf_text_config(self.read(draft))
        except _UNREADABLE as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise ShapeError(f"cannot read the configuration of {draft}: {first}") from error


def recognise(config: Any) -> Recognised:
    """Recognises a checkpoint by its configuration, read like vLLM."""

    def read_as() -> str | None:
        if not getattr(config, "architectures", None):
            return getattr(config, "model_type", None)
        return SpeculativeConfig.hf_config_override(deepcopy(config)).model_type

    return recognition.recognise(Fields(config), read_as)


def drafted_levels(config: Any) -> int | None:
    """Levels of the deepest tree that a draft of this configuration drafts; None: any number."""
    kind = recognise(config).kind
    return None if kind is None else drafter(kind).levels(Fields(config))


def head_shape(vllm_config: Any) -> ModelShape | None:
    """The shape of an engine's head; None: its draft is a model.

    Raises:
        ShapeError: Its configuration says too little.
    """
    kind = drafter(SequoiaSettings.of(vllm_config).drafter)
    if not kind.is_head:
        return None
    draft = vllm_config.speculative_config.draft_model_config
    if kind.is_targets_own:  # vLLM reads the target's as one without the target's layers
        draft = vllm_config.model_config
    return read_shape(draft.hf_text_config, draft.model, draft.quantization, kind.kind)


def runs_v2() -> bool:
    """Whether an engine of this process takes Model Runner V2, before its options are known."""
    chosen = envs.VLLM_USE_V2_MODEL_RUNNER
    return current_platform.is_cuda() if chosen is None else chosen


def kinds_here() -> list[Drafter]:
    """Kinds that an engine of this process can draft with, before its options are known."""
    on_v2 = runs_v2()
    return [kind for kind in DRAFTERS.values() if on_v2 or kind.on_v1]


def check_method(kind: Drafter, draft: str, method: str) -> None:
    """Refuses a draft that vLLM, which also looks at names, takes for another kind."""
    if method == kind.method:
        return
    fix = 'put it into a folder without "eagle-", "eagle3", "dflash" and "dspark" in its path'
    if not kind.is_head:
        fix = (
            f'if it is a draft model, {fix}; if it is an EAGLE-3 head, give "drafter": "eagle3", '
            "as its configuration does not say so; trees draft with no other heads"
        )
    raise ConfigError(
        f"vLLM takes {draft!r} for a drafter of its method {method!r} by its name: {fix}"
    )


def draft_problem(draft: str, error: Exception) -> str:
    """Turns vLLM's error about a draft into one line that names the draft and the fix."""
    said = str(error)
    if isinstance(error, ValidationError):
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
    if "repository id" in said.lower():
        cause = error.errors()[0]["ctx"]["error"] if isinstance(error, ValidationError) else error
        return f"vLLM cannot use the draft model {draft!r}: {hub_problem(draft, cause)}"
    first = (said.strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
    fix = next(
        (fix for word, fix in _FIXES if word in first.lower()),
        'choose another "model", or mend the keys that are given for it',
    )
    return f"vLLM cannot use the draft model {draft!r}: {first}; {fix}"


def _agreed(found: Recognised, draft: str, given: Drafter | None) -> Drafter:
    """The kind that checkpoint and user name; refuses a checkpoint where they disagree."""
    sign = f" ({found.sign})" if found.sign else ""
    chains = f", or use vLLM's own method {found.method!r} for chains" if found.method else ""
    if found.kind is None:
        raise ConfigError(
            f'{draft!r} is {found.name}{sign}, which trees do not draft with: give "model" an '
            f"EAGLE-3 head or a draft model{chains}"
        )
    kind = drafter(found.kind)
    if given is None or given is kind:
        return kind
    if found.sign is None and given.may_look_like_model:
        return given
    said = found.name if found.sign else "a model by its configuration"
    raise ConfigError(
        f'"drafter" is "{given.kind}", but {draft!r} is {said}{sign}: leave "drafter" out, or give '
        f'"model" {given.name}'
    )


def _check_head(kind: Drafter, head: Fields, draft: str, target: Any) -> None:
    """Refuses a head for another target, or one that drafts unlike its kind."""
    if differences := target_differences(head, Fields(target.hf_text_config, target.model)):
        raise ConfigError(
            f"{draft!r} is {kind.name} made for another target than {target.model!r}: "
            f'{"; ".join(differences)}. Give "model" one that was trained for this target, or a '
            "draft model"
        )
    if problem := kind.problem(head):
        raise ConfigError(
            f"{draft!r} is {kind.name} that {problem}, which neither trees nor vLLM's chains "
            'draft with: give "model" another head or a draft model'
        )
