"""The example pair and its model card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "examples" / "models"
NAMES = ("target", "draft")
METRICS = ("target_cross_entropy", "draft_cross_entropy", "top1_agreement", "overlap")
MAX_BYTES = 16 * 1024**2


def read_prompts(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text("utf-8").splitlines()]


def load(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def models():
    return {name: load(MODELS / name) for name in NAMES}


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODELS / "target")


@pytest.fixture(scope="module")
def evaluation():
    return json.loads((MODELS / "evaluation.json").read_text("utf-8"))


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

    def test_real_files_of_at_most_16_mib(self):
        """The heads and the other draft beside the pair have limits of their own."""
        paths = list(MODELS.rglob("*"))
        assert not any(path.is_symlink() for path in paths)
        others = [MODELS / name for name in ("eagle3", "dflash", "smollm2-draft")]
        pair = [path for path in paths if path.is_file() and path.parent not in others]
        assert sum(path.stat().st_size for path in pair) <= MAX_BYTES

    def test_prompts(self, tokenizer):
        prompts = read_prompts(MODELS / "prompts.jsonl")
        assert len(prompts) == 200
        # Encoding a decoded window anew may merge tokens at its edges.
        assert all(126 <= len(tokenizer(prompt).input_ids) <= 128 for prompt in prompts)


class TestModelCard:
    @pytest.mark.slow
    @torch.no_grad()
    def test_evaluation_agrees_with_the_definitions(self, models, tokenizer, evaluation):
        """Cross-entropy and total variation written out, over all prompts."""
        totals, positions = torch.zeros(4, dtype=torch.float64), 0
        for prompt in read_prompts(MODELS / "prompts.jsonl"):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            p, q = (models[name](ids).logits[0, :-1].softmax(-1) for name in NAMES)
            rows, actual = torch.arange(len(p)), ids[0, 1:]
            totals[0] -= p[rows, actual].log().sum()
            totals[1] -= q[rows, actual].log().sum()
            totals[2] += (p.argmax(-1) == q.argmax(-1)).sum()
            totals[3] += (1 - (p - q).abs().sum(-1) / 2).sum()
            positions += len(p)
        published = [evaluation["quality"][metric]["mean"] for metric in METRICS]
        assert positions == evaluation["quality"]["positions"]
        assert (totals / positions).tolist() == pytest.approx(published, abs=1e-3)
