"""The engine as users run it: engine core and workers in processes of their own, compiled.

Of a tiny pair of one layer each, as compiling takes its time for every layer.
"""

import json
import os
import subprocess
import sys

import pytest
from vllm import SamplingParams

from tests.support.engines import whole_trees
from tests.support.generating import random_prompts, save_related_pair

pytestmark = pytest.mark.engine

# It never imports sequoia_vllm: vLLM finds the plugin by its entry point, in every process.
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model, prompts, speculative_config = map(json.loads, sys.argv[1:])
    llm = LLM(model=model, dtype="float32", max_model_len=256, max_num_seqs=8, seed=0,
              kv_cache_memory_bytes=64 << 20, speculative_config=speculative_config,
              skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=32, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    [stats] = llm.collective_rpc("sequoia_stats")
    sampled = SamplingParams(temperature=1, max_tokens=32, ignore_eos=True, detokenize=False)
    sampled = llm.generate(prompts, sampled, use_tqdm=False)
    [after] = llm.collective_rpc("sequoia_stats")
    settings = llm.llm_engine.vllm_config.speculative_config._sequoia
    print("RESULT" + json.dumps({
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "core": type(llm.llm_engine.engine_core).__name__,
        "mode": llm.llm_engine.vllm_config.compilation_config.mode.name,
        "verification": settings.verification,
        "stats": stats,
        "sampled": [len(o.outputs[0].token_ids) for o in sampled],
        "sampled trees": after["tree_steps"] - stats["tree_steps"],
    }))
"""


def test_same_tokens_from_a_compiled_engine_in_other_processes(plain_outputs, tmp_path):
    target, draft = save_related_pair(tmp_path)
    requests = random_prompts([9, 20, 14, 31])
    params = SamplingParams(temperature=0, max_tokens=32, detokenize=False)
    expected = plain_outputs(requests, params, model=target, skip_tokenizer_init=True)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("VLLM_")},
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        # One thread, on any core: two that spin are very slow where a core is busy.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    # What is greedy is matched. Adapting would end drafting at once where cores are busy.
    kept = list(range(240))
    config = whole_trees(draft=draft, verification="traversal", draft_vocabulary=kept)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(json.dumps, (target, requests, config))],
        env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    result = json.loads(line.removeprefix("RESULT"))
    assert result["tokens"] == expected
    assert result["core"] == "SyncMPClient"
    assert result["mode"] != "NONE"  # it was compiled
    assert result["stats"]["tokens"] > 1.5 * result["stats"]["tree_steps"] > 0
    assert result["verification"] == "traversal"
    assert result["sampled"] == [32] * len(requests)
    assert 0 < result["sampled trees"] < 31 * len(requests)
