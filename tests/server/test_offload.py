"""``vllm serve`` with weights on a disk and no option that is not needed.

Compiled, for requests as long as the model takes, with a KV cache of what memory is left.
"""

import json
import signal

import pytest
from vllm import SamplingParams

from tests.support.engines import running
from tests.support.models import prompts
from tests.support.serving import DRAFT, Server, environment

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

# Of memory: the default asks for nine tenths of what other tests are using, too.
SHARE = "--gpu-memory-utilization=0.15"
EXACT = "--dtype=float32"  # in bfloat16 the nearest tokens change places
GREEDY = {"prompt": prompts(1)[0], "temperature": 0, "max_tokens": 48}
NO_DRAFTS = {"vllm_xargs": {"sequoia_max_drafts": 0}}


def plain_vllms_text() -> str:
    params = SamplingParams(temperature=0, max_tokens=GREEDY["max_tokens"])
    with running() as llm:
        [output] = llm.generate(GREEDY["prompt"], params, use_tqdm=False)
    return output.outputs[0].text


def test_weights_on_a_disk_by_default(tmp_path, disk):
    config = {"method": "sequoia", "model": DRAFT, "offload": {"directory": str(disk)}}
    server = Server(
        tmp_path / "log", SHARE, EXACT, "--speculative-config", json.dumps(config),
        variables=environment(),
    )  # fmt: skip
    try:
        server.wait_until_healthy()
        trees, plain = (
            server.complete(**GREEDY, extra_body=options).choices[0].text
            for options in ({}, NO_DRAFTS)
        )
        assert trees == plain == plain_vllms_text()
        [accepted] = server.metric("vllm:spec_decode_num_accepted_tokens_total")
        assert accepted > 5
        assert "GiB of the target's weights (4 layers) are read from" in server.log
        server.stop(signal.SIGTERM)
    finally:
        server.kill()
    assert list(disk.iterdir()) == []
