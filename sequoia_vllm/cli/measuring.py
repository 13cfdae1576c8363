"""Shared by commands that run engines or read models: options, checks, and progress."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from sequoia_vllm.cli.common import engines_print_aside, fail, note, progress_bar
from sequoia_vllm.config import ConfigError, OffloadSpec
from sequoia_vllm.drafters.registry import DRAFTERS, Drafter, is_kind_alone, known_for
from sequoia_vllm.hardware.models import published_shape
from sequoia_vllm.hardware.support import Kind, Role, kinds_of
from sequoia_vllm.json_input import read_json
from sequoia_vllm.measuring.engines import EngineSpec, compare_models, load_config
from sequoia_vllm.measuring.interrupts import engines_end_here, exit_code
from sequoia_vllm.model_source import (
    GIVE_FOLDER,
    folder_problem,
    hub_problem,
    name_problem,
    weight_names,
)

TargetOption = Annotated[str, typer.Option("--model", help="Target model, name or path.")]
DraftOption = Annotated[
    str,
    typer.Option(
        "--draft-model",
        help="Draft model or head, name or path; mtp, the target's own layer; or lookup, which "
        "drafts without one. None: the known one, or else mtp where GPUs have it, or else lookup.",
    ),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        help='Prompts: .jsonl with {"prompt": ...} or {"messages": ...} per line, or .txt with one '
        "per line; none: a built-in set of 64."
    ),
]
_DTYPES = ("auto", "float32", "float", "bfloat16", "float16", "half")


def _known_dtype(dtype: str) -> str:
    if dtype not in _DTYPES:
        fail(f"--dtype {dtype!r}: give one of {', '.join(_DTYPES)}")
    return dtype


DtypeOption = Annotated[str, typer.Option(help="vLLM's dtype.", callback=_known_dtype)]
TensorParallelOption = Annotated[int, typer.Option(min=1, help="Devices the target is split over.")]
EagerOption = Annotated[bool, typer.Option("--eager", help="Do not compile: starts faster.")]
CacheOption = Annotated[
    float, typer.Option("--kv-cache-gib", min=0, help="KV cache of each engine, GiB.")
]
OffloadDirectoryOption = Annotated[
    Path | None,
    typer.Option(
        help="Read the target's layers from a disk in every pass, in this directory (CPUs)."
    ),
]
OffloadMemoryOption = Annotated[
    float, typer.Option(min=0, help="GiB of layers that stay in memory, with --offload-directory.")
]
_LEVEL, _QUIET = "VLLM_LOGGING_LEVEL", "ERROR"
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def quiet_engines() -> None:
    """Makes engines log only errors, unless the user set a level; call it before importing vLLM."""
    os.environ.setdefault(_LEVEL, _QUIET)
    if os.environ[_LEVEL] == _QUIET:
        logging.getLogger("vllm").setLevel(logging.ERROR)  # vLLM reads the variable later
        warnings.simplefilter("ignore")


@contextmanager
def measuring(description: str, if_interrupted: str) -> Iterator[Callable[[str, int, int], None]]:
    """Shows a progress bar while engines run, and keeps their output aside. Ctrl-C and SIGTERM end
    it within ten seconds, with the note ``if_interrupted``. No engine ever stays behind."""
    try:
        with (
            engines_print_aside(shown=os.environ.get(_LEVEL) != _QUIET),
            engines_end_here(),
            progress_bar(description) as report,
        ):
            yield report
    except KeyboardInterrupt as interrupt:
        note(if_interrupted)
        raise typer.Exit(exit_code(interrupt)) from None


def draft_to_measure(target: str) -> str:
    """The draft of an engine for which none is named, as engines take it: where none is known, the
    target's own layer, or else one without weights."""
    own = _layer_by_default(target)
    if own is not None and _runs_here(own):
        note(
            f"no draft that engines take by default is known for {target!r}: measuring {own.kind}, "
            f"{own.name} of its own"
        )
        return own.kind
    found = known_draft(target)
    if found is None:
        found = next(kind.kind for kind in DRAFTERS.values() if not kind.has_weights)
        note(
            f"no draft model is known for {target!r}: measuring {found}, which drafts without one "
            "(--draft-model names one)"
        )
    return found


def known_draft(target: str, heads: bool | None = None) -> str | None:
    """The draft that is known for a target, if any; kinds that are taken by default come first.
    ``heads``: whether the device runs heads; None: this machine's engines say so."""
    pairs = known_for(target)
    if heads is None and any(kind.is_head for kind, _ in pairs):
        from sequoia_vllm.engine.frontend.drafts import kinds_here

        heads = any(kind.is_head for kind in kinds_here())
    usable = [pair for pair in pairs if heads or not pair[0].is_head]
    usable.sort(key=lambda pair: not pair[0].by_default)
    named = [(kind, known.name_for(target)) for kind, known in usable]
    found: str | None = named[0][1] if named else None
    unread = []
    for kind, name in named:
        # Engines pass over a head whose configuration is not at hand.
        with suppress(ConfigError):
            if not kind.is_head or read_config("draft", name):
                found = name
                break
        unread += [name] if kind.by_default else []
    if unread:
        note(f"engines that can read {unread[0]} draft with it; here it cannot be read")
    return found


