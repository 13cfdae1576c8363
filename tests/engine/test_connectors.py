"""vLLM's OffloadingConnector with trees: what it stored while they ran, it loads later."""

from unittest.mock import patch

import pytest
from vllm.config import KVTransferConfig

from tests.support.engines import running, whole_trees
from tests.support.generating import TINY, check_logprobs, save_related_pair
from tests.support.stored_cache import CONNECTOR, LENGTHS, CopyingWorker, converse_twice

pytestmark = pytest.mark.engine
# So few blocks that later turns get some which the draft had filled.
OPTIONS = {**TINY, "enable_prefix_caching": True, "num_gpu_blocks_override": 18}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    target, draft = save_related_pair(tmp_path_factory.mktemp("pair"))
    with running(None, model=target, **OPTIONS) as llm:
        found = {"plain": converse_twice(llm, trees=False)}
    trees, options = whole_trees(size=8, depth=3, draft=draft), {"model": target, **OPTIONS}
    for name, forgets in (("stored", False), ("without the draft's", True)):
        with (
            patch.object(CopyingWorker, "forgets_draft", forgets),
            running(trees, kv_transfer_config=KVTransferConfig(**CONNECTOR), **options) as llm,
        ):
            found[name] = converse_twice(llm, trees=True)
    return found


@pytest.mark.parametrize("name", ["stored", "without the draft's"])
def test_turns_on_loaded_keys_are_those_of_plain_vllm(name, answers):
    """Blocks of answers are stored, too: trees wrote behind their ends."""
    plain, found = answers["plain"], answers[name]
    assert plain["loaded"] == 0
    assert found["loaded"] == sum((length + 49) // 32 * 32 for length in LENGTHS)
    assert found["tokens"] == plain["tokens"]
    for turn, expected in zip(found["logprobs"], plain["logprobs"], strict=True):
        assert check_logprobs(turn, expected) > 0


def test_the_draft_reads_again_what_was_loaded(answers):
    """A block may be stored before the draft has read it."""
    _, later = answers["without the draft's"]["tokens per tree"]
    assert later == answers["stored"]["tokens per tree"][1] > 1.5
