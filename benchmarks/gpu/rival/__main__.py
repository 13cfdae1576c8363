"""``python -m benchmarks.gpu.rival``: fair rivals for trees, in three steps that may overlap.

1. ``target FOLDER``: SmolLM2-135M-Instruct with the layers of an 8B model.
2. ``head FOLDER``: the small model answers questions, an EAGLE-3 head learns from them for some
   minutes, and is enlarged like the target.
3. ``compare FOLDER``: plain vLLM, its chains of the head in CUDA graphs, and trees, side by side;
   then requests that arrive.

`python -m examples.smollm2` first. For a DFlash head, which nothing here trains, ``dflash FOLDER``
takes the place of 2, and the embedded target that of SmolLM2: ``--source examples/models/target
--times 16``. Each step says what it found in a line of JSON.
"""

import json
import sys
import time
from pathlib import Path
from shutil import rmtree
from typing import Annotated, Any

import typer

_TRAINER = Path(__file__).parents[3] / "examples" / "train_drafter"
sys.path.insert(0, str(_TRAINER))

# Llama-3.1-8B's layers and MLPs; the hidden size is seven times SmolLM2's.
LAYERS, WIDTH, TIMES = 32, 14336, 7
MODELS = Path(__file__).parents[3] / "examples" / "models"
EMBEDDED: dict[str, Any] = {"source": MODELS / "target", "times": 16}
"""Arguments of `target` for the embedded one, whose hidden size becomes Llama-3.1-8B's."""
_QUESTIONS = Path(__file__).parents[3] / "examples" / "smollm2" / "questions.jsonl"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Folder = Annotated[Path, typer.Argument(help="Where everything goes.")]
Source = Annotated[Path | None, typer.Option(help="The model to enlarge; none: SmolLM2.")]


@app.command()
def target(
    folder: Folder, layers: int = LAYERS, width: int = WIDTH, times: int = TIMES,
    source: Source = None,
) -> None:  # fmt: skip
    """Enlarges the chat model."""
    from benchmarks.synthetic_target.write import write_synthetic_target
    from examples.smollm2 import cached_folder

    source = source or cached_folder()
    begun, small = time.monotonic(), json.loads((source / "config.json").read_text())
    made = write_synthetic_target(
        str(source), folder / "target", layers=max(layers, small["num_hidden_layers"]),
        width=width, hidden=times * small["hidden_size"], dtype="bfloat16",
    )  # fmt: skip
    _say("target", parameters=made.shape.parameters, seconds=round(time.monotonic() - begun, 1))


@app.command()
def head(
    folder: Folder,
    texts: Annotated[int, typer.Option(help="Answers to learn from.")] = 12_288,
    at_once: Annotated[int, typer.Option(help="Answered at once.")] = 2_048,
    seconds: Annotated[float, typer.Option(help="Of training.")] = 130.0,
    tokens: Annotated[int, typer.Option(help="That the head can draft.")] = 16_384,
    batch: Annotated[int, typer.Option(help="Answers of a step.")] = 32,
    answer: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 192,
    width: int = WIDTH,
    times: int = TIMES,
    source: Source = None,
) -> None:
    """Trains a head, and enlarges it."""
    from benchmarks.gpu.rival.head import write_grown_head
    from benchmarks.gpu.rival.learning import train_for, write_answers
    from examples.smollm2 import cached_folder

    answers, small = folder / "answers", folder / "small-eagle3"
    if not answers.is_dir():
        partial = folder / "answers.partial"
        rmtree(partial, ignore_errors=True)
        written = write_answers(source or cached_folder(), partial, texts, answer, at_once)
        _say("answers", **written)
        partial.rename(answers)
    for old in folder.glob("small-eagle3*"):  # of a run that was ended
        rmtree(old)
    begun = time.monotonic()
    record = train_for(seconds, answers, small, tokens, batch)
    _say("training", **record, seconds=round(time.monotonic() - begun, 1))
    write_grown_head(small, folder / "eagle3", times, width)
    _say("head", folder=str(folder / "eagle3"))


@app.command()
def dflash(folder: Folder, width: int = WIDTH, times: int = EMBEDDED["times"]) -> None:
    """Enlarges the embedded DFlash head."""
    from benchmarks.gpu.rival.head import write_grown_head

    write_grown_head(MODELS / "dflash", folder / "dflash", times, width)
    _say("head", folder=str(folder / "dflash"))


@app.command()
def compare(
    folder: Folder,
    out: Annotated[Path, typer.Option(help="Folder for the results.")],
    kind: Annotated[str, typer.Option(help="Of the head: its folder.")] = "eagle3",
    chains: Annotated[str, typer.Option(help="As bench takes them.")] = "3:probabilistic:block",
    trees: Annotated[str, typer.Option(help="80 GB have room for four engines.")] = "served,lookup",
    batches: str = "1,8,32",
    temperatures: str = "0,1,0.6",
    prompts: int = 12,
    tokens: int = 64,
    rounds: int = 2,
    rates: str = "16,48",
    arriving: Annotated[float, typer.Option(help="Seconds in which requests arrive.")] = 5.0,
    arriving_rounds: Annotated[int, typer.Option(help="How often, in turns.")] = 2,
    cache_gib: Annotated[float, typer.Option(help="KV cache of each engine.")] = 1.5,
    dtype: str = "auto",
) -> None:
    """Compares methods with all engines alive."""
    from benchmarks.gpu.rival.comparison import compare_side_by_side
    from sequoia_vllm.bench.measure import BenchSettings
    from sequoia_vllm.bench.methods import methods
    from sequoia_vllm.measuring.engines import EngineSpec
    from sequoia_vllm.prompts import encode_prompts, load_prompts, load_tokenizer

    target, head = str(folder / "target"), str(folder / kind)
    named = (text.split(",") if text else [] for text in (chains, trees))
    questions = encode_prompts(load_prompts(_QUESTIONS), load_tokenizer(target), raw=False)
    settings = BenchSettings(
        EngineSpec(target, head, kv_cache_gib=cache_gib, dtype=dtype),
        methods=tuple(methods(head, *named)),
        prompts=tuple(questions[:prompts]),
        batch_sizes=tuple(map(int, batches.split(","))),
        temperatures=tuple(map(float, temperatures.split(","))),
        max_tokens=tokens,
        rounds=rounds,
    )
    arrivals = tuple(float(rate) for rate in rates.split(",") if rate)
    compare_side_by_side(settings, questions, arrivals * arriving_rounds, arriving, out)


def _say(what: str, **values: Any) -> None:
    print(json.dumps({"what": what, **values}), flush=True)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.gpu.rival")