def own_layer(target: str) -> Drafter | None:
    """The kind of layers that draft by default in the target's own checkpoint; None: others first.
    It refuses a target whose configuration is not available."""
    if not Path(target).exists() and published_shape(target):
        return None
    return _layer_by_default(target)


def _layer_by_default(target: str) -> Drafter | None:
    by_default = any(kind.by_default for kind, _ in known_for(target))
    return None if by_default else _layer_in(target)


def _layer_in(target: str) -> Drafter | None:
    """The kind of layers that draft in the target's checkpoint, by its configuration and weights.
    It refuses a target whose configuration is not available."""
    config = read_config("target", target)
    kind = next((kind for kind in DRAFTERS.values() if kind.lies_in(config)), None)
    weights = weight_names(target) if kind else None
    if kind is None or weights is None:
        return kind
    layers = int((config.get("text_config") or config)["num_hidden_layers"])
    return kind if any(kind.is_own_weight(name, layers) for name in weights) else None


def is_targets_own(draft: str) -> bool:
    """Whether a draft's name is that of a kind of layers in the target's own checkpoint."""
    return draft in DRAFTERS and DRAFTERS[draft].is_targets_own


def _runs_here(kind: Drafter) -> bool:
    from sequoia_vllm.engine.frontend.drafts import kinds_here

    return kind in kinds_here()


def _check_own(target: str, kind: Drafter) -> None:
    """Refuses a target without layers of this kind, and a process whose engines cannot run them."""
    if not _runs_here(kind):
        raise ConfigError(
            f"--draft-model {kind.kind}: {kind.name} needs vLLM's Model Runner V2, which GPUs use: "
            "measure on a GPU, or leave --draft-model out for what engines take here"
        )
    if _layer_in(target) is not kind:
        raise ConfigError(
            f"--draft-model {kind.kind}: {target!r} has no {kind.short_name} that trees draft "
            "with, or no weights of it: leave --draft-model out, or name a draft model or a head"
        )


def check_models(target: str, draft: str) -> None:
    """Refuses, before any engine starts, models that do not exist or share too few tokens, and a
    layer that the target has not. A draft without weights fits every target."""
    has_weights = not is_kind_alone(draft)
    models = {"target": target} | ({"draft": draft} if has_weights else {})
    for role, model in models.items():
        check_name(role, model)
    if is_targets_own(draft):
        _check_own(target, DRAFTERS[draft])

    for model in models.values():
        load_config(model)
    if has_weights and (found := compare_models(target, draft)).matching is not None:
        note(found.in_words)


def check_name(role: str, model: str) -> None:
    """Refuses a model that is neither a folder here nor on the Hub, nor in the Hub's cache.
    The Hub is asked once, without retries."""
    problem = folder_problem(role, model)
    if problem is None and not Path(model).exists() and model.count("/") != 1:
        problem = f"the {role} {model!r} is no folder here, and a name on the Hub is OWNER/NAME: "
        problem += GIVE_FOLDER
    if problem := problem or name_problem(role, model):
        raise ConfigError(problem)


def engine_spec(options: dict[str, Any]) -> EngineSpec:
    """The engines that a command's options describe."""
    directory, offload = options["offload_directory"], None
    if directory is not None:
        memory_gib = options["offload_memory_gib"]
        offload = OffloadSpec(directory=directory.absolute(), memory_gib=memory_gib)
    return EngineSpec(
        options["target"], options["draft"], dtype=options["dtype"], enforce_eager=options["eager"],
        tensor_parallel_size=options.get("tensor_parallel_size", 1),
        kv_cache_gib=options["kv_cache_gib"], offload=offload,
    )  # fmt: skip


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Parses a list like ``1,2,4``."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        fail(f"{option} {text!r}: give whole numbers separated by commas, like 1,2,4")


def check_output(option: str, path: Path | None) -> None:
    """Fails before measuring if the output could not be written."""
    if path is not None and not path.absolute().parent.is_dir():
        fail(f"{option} {path}: there is no directory {path.parent}")
    if path is not None and path.is_dir():
        fail(f"{option} {path} is a directory: name a file")


def read_config(role: Role, model: str) -> Mapping[str, Any]:
    """A model's ``config.json``, in its folder or downloaded.
    It refuses one that is not available, or not what it should be."""
    check_name(role, model)
    file = Path(model, "config.json")
    if not Path(model).exists():
        from huggingface_hub import hf_hub_download

        try:
            file = Path(hf_hub_download(model, "config.json"))
        except Exception as error:  # its type depends on the HTTP library
            raise ConfigError(f"the {role}: {hub_problem(model, error)}") from error
    config = read_json(file, "configuration", ConfigError)
    if not isinstance(config, dict):
        raise ConfigError(f"configuration file {file} is no JSON object: is it the right one?")
    return config


def kinds_and_classes(role: Role, model: str) -> tuple[set[Kind], list[str]]:
    """The kinds of model that trees do not serve, and vLLM's classes of a model; of published
    shapes none, without reading. It refuses a model whose configuration is not available."""
    if not Path(model).exists() and published_shape(model) is not None:
        return set(), []
    config = read_config(role, model)
    return kinds_of(config), [str(name) for name in config.get("architectures") or ()]
