"""Drafters from the target's answers to the engine that drafts with them."""

import json
import shutil

import numpy as np
import pytest
from vllm import SamplingParams

from tests.support.engines import metric, running, sequoia
from tests.support.models import TARGET, next_probabilities
from tests.support.train_drafter import run_here, script_modules

pytestmark = [pytest.mark.engine, pytest.mark.sharded]

TEXTS, ANSWER = 32, 24
OPENING, CLOSING = "# A question:\n", "\n# Its answer:\n"


@pytest.fixture(scope="module")
def chat_target(tmp_path_factory):
    """The embedded target with a chat template."""
    folder = tmp_path_factory.mktemp("target") / "chat"
    shutil.copytree(TARGET, folder)
    (folder / "chat_template.jinja").write_text(
        f"{{% for one in messages %}}{OPENING}{{{{ one.content }}}}{CLOSING}{{% endfor %}}", "utf-8"
    )
    return folder


@pytest.fixture(scope="module")
def data(chat_target, tmp_path_factory):
    """The embedded target's answers, to its own questions too."""
    out = tmp_path_factory.mktemp("answers")
    options = f"--texts {TEXTS} --answer {ANSWER} --dtype float32".split()
    done = run_here("draft-data", "--target", chat_target, "--out", out, *options)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def shard(data):
    with script_modules("draft_data") as scripts:
        [found] = scripts.draft_data.read_shards(data, "training")
    return found


def test_answers_come_with_the_targets_law(shard):
    assert (len(shard.ends), len(shard.likely)) == (TEXTS, TEXTS * ANSWER)
    assert sorted(set(shard.temperatures.tolist())) == pytest.approx([0.0, 0.6, 1.0])
    prompt, text = int(shard.prompt_lengths[0]), shard.tokens[: shard.ends[0]].tolist()
    law = next_probabilities(TARGET, [text], temperature=1.0)[0, prompt - 1 : -1]
    kept = np.exp(shard.log_probabilities[:ANSWER].astype(np.float32))
    of_kept = np.take_along_axis(law, shard.likely[:ANSWER].astype(np.int64), axis=1)
    np.testing.assert_allclose(kept, of_kept, rtol=0.02)  # kept in float16
    np.testing.assert_array_equal(shard.likely[:ANSWER, 0], text[prompt:])  # the first is greedy


def test_more_prompts_than_a_pass_reads(tmp_path):
    """vLLM reads 4,096 tokens a pass; on CPUs it fails if a seeded prompt is cut there."""
    lines = [json.dumps({"prompt": f"{place} " + "x = x + 1\n" * 60}) for place in range(20)]
    (tmp_path / "long.jsonl").write_text("\n".join(lines))
    options = ["--prompts", tmp_path / "long.jsonl", "--answer", "8", "--texts", "20"]
    done = run_here("draft-data", "--target", TARGET, "--out", tmp_path / "answers", *options)
    assert done.returncode == 0, done.stderr
    with script_modules("draft_data") as scripts:
        [found] = scripts.draft_data.read_shards(tmp_path / "answers", "training")
    assert found.prompt_lengths.sum() > 4096


def test_a_trained_draft_serves(data, shard, tmp_path):
    """With a part of the target's tokens; the target's greedy answers stay its own."""
    options = ["--shape", "64x1x2x64", "--tokens", "1024", "--batch-size", "8", "--steps", "20"]
    done = run_here("train-draft", "--data", data, "--out", tmp_path / "draft", *options)
    assert done.returncode == 0, done.stderr
    starts = [0, *shard.ends[:-1].tolist()]
    greedy = np.flatnonzero(shard.temperatures == 0)[:6].tolist()
    prompts = [shard.tokens[starts[i] :][: shard.prompt_lengths[i]].tolist() for i in greedy]
    expected = [
        shard.tokens[starts[i] + shard.prompt_lengths[i] : shard.ends[i]].tolist() for i in greedy
    ]
    with running(sequoia(draft=str(tmp_path / "draft"))) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=ANSWER),
            use_tqdm=False,
        )
        assert [list(one.outputs[0].token_ids) for one in outputs] == expected
        assert metric(llm, "sequoia:emitted_tokens") > metric(llm, "sequoia:trees") > 0
