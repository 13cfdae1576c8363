"""Tokens per step of structured output, with forbidden drafts replaced before scoring and without.

``python -m benchmarks.structured`` runs the pair in ``examples/models`` on the V1 engine, a tree
of 16 nodes, float32. "Without" is every forbidden draft scored as it is, and rejected.
"""

import argparse
import os
import time
from typing import Any

from benchmarks.embedded_pair import DRAFT, TARGET, encoded_prompts

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "arguments": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "optional": {"type": "boolean"}},
                "required": ["name", "optional"],
            },
            "maxItems": 3,
        },
        "lines": {"type": "integer"},
    },
    "required": ["name", "arguments", "lines"],
}
CHOICE = ["return None", "raise ValueError", "raise NotImplementedError", "print(message)"]
SETTINGS: dict[str, dict[str, Any]] = {
    "JSON schema": {"json": SCHEMA},
    "choice": {"choice": CHOICE},
    "regex": {"regex": r"[a-z]{3,8} = \d{1,4}( \+ [a-z0-9]{1,5}){0,6}\n"},
}
TEMPERATURES = (0.0, 1.0)


def main() -> None:
    """Prints a row for each setting and temperature."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=100, help="of each row, 200 at most")
    parser.add_argument("--max-tokens", type=int, default=96, help="of each completion")
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from sequoia_vllm.engine.core import stand_ins
    from sequoia_vllm.measuring.engines import EngineSpec, open_engine

    bounds = [0, stand_ins.MOST_ALLOWED]  # a grammar always allows one
    grammars = {"backend": "xgrammar", "disable_any_whitespace": True}
    config = {
        "method": "sequoia", "model": DRAFT, "tree": {"size": 16, "depth": 6},
        "num_speculative_tokens_per_batch_size": [[1, 1, 15]],
    }  # fmt: skip
    requests = [{"prompt_token_ids": tokens} for tokens in encoded_prompts(options.prompts)]
    engine = EngineSpec(TARGET, DRAFT, dtype="float32", enforce_eager=True, kv_cache_gib=0.5)
    with open_engine(
        engine, speculative_config=config, max_model_len=512, max_num_seqs=16,
        enable_prefix_caching=False, structured_outputs_config=grammars,
    ) as llm:  # fmt: skip
        print(
            "setting      temperature  tokens per step (seconds) by tokens allowed at most:", bounds
        )
        for name, setting in SETTINGS.items():
            for temperature in TEMPERATURES:
                found = []
                for bound in bounds:
                    stand_ins.MOST_ALLOWED = bound
                    found.append(_measure(llm, requests, options, temperature, setting))
                print(f"{name:11}  {temperature:11}", *found, sep="  ", flush=True)


def _measure(
    llm: Any, requests: list[Any], options: Any, temperature: float, setting: dict[str, Any]
) -> str:
    """Tokens that requests were given after their first, by verified trees; and wall time."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = SamplingParams(
        temperature=temperature,
        max_tokens=options.max_tokens,
        structured_outputs=StructuredOutputsParams(**setting),
    )
    [before] = llm.collective_rpc("sequoia_stats")
    started = time.perf_counter()
    outputs = llm.generate(requests, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    [after] = llm.collective_rpc("sequoia_stats")
    given = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    steps = after["tree_steps"] - before["tree_steps"]
    return f"{given / steps:.2f} ({seconds:.1f})"


if __name__ == "__main__":
    main()
