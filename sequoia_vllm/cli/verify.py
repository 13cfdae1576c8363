"""``sequoia-vllm verify``: checks a pair on this machine, with the options of its server."""

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Annotated, Any

import typer

from sequoia_vllm.bench.methods import BenchError, Method, chain_of_words
from sequoia_vllm.bench.verify import Verification, VerifySettings, speeds
from sequoia_vllm.cli import measuring as shared
from sequoia_vllm.cli.bench import speeds_table
from sequoia_vllm.cli.common import console, fail, friendly_errors, new_table, note, print_json
from sequoia_vllm.config import METHOD, ConfigError
from sequoia_vllm.drafters.registry import draft_option
from sequoia_vllm.prompts import encode_prompts, load_prompts, load_tokenizer
from sequoia_vllm.verifying.report import VerifyReport

FAILED, UNTOLD = 1, 3  # exit codes
_QUICK: dict[str, Any] = {"max_tokens": 24, "rounds": 1}
_CHAIN = "3"


def verify(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Target model, name or path.")],
    draft: shared.DraftOption = "",
    prompts: shared.PromptsOption = None,
    num_prompts: Annotated[int, typer.Option(min=4, help="Prompts to use.")] = 16,
    quick: Annotated[
        bool, typer.Option("--quick", help="Shorter answers, and without vLLM's chain.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the JSON.")] = None,
    as_json: shared.JsonOption = False,
) -> None:
    """Check on this machine that answers are plain vLLM's, sampled ones by the target's law.

    All other options are vLLM's, as `vllm serve` takes them: of quantization, the cache's type,
    attention backends, parallelism, and `--speculative-config` or `--draft-model`. Engines
    run one after the other. 3.4 minutes were measured with --quick for a tiny pair on two busy CPU
    cores, before the draft's own engine was added. 5 to 15 minutes for all else are an estimate.
    The report has no prompts and no answers. Exit code 1: a check failed. 3: none failed, but one
    or more could not tell.
    """
    shared.quiet_engines()
    shared.check_output("--output", output)
    with friendly_errors():
        if model.startswith("-"):
            raise ConfigError(f"{model}: give the model first, then options")
        chosen = load_prompts(prompts, num_prompts)
        options = _vllm_options(context.args)
        config = _config(model, draft, options)
        draft = config.get("model") or config.get("drafter") or shared.draft_to_measure(model)
        shared.check_models(model, draft)
        encoded = tuple(encode_prompts(chosen, load_tokenizer(options.get("tokenizer", model))))
        settings = VerifySettings(
            model, draft, config=config, options=options, prompts=encoded,
            chain=None if quick else _chain(draft), **(_QUICK if quick else {}),
        )  # fmt: skip
        with shared.measuring("verify:", "interrupted: nothing was kept") as progress:
            report = Verification(settings, progress).run()
    if output is not None:
        report.save(output)
    if as_json:
        print_json(report.to_dict())
    else:
        print_report(report)
    if report.failed:
        fail(f"{len(report.failed)} of {len(report.checks)} checks failed", FAILED)
    if report.untold:
        names = ", ".join(check.name for check in report.untold)
        fail(f"nothing failed, but {len(report.untold)} could not tell: {names}", UNTOLD)


def _vllm_options(words: list[str]) -> dict[str, Any]:
    """vLLM's options among a command's words: arguments of ``vllm.LLM``."""
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    load_general_plugins()  # they may change how an option is parsed
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="verify"))
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            given, usual = (vars(parser.parse_args(args)) for args in (words, []))
    except SystemExit:
        last = (said.getvalue().strip().splitlines() or ["unknown option"])[-1]
        fail(last.partition("error: ")[2] or last)
    known = {field.name for field in fields(EngineArgs)} - {"model"}
    return {name: given[name] for name in known & given.keys() if given[name] != usual[name]}


def _config(model: str, draft: str, options: dict[str, Any]) -> dict[str, Any]:
    """The speculative configuration: vLLM's option, or that of ``--draft-model``."""
    given = options.pop("speculative_config", None)
    if given is None:
        return {"method": METHOD, **draft_option(draft or shared.draft_to_measure(model))}
    config = {"method": given} if isinstance(given, str) else dict(given)
    if config.get("method") != METHOD:
        raise ConfigError('--speculative-config: "method" must be "sequoia", which is checked')
    if draft:
        config |= draft_option(draft)
    return config


def _chain(draft: str) -> Method | None:
    try:
        return chain_of_words(draft, _CHAIN)
    except BenchError as error:
        note(f"vLLM's own chain is left out: {error}")
        return None


def print_report(report: VerifyReport) -> None:
    """Prints one page of words."""
    out = console()
    out.print(
        f"{report.target.name} with {report.draft.name}, {report.options.get('dtype')}, on "
        f"{report.device}", highlight=False, soft_wrap=True,
    )  # fmt: skip
    shown = new_table("check", "outcome", "what was found", left=["check", "what was found"])
    for check in report.checks:
        shown.add_row(check.name, check.outcome.value, check.said)
    out.print(shown)
    out.print(speeds_table(speeds(report)))
    out.print(f"{sum(report.seconds.values()) / 60:.1f} minutes", highlight=False)
    for line in report.notes:
        out.print(f"note: {line}", markup=False, highlight=False, soft_wrap=True)
