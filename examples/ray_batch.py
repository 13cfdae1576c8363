"""Answers the prompts in a JSONL file with several engines on Ray; run it again to go on.

$ pip install '.[gpu,ray]'    # in a clone
$ python examples/ray_batch.py prompts.jsonl answers.jsonl --replicas 8 \
      --model meta-llama/Llama-3.1-8B-Instruct --draft-model meta-llama/Llama-3.2-1B-Instruct

Every line of the input is {"prompt": "text"}, completed as it is, or {"messages": [...]}, answered
in the model's chat format. Every line of the output is {"index": n, "text": ..., ...} for the n-th
prompt, from 0, in the order in which answers come; or {"index": n, "error": ...}.

What is in the output already is not done again. Each prompt's answer depends on nothing but itself
(greedy, or with a seed of its own), so that a run in pieces gives what one run would, as far as
rounding does not depend on what is batched together.
"""

import fcntl
import json
import os
import threading
from collections.abc import Iterator
from enum import StrEnum
from multiprocessing import active_children
from multiprocessing.connection import wait
from pathlib import Path
from typing import Annotated, Any

import ray
import typer
from ray.util import ActorPool
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from sequoia_vllm.cli.common import fail, friendly_errors
from sequoia_vllm.prompts import Prompt, PromptError, load_prompts, prompts_sha256
from sequoia_vllm.tree import TokenTree

Line = tuple[int, Prompt]
TreeOption = Annotated[
    str | None,
    typer.Option(
        help='"auto", the name of a library tree, a tree file on this machine (.json), or '
        '\'{"size": n, "depth": d}\'. Not given: each replica chooses one for its GPU type.'
    ),
]


class Device(StrEnum):
    GPU = "gpu"
    CPU = "cpu"


