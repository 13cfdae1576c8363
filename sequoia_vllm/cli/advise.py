"""``sequoia-vllm advise``: predicts whether drafting pays for a model on a device."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sequoia_vllm.cli.common import console, counted, friendly_errors, new_table, print_json
from sequoia_vllm.cli.measuring import JsonOption, known_draft, numbers
from sequoia_vllm.cli.model_files import read_config, unsupported_kinds
from sequoia_vllm.cli.tree.named import this_device_name
from sequoia_vllm.config import ConfigError
from sequoia_vllm.drafters.fields import Fields, ShapeError
from sequoia_vllm.drafters.recognition import recognise
from sequoia_vllm.drafters.speculators import without_format
from sequoia_vllm.hardware.cost import check_batch_sizes
from sequoia_vllm.hardware.device import identify
from sequoia_vllm.hardware.model_config import read_shape
from sequoia_vllm.hardware.models import ModelShape, published_shape
from sequoia_vllm.hardware.support import Role, refusal
from sequoia_vllm.library.advice import Advice, advise_pair
from sequoia_vllm.library.pair_key import PairKey


def advise(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Target model, name or path.", show_default=False),
    ],
    draft_model: Annotated[
        str | None, typer.Option(help="Draft model, name or path; none: the known one.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device: h100, or the driver's name for it; none: this one.")
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Requests at once.")] = "1,8,32",
    as_json: JsonOption = False,
) -> None:
    """Predict whether drafting pays: plain decoding, the best chain and the engine's tree.

    It reads only configurations, no weights. It uses measurements of the pair where there are
    any, and else the device's datasheet. To measure instead: `sequoia-vllm tune`, then `bench`.
    """
    with friendly_errors():
        sizes = check_batch_sizes(list(numbers("--batch-sizes", batch_sizes)))
        _check_support("target", model)
        here = device or this_device_name()
        target, dtype = _read("target", model)
        on_gpu = identify(here).spec is not None  # heads run there alone
        draft = draft_model or known_draft(model, heads=on_gpu)
        _check_support("draft", draft)
        pair = PairKey(here, model, draft, dtype)
        advice = advise_pair(pair, target, _read("draft", draft)[0], sizes)
    if as_json:
        said = {"command": advice.command, "conclusion": advice.conclusion}
        print_json(asdict(advice) | said)
    else:
        _print(advice)


def _check_support(role: Role, model: str) -> None:
    """Checks whether trees serve a model, as an engine does before anything else.

    Raises:
        ConfigError: They do not; with the engine's own words.
    """
    if message := refusal(model, role, unsupported_kinds(role, model)):
        raise ConfigError(message)


def _read(role: Role, model: str) -> tuple[ModelShape, str]:
    """A model's shape, and the dtype that vLLM uses by default.

    Raises:
        SequoiaError: The configuration is not available, or its model's times cannot be computed;
            the message names the fix.
    """
    if not Path(model).exists() and (shape := published_shape(model)):
        return shape, "bfloat16"
    config = without_format(read_config(role, model))
    config = config.get("text_config") or config
    found = recognise(Fields(config, model), lambda: config.get("model_type"))
    if found.kind is None:
        raise ConfigError(f"{model!r} is {found.name}, which trees do not draft with")
    try:
        shape = read_shape(config, model, kind=found.kind)
    except ShapeError as error:
        raise ConfigError(f"{error}; measure the pair instead (sequoia-vllm tune)") from error
    is_half = "float16" in (config.get("dtype"), config.get("torch_dtype"))
    return shape, "float16" if is_half else "bfloat16"


def _print(advice: Advice) -> None:
    pair = advice.pair
    devices = counted(pair.tensor_parallel_size, "device")
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
    for part in (
        f"{pair.target} with {pair.draft} on {pair.device}, {devices}, {pair.dtype}", table,
        f"times: {advice.times}", f"acceptance: {advice.acceptance}", advice.command,
        advice.conclusion,
    ):  # fmt: skip
        console().print(part, soft_wrap=True, highlight=False, markup=False)
