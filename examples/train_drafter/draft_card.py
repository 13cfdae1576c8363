"""The card of a drafter: what it was trained on, for how long, and how good it is."""

from pathlib import Path
from typing import Any

from draft_data import summary
from draft_quality import CHAIN, DraftQuality

TITLES = {"eagle3": "An EAGLE-3 head", "dflash": "A DFlash head"}


def write_card(
    out: Path, data: Path, metrics: dict[str, Any], quality: dict[str, DraftQuality]
) -> None:
    """Writes ``out/README.md`` from the records of both commands."""
    answers, recipe = summary(data), metrics["recipe"]
    weights = (out / "model.safetensors").stat().st_size / 1e6
    if shape := recipe.get("shape"):
        what = f"A Llama of {'x'.join(map(str, shape.values()))},"
    else:
        what = "A head that reads the target's hidden states,"
    lines = [
        f"# {TITLES.get(recipe.get('kind'), 'A draft model')} for {Path(metrics['target']).name}",
        "",
        f"{what} {metrics['parameters']:,} parameters ({weights:.1f} MB in bfloat16), that drafts "
        f"{metrics['vocabulary']:,} tokens, distilled from the target's own answers. It is "
        "derived from the target: the target's licence applies.",
        "",
        "| | |",
        "|---|---|",
        f"| answers | {answers['answers']:,} with {answers['answered_tokens']:,} tokens, at "
        f"{answers['tokens_per_second']:.0f} tokens/s: {answers['hours']:.2f} hours |",
        f"| training | {recipe['schedule']['steps']:,} steps of {recipe['schedule']['batch_size']} "
        f"texts: {metrics['hours']:.2f} hours |",
        f"| validation loss | {_losses(metrics['validation_loss'])} |",
        *(f"| SHA-256 of {name} | `{value}` |" for name, value in metrics["sha256"].items()),
        "",
        "Acceptance on held-out prompts. Greedy: the share of tokens that are its "
        f"likeliest; tokens per step are those of chains of {CHAIN}. T = 1: Σ min(P, Q) over the "
        "target's 16 likeliest tokens.",
        "",
        "| kind | greedy | tokens per step | T = 1 |",
        "|---|---:|---:|---:|",
    ]  # fmt: skip
    lines += [
        f"| {kind} | {one.greedy:.3f} | {one.tokens_per_step:.2f} | {one.sampled:.3f} |"
        for kind, one in quality.items()
    ]
    command = " ".join(metrics["provenance"]["argv"])
    lines += ["", "```bash", f"python {command}", "```", ""]
    (out / "README.md").write_text("\n".join(lines), "utf-8")


def _losses(points: list[dict[str, float]]) -> str:
    """The first, the middle and the last validation losses."""
    chosen = sorted({0, len(points) // 2, len(points) - 1})
    return ", ".join(
        f"{points[place]['loss']:.3f} after {points[place]['step']:,} steps" for place in chosen
    )
