"""The example pair."""

import json
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "examples" / "models"
NAMES = ("target", "draft")


def read_prompts(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODELS / "target")


class TestExamplePair:
    def test_one_tokenizer_and_vocabulary(self, tokenizer):
        draft = transformers.AutoTokenizer.from_pretrained(MODELS / "draft")
        assert draft.get_vocab() == tokenizer.get_vocab()
        assert len(tokenizer) == 4096
        target_file, draft_file = (MODELS / name / "tokenizer.json" for name in NAMES)
        assert target_file.read_bytes() == draft_file.read_bytes()
        for name in NAMES:
            config = transformers.AutoConfig.from_pretrained(MODELS / name)
            assert config.vocab_size == len(tokenizer)

    def test_prompts(self, tokenizer):
        prompts = read_prompts(MODELS / "prompts.jsonl")
        assert len(prompts) == 200
        # Encoding a decoded window anew may merge tokens at its edges.
        assert all(126 <= len(tokenizer(prompt).input_ids) <= 128 for prompt in prompts)