class Replica:
    """An engine in a Ray actor, with arguments of `vllm.LLM` and `vllm.SamplingParams`. A seed in
    the latter is that of line 0."""

    def __init__(self, engine: dict[str, Any], sampling: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        SamplingParams(**sampling)  # a wrong one is told at once
        self._llm = LLM(**engine)
        self._sampling = sampling
        threading.Thread(target=self._end_with_engine, daemon=True).start()

    def _end_with_engine(self) -> None:
        """`LLM.generate` waits forever for an engine that was killed; Ray replaces this actor."""
        wait([process.sentinel for process in active_children()])
        os._exit(1)

    def answer(self, lines: list[Line]) -> list[dict[str, Any]]:
        """The output's lines for these lines of the input."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return self._answer(lines)
        except EngineDeadError:  # not the lines' fault: Ray gives them to this actor's successor
            os._exit(1)

    def _answer(self, lines: list[Line]) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        encoded = {index: self._encode(prompt) for index, prompt in lines}
        tokens = {index: found for index, found in encoded.items() if isinstance(found, list)}
        params = [SamplingParams(**self._sampling_of(index)) for index in tokens]
        inputs = [{"prompt_token_ids": ids} for ids in tokens.values()]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        answers = [
            {
                "index": index,
                "text": output.outputs[0].text,
                "finish_reason": output.outputs[0].finish_reason,
                "tokens": len(output.outputs[0].token_ids),
            }
            for index, output in zip(tokens, outputs, strict=True)
        ]
        errors = {index: found for index, found in encoded.items() if isinstance(found, str)}
        return answers + [{"index": index, "error": error} for index, error in errors.items()]

    def _encode(self, prompt: Prompt) -> list[int] | str:
        """Its token ids, or what is wrong with it."""
        from sequoia_vllm.prompts import encode_prompts

        try:
            [tokens] = encode_prompts([prompt], self._llm.get_tokenizer(), raw=True)
        except PromptError as error:
            return str(error)
        longest = self._llm.model_config.max_model_len - 1
        if len(tokens) > longest:
            return f"the prompt has {len(tokens)} tokens; the engine takes {longest}"
        return tokens

    def _sampling_of(self, index: int) -> dict[str, Any]:
        seed = self._sampling.get("seed")
        return self._sampling if seed is None else {**self._sampling, "seed": seed + index}


def speculative_config(draft_model: str, tree: str | None, more: str) -> dict[str, Any]:
    """What each engine gets, with ``more`` keys as a JSON object; a tree file is read here, as
    other nodes may not have it."""
    config: dict[str, Any] = {"method": "sequoia", "model": draft_model}
    if tree is not None and tree.endswith(".json"):
        config["tree"] = {"parents": list(TokenTree.load(tree).parents)}
    elif tree is not None:
        config["tree"] = json.loads(tree) if tree.startswith("{") else tree
    return {**config, **json.loads(more)}


def cpu_environment(threads: int) -> dict[str, Any]:
    """Keys of a ``runtime_env`` for engines on CPUs: vLLM binds to the node's first cores
    otherwise, all replicas to the same ones."""
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    return {"env_vars": variables}


def start_replicas(
    count: int, device: Device, size: int, engine: dict[str, Any], sampling: dict[str, Any]
) -> list[Any]:
    """The actors. One that dies is started again, and what it was at is tried thrice more."""
    takes: dict[str, Any] = {"num_gpus": size}
    if device is Device.CPU:
        takes = {"num_cpus": size, "num_gpus": 0, "runtime_env": cpu_environment(threads=1)}
    if size > 1:  # within the actor's node; Ray's executor would ask for more GPUs
        engine = {"distributed_executor_backend": "mp", **engine}
    actor = ray.remote(Replica).options(max_restarts=-1, max_task_retries=3, **takes)
    return [actor.remote(engine, sampling) for _ in range(count)]


def answered(output: Path) -> set[int]:
    """Indexes in the output. The last line is cut off if it was not written to its end."""
    content = output.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        os.truncate(output, len(complete))
    try:
        return {json.loads(line)["index"] for line in complete.splitlines()}
    except (ValueError, KeyError, TypeError) as error:
        fail(f"{output} has a line that is not an answer ({error!r}): name another file")


def check_settings(output: Path, settings: dict[str, Any]) -> None:
    """Answers of different runs do not belong in one file; draft and tree change none."""
    file = output.with_name(output.name + ".settings.json")
    if output.stat().st_size == 0:
        file.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        return
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    differing = [key for key in settings if settings[key] != before.get(key)]
    if differing:
        fail(f"{output} was made with other {', '.join(differing)}: name another file")


def answers(replicas: list[Any], lines: list[Line], size: int) -> Iterator[list[dict[str, Any]]]:
    """Yields chunks of ``size`` lines as replicas finish them."""
    chunks = [lines[first : first + size] for first in range(0, len(lines), size)]
    pool = ActorPool(replicas)
    yield from pool.map_unordered(lambda replica, chunk: replica.answer.remote(chunk), chunks)


def main(
    prompts: Annotated[Path, typer.Argument(help="JSONL file.")],
    output: Annotated[Path, typer.Argument(help="JSONL file, gone on with if it exists.")],
    model: Annotated[str, typer.Option(help="Target: name, or a path that all nodes have.")],
    draft_model: Annotated[str, typer.Option(help="Draft, likewise.")],
    tree: TreeOption = None,
    replicas: Annotated[int, typer.Option(min=1, help="Engines.")] = 1,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs of each.")] = 1,
    device: Annotated[
        Device, typer.Option(help="What engines run on; a CPU replica has a core per rank.")
    ] = Device.GPU,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Line n is sampled with this seed plus n.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 512,
    sampling_options: Annotated[
        str, typer.Option(help="More of vLLM's sampling parameters, as a JSON object.")
    ] = "{}",
    speculative_options: Annotated[
        str, typer.Option(help='More of Sequoia\'s keys, as a JSON object: {"adapt": false}.')
    ] = "{}",
    engine_options: Annotated[
        str, typer.Option(help="More of vLLM's engine arguments, as a JSON object.")
    ] = "{}",
    chunk: Annotated[
        int, typer.Option(min=1, help="Lines that a replica gets at a time; lost if it dies.")
    ] = 256,
) -> None:
    """Answer all prompts of a file that have no answer yet."""
    sampling = {
        "temperature": temperature, "max_tokens": max_tokens, **json.loads(sampling_options),
    }  # fmt: skip
    if temperature > 0:
        sampling["seed"] = seed
    options = json.loads(engine_options)
    with friendly_errors():
        all_lines = list(enumerate(load_prompts(prompts)))
        speculation = speculative_config(draft_model, tree, speculative_options)
    digest = prompts_sha256([prompt for _, prompt in all_lines])
    with output.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"another run writes {output}")
        settings = {"prompts": digest, "model": model, "sampling": sampling, "engine": options}
        check_settings(output, settings)
        done = answered(output)
        lines = [line for line in all_lines if line[0] not in done]
        typer.echo(f"{len(done)} of {len(all_lines)} prompts have their answers")
        if not lines:
            return
        engine = {"model": model, "tensor_parallel_size": tensor_parallel_size, **options}
        engine["speculative_config"] = speculation
        ray.init()
        actors = start_replicas(replicas, device, tensor_parallel_size, engine, sampling)
        columns = [*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn()]
        with Progress(*columns) as progress:
            task = progress.add_task("prompts", total=len(all_lines), completed=len(done))
            for found in answers(actors, lines, chunk):
                file.writelines(json.dumps(answer) + "\n" for answer in found)
                file.flush()
                progress.advance(task, len(found))


if __name__ == "__main__":
    typer.run(main)
