"""``python -m benchmarks.serving``: see the package."""

import math
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import DRAFT
from benchmarks.serving.run import VARIANTS, Run
from sequoia_vllm.cli.common import friendly_errors
from sequoia_vllm.cli.measuring import check_name

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def serving(
    output: Annotated[Path, typer.Option(help="Folder of the results; what it has is kept.")],
    model: Annotated[str, typer.Option(help="The target: docs/measuring.md.")] = "synthetic",
    draft_model: Annotated[str, typer.Option(help="Draft of the chain and of Sequoia.")] = DRAFT,
    rates: Annotated[
        str, typer.Option(help="A second: for 1 running, for 4, for a full batch; long prompts.")
    ] = "0.25,0.9,2,0.2",
    requests: Annotated[
        str, typer.Option(help="At the first three rates, at once, at T = 1, with long prompts.")
    ] = "14,30,40,32,20,12",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of every answer.")] = 64,
    warm_up: Annotated[int, typer.Option(min=1, help="Tokens before every load.")] = 300,
    rounds: Annotated[int, typer.Option(min=1, help="Servers of each variant, in turns.")] = 3,
    variants: Annotated[str, typer.Option(help="Which of them.")] = ",".join(VARIANTS),
    table_only: Annotated[
        bool, typer.Option("--table-only", help="Print the table of the results in --output.")
    ] = False,
) -> None:
    """Measure plain vLLM, its chain and Sequoia as servers, and print one table."""
    names = variants.split(",")
    if unknown := set(names) - VARIANTS.keys():
        raise typer.BadParameter(f"--variants: no {', '.join(unknown)} in {', '.join(VARIANTS)}")
    settings = {
        "model": model, "draft_model": draft_model, "rates": _numbers("--rates", rates, 4),
        "requests": _numbers("--requests", requests, 6), "tokens": tokens, "warm_up": warm_up,
    }  # fmt: skip
    with friendly_errors():
        if not table_only:
            check_name("target", model)
            check_name("draft", draft_model)
        run = Run(output, None if table_only else settings)
        if not table_only:
            run.measure(names, rounds)
        print(run.write_table())


def _numbers(option: str, text: str, count: int) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(0 < number < math.inf for number in numbers):
        raise typer.BadParameter(f"{option} {text}: give {count} positive numbers")
    return numbers


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.serving")
