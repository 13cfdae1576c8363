import sys, json
from typing import Any
from tests.support.engines import running, sequoia, DEFAULTS
from tests.support.generating import generate, generate_on, generate_with_trees, counted
from tests.support.models import DRAFT, TARGET, prompts

HEAD = "/tmp/heads/random_eagle3"


def params(n, tokens=24, **k):
    from vllm import SamplingParams

    return [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **k)] * n


def go(head=HEAD, n=3, tokens=24, depth=4):
    texts = prompts(n)
    out = {}
    out["plain"] = generate(None, texts, params(n, tokens))
    from tests.support.generating import completions, SPEC_DECODE
    from tests.support.engines import metric

    with running({"method": "eagle3", "model": head, "num_speculative_tokens": depth}) as llm:
        o = llm.generate(texts, params(n, tokens), use_tqdm=False)
        out["chain"] = {
            "tokens": completions(o),
            "counts": {name: metric(llm, f"vllm:spec_decode_num_{name}") for name in SPEC_DECODE},
        }
    with running(sequoia(size=depth + 1, depth=depth, draft=head)) as llm:
        out["our chain"] = generate_on(llm, texts, params(n, tokens))
    with running(sequoia(size=12, depth=depth, draft=head)) as llm:
        out["trees"] = generate_on(llm, texts, params(n, tokens))
    return out
