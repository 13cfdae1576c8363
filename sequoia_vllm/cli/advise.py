"""``sequoia-vllm advise``: predicts whether drafting pays for a model on a device."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sequoia_vllm.cli import measuring as shared
from sequoia_vllm.cli.common import (
    console,
    counted,
    friendly_errors,
    new_table,
    note,
    print_json,
)
from sequoia_vllm.config import AUTO, ConfigError, SequoiaConfig
from sequoia_vllm.drafters.recognition import recognise, without_format
from sequoia_vllm.drafters.registry import (
    Drafter,
    DrafterKind,
    Fields,
    ShapeError,
    drafter,
    drafts_from_text,
    known_for,
)
from sequoia_vllm.engine.frontend.plan import plan
from sequoia_vllm.engine.frontend.tree_choice import Facts, look_up
from sequoia_vllm.hardware.budget import drafts_by_batch
from sequoia_vllm.hardware.choose import choose_tree
from sequoia_vllm.hardware.cost import CostModel, check_batch_sizes
from sequoia_vllm.hardware.device import (
    Device,
    DeviceError,
    DeviceSpec,
    identify,
    known_devices,
    names_near,
    this_device_name,
)
from sequoia_vllm.hardware.families import family_of, in_words, refusal_of
from sequoia_vllm.hardware.model_config import read_shape
from sequoia_vllm.hardware.models import ModelShape, published_shape
from sequoia_vllm.hardware.roofline import bytes_per_value, roofline_profile
from sequoia_vllm.hardware.step_profile import HOW_TIMED, Profile
from sequoia_vllm.hardware.support import NOT_ON_CPUS, RUNS_ON, Role
from sequoia_vllm.library.files import LibraryError, TreeEntry
from sequoia_vllm.library.pair_key import PairKey, PairShapes
from sequoia_vllm.library.tree_library import TreeLibrary
from sequoia_vllm.tree import MOST_RECURRENT_NODES, Acceptance

_LONGEST_CHAIN = 8  # drafts, as in `bench`
_DEVICES = (1, 2, 4, 8)
# Share of the devices' memory for the weights of both models. The KV cache gets the rest.
_MOST_WEIGHTS = 0.8


@dataclass(frozen=True)
class BatchAdvice:
    """What is expected at one batch size."""

    batch_size: int
    plain_tokens_per_second: float  # of all requests together
    chain_drafts: int  # those of the best chain; 0: none is faster than plain decoding
    chain_speedup: float
    tree_nodes: int  # what the engine drafts of its tree, root included; 1: it does not draft
    tree_depth: int
    tree_speedup: float
    measured: bool  # whether times and acceptance were measured here, for such batches and trees


@dataclass(frozen=True)
class Advice:
    """What to expect of a pair on a device."""

    pair: PairKey
    batches: list[BatchAdvice]
    times: str
    acceptance: str
    own: str | None  # kind of the draft, if it is a part of the target's own checkpoint
    devices: str | None  # why several devices are needed; None: one holds the weights

    @property
    def command(self) -> str:
        """The command that serves the target: with the draft, if it pays anywhere."""
        pair, config = self.pair, None
        if any(batch.tree_nodes > 1 for batch in self.batches):
            draft = {"drafter": self.own} if self.own else {"model": pair.draft}
            config = json.dumps({"method": "sequoia", **draft})
        return _serve(pair.target, identify(pair.device), pair.tensor_parallel_size, config)

    @property
    def conclusion(self) -> str:
        """Whether it pays, in one sentence."""
        measured = all(batch.measured for batch in self.batches)
        by = f"By these {'measurements' if measured else 'predictions'} drafting"
        rests = [str(batch.batch_size) for batch in self.batches if batch.tree_nodes == 1]
        if len(rests) == len(self.batches):
            return f"{by} is slower than plain decoding here: serve without it."
        best = max(self.batches, key=lambda batch: batch.tree_speedup)
        gain = f"{by} pays: up to {best.tree_speedup:.2f}x, at batch size {best.batch_size}"
        return f"{gain}, not at {', '.join(rests)}." if rests else f"{gain}."


def _serve(target: str, device: Device, devices: int, config: str | None) -> str:
    """The command that serves a target with this speculative configuration; None: plainly."""
    words = ["vllm", "serve", target]
    if devices > 1:
        words += ["--tensor-parallel-size", str(devices)]
    if not device.has_bfloat16:
        words += ["--dtype", "float16"]
    return shlex.join([*words, *(["--speculative-config", config] if config else [])])


def advise_pair(
    pair: PairKey,
    target: ModelShape,
    draft: ModelShape,
    batch_sizes: Sequence[int],
    why_devices: str | None = None,
) -> Advice:
    """Predicts a pair's speeds from what was measured of it, or else from the datasheet.

    Args:
        pair: The models, on a device of which something is known.
        why_devices: See `Advice.devices`.

    Raises:
        SequoiaError: Nothing is known of the pair on this device.
    """
    library, device = TreeLibrary(), identify(pair.device)
    head = draft.head.kind if draft.head else None
    config = SequoiaConfig(model=pair.draft, tree=AUTO)
    found = look_up(config, pair, PairShapes(target, draft, head=head))
    if isinstance(found, LibraryError):
        raise found
    assert found is not None  # "auto" asks the library
    levels = draft.head.levels if draft.head else None
    most_nodes = MOST_RECURRENT_NODES if target.recurrent else None
    choice = plan(config, Facts(pair, drafter(head or "model"), levels, most_nodes, found)).choice
    entry, whole = found.entry, choice.tree
    if (profile := _measured_times(library, entry)) is None:
        if device.spec is None:
            raise LibraryError(f"tree {entry.name} has lost its measurements: tune the pair again")
        profile = roofline_profile(
            device.spec, target, draft, pair.dtype, pair.tensor_parallel_size
        )
    vector, context = Acceptance.of(entry.acceptance), entry.profile.context_length
    cost = CostModel(profile, context)
    is_measured = entry.acceptance_source == "measured"
    # All x86 CPUs are one device type, so a profile may be of another one.
    is_elsewhere = device.spec is None and pair.device != profile.device
    is_timed = profile.source == "measured" and not is_elsewhere
    most = whole.num_speculative_tokens
    drafts = drafts_by_batch(choice.schedule or [(1, 1, most)], most, max(batch_sizes))

    def advised(batch_size: int) -> BatchAdvice:
        chain = choose_tree(
            vector, profile, batch_size, _LONGEST_CHAIN + 1, max_branch=1, context_length=context
        )
        tree = whole.trim(drafts[batch_size - 1] + 1)
        expected = cost.estimate(tree, vector, batch_size)
        return BatchAdvice(
            batch_size, batch_size / cost.plain_seconds(batch_size),
            chain.num_speculative_tokens, cost.estimate(chain, vector, batch_size).speedup,
            tree.size, tree.depth, expected.speedup if tree.size > 1 else 1.0,
            is_measured and is_timed and not expected.extrapolated,
        )  # fmt: skip

    known = f"measured on this pair ({entry.acceptance_class})"
    return Advice(
        pair, [advised(batch_size) for batch_size in batch_sizes],
        f"{HOW_TIMED[profile.source]}: {profile.device}, {context:,} tokens of context"
        + (f"; not {pair.device}, so speeds here are predictions" if is_elsewhere else ""),
        known if is_measured else "assumed, as this pair was not measured: the weakest published "
        f"vector ({entry.acceptance_class})",
        head if head and drafter(head).is_targets_own else None, why_devices,
    )  # fmt: skip


def _device(name: str) -> Device:
    """Refuses a device of which nothing is known, or on which engines do not run."""
    device = identify(name)
    if device.id is None:
        near = " or ".join(names_near(name))
        question = f" (did you mean {near}?)" if near else ""
        known = ", ".join(known_devices())
        raise DeviceError(f"nothing is known of the device {name!r}{question}: name one of {known}")
    if device.spec is not None and device.spec.name.startswith("AMD"):
        raise DeviceError(f"Sequoia is not for this device: {RUNS_ON.format(device.spec.name)}")
    return device


def _devices_for(
    spec: DeviceSpec | None, models: Sequence[ModelShape], dtype: str, asked: int | None
) -> tuple[int, str | None]:
    """How many devices hold the weights of all models, the fewest unless so many are asked for,
    and why it is not one. It refuses models that do not fit."""
    if spec is None:  # CPUs: what was measured was measured on one
        return asked or 1, None
    needed = sum(model.weights_bytes(bytes_per_value(dtype)) for model in models)

    def fit(devices: int) -> bool:
        is_room = needed <= _MOST_WEIGHTS * devices * spec.memory_bytes
        return is_room and all(model.splits(devices) for model in models)

    fewest = next((devices for devices in _DEVICES if fit(devices)), None)
    if asked is not None and fit(asked):
        return asked, None
    few = asked or (1 if fewest else _DEVICES[-1])
    short = f"weights of {needed / 1e9:.0f} GB do not fit {counted(few, 'device')} of {spec.name}: "
    if fewest is None:
        raise LibraryError(f"{short}choose a larger device, smaller models or quantised ones")
    short += f"quantise, or use {fewest}"
    if asked is not None:
        raise LibraryError(f"{short} (--tensor-parallel-size {fewest})")
    return fewest, None if fewest == 1 else f"{short}, as here"


def _measured_times(library: TreeLibrary, entry: TreeEntry) -> Profile | None:
    """The measured times that a tree was chosen with; None: none, or they are gone."""
    if (file := entry.profile.file) is None:
        return None
    path = (library.user if entry.name.startswith("user/") else library.shipped) / file
    return Profile.load(path) if path.is_file() else None


def advise(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Target model, name or path.", show_default=False)
    ],
    draft_model: Annotated[
        str | None, typer.Option(help="Draft model, name or path; none: the known one.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device: h100, or the driver's name for it; none: this one.")
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Requests at once.")] = "1,8,32",
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(min=1, help="Devices the target is split over; none: the fewest that fit."),
    ] = None,
    as_json: shared.JsonOption = False,
) -> None:
    """Say whether trees serve a model, and predict whether drafting pays.

    It prints the model's family and known drafts, plain decoding, the best chain and the engine's
    tree. It reads only configurations, no weights. It uses measurements of the pair where there are
    any, and else the device's datasheet. To measure instead: `sequoia-vllm tune`, then `bench`.
    """
    with friendly_errors():
        sizes = check_batch_sizes(shared.numbers("--batch-sizes", batch_sizes))
        family = _check_support("target", model, shown=not as_json)
        here = _device(device or this_device_name())
        on_gpu = here.spec is not None  # some kinds run there alone
        for kind in () if on_gpu else shared.kinds_and_classes("target", model)[0]:
            if kind in NOT_ON_CPUS:
                raise ConfigError(NOT_ON_CPUS[kind])
        target, dtype = _read("target", model)
        if not here.has_bfloat16:
            dtype = "float16"
        own = shared.own_layer(model) if draft_model is None and on_gpu else None
        draft, shape = _draft_of(model, draft_model, own, on_gpu)
        models = [target, shape] if shape else [target]
        devices, why = _devices_for(here.spec, models, dtype, tensor_parallel_size)
        if shape is None:
            _say_how_without_a_draft(model, draft, family, (here, devices), as_json)
            return
        pair = PairKey(here.name, model, draft, dtype, devices)
        advice = advise_pair(pair, target, shape, sizes, why)
        if own is not None:
            note(f"no draft that engines take by default is known: {own.name} of its own drafts")
    if as_json:
        said = {"family": family, "command": advice.command, "conclusion": advice.conclusion}
        print_json(asdict(advice) | said)
    else:
        _print(advice)


def _draft_of(
    target: str, asked: str | None, own: Drafter | None, on_gpu: bool
) -> tuple[str, ModelShape | None]:
    """The draft's name and shape: the one asked for, the target's own layer, or the known one.

    Without weights there is no shape; without a known draft the name is empty, too. It refuses a
    draft that cannot be used or read.
    """
    if own is not None:
        return target, _read("target", target, own.kind)[0]
    draft = asked or shared.known_draft(target, heads=on_gpu)
    if draft is None or drafts_from_text(draft):
        return draft or "", None
    _check_support("draft", draft)
    return draft, _read("draft", draft)[0]


def _say_how_without_a_draft(
    model: str, kind: str, family: str, place: tuple[Device, int], as_json: bool
) -> None:
    """Prints the command that drafts without weights, by the kind asked for; "": by default."""
    config = json.dumps({"method": "sequoia", "drafter": kind}) if kind else "sequoia"
    command = _serve(model, *place, config)
    words = ["sequoia-vllm", "bench", "--model", model]
    measure = shlex.join([*words, *(["--draft-model", kind] if kind else [])])
    conclusion = (
        f"{'' if kind else 'No draft is known for it: '}the engine drafts without one, from the "
        "request's text. That gain depends on the text and is not predicted; to measure it: "
    )
    conclusion = f"{conclusion[0].upper()}{conclusion[1:]}{measure}"
    if as_json:
        print_json({"family": family, "batches": [], "command": command, "conclusion": conclusion})
    else:
        _print_as_written(command, conclusion)


def _check_support(role: Role, model: str, shown: bool = False) -> str:
    """A model's row in the table of families, in words, printed first if `shown`.

    It refuses, in the engine's words, a model that trees do not serve, or whose configuration
    cannot be had; the row of its name is printed before.
    """
    try:
        kinds, classes = shared.kinds_and_classes(role, model)
    except ConfigError:
        if shown and (family_of(model) or known_for(model)):
            _print_as_written(in_words(model, (), ()))
        raise
    family = in_words(model, classes, kinds)
    if shown:
        _print_as_written(family)
    if message := refusal_of(model, role, classes, kinds):
        raise ConfigError(message)
    return family


def _read(role: Role, model: str, kind: DrafterKind | None = None) -> tuple[ModelShape, str]:
    """A model's shape, or that of its draft of a kind, and the dtype that vLLM uses by default.
    It refuses a configuration that cannot be had, or from which times cannot be computed."""
    if not Path(model).exists() and (shape := published_shape(model)):
        return shape, "bfloat16"
    config = without_format(shared.read_config(role, model))
    if text := config.get("text_config"):  # how weights are quantized stands beside it
        config = {"quantization_config": config.get("quantization_config"), **text}
    found = recognise(Fields(config, model), lambda: config.get("model_type"))
    if (kind := kind or found.kind) is None:
        raise ConfigError(f"{model!r} is {found.name}, which trees do not draft with")
    try:
        shape = read_shape(config, model, kind=kind)
    except ShapeError as error:
        raise ConfigError(f"{error}; measure the pair instead (sequoia-vllm tune)") from error
    is_half = "float16" in (config.get("dtype"), config.get("torch_dtype"))
    return shape, "float16" if is_half else "bfloat16"


def _print_as_written(*parts: str | Table) -> None:
    for part in parts:
        console().print(part, soft_wrap=True, highlight=False, markup=False)


def _print(advice: Advice) -> None:
    pair = advice.pair
    devices = counted(pair.tensor_parallel_size, "device")
    draft = f"its own {drafter(advice.own).short_name}" if advice.own else pair.draft
    table = new_table("batch", "plain, tokens/s", "best chain", "tree", "basis", left=("basis",))
    for row in advice.batches:
        table.add_row(
            str(row.batch_size),
            f"{row.plain_tokens_per_second:,.0f}",
            f"{row.chain_speedup:.2f}x ({counted(row.chain_drafts, 'draft')})"
            if row.chain_drafts else "slower",
            f"{row.tree_speedup:.2f}x ({row.tree_nodes} nodes, depth {row.tree_depth})"
            if row.tree_nodes > 1 else "slower",
            "measured" if row.measured else "predicted",
        )  # fmt: skip
    why = [advice.devices] if advice.devices else []
    _print_as_written(
        f"{pair.target} with {draft} on {pair.device}, {devices}, {pair.dtype}", *why, table,
        f"times: {advice.times}", f"acceptance: {advice.acceptance}", advice.command,
        advice.conclusion,
    )  # fmt: skip
