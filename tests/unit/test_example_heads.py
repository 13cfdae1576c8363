"""The example pair and heads, and the script that trains EAGLE-3 heads: what it computes."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from sequoia_vllm.errors import SequoiaError
from tests.support.models import MODELS, save_llama
from tests.support.train_drafter import script_modules

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file

VOCAB, HIDDEN, LENGTH, LIKELY = 96, 32, 24, 16
LAYERS = (1, 2, 4)


@pytest.fixture(scope="module")
def scripts():
    with script_modules() as modules:
        yield modules


@pytest.fixture(scope="module")
def target(scripts, tmp_path_factory):
    """A random Llama of four layers whose predictions differ from place to place."""
    folder = save_llama(
        tmp_path_factory.mktemp("target"), seed=0, vocab_size=VOCAB, hidden_size=HIDDEN,
        intermediate_size=48, num_hidden_layers=4, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    made = scripts.eagle3.FrozenTarget(folder, LAYERS, "cpu")
    made.folder = folder
    return made


def tokens(batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB, (batch, LENGTH), generator=generator)


def answered(scripts, target, head) -> torch.Tensor:
    """Texts whose law is the target's, with the head's numbers; all tokens are an answer's."""
    texts = tokens(2)
    law = target._model(texts).logits.softmax(-1).topk(LIKELY)
    words = torch.from_numpy(scripts.heads.head_words(head).drawn)
    return torch.cat((texts[..., None], words[law.indices], law.values), -1)


@pytest.fixture
def head(scripts, target):
    """A head that has learnt nothing but whose parts all matter."""
    torch.manual_seed(2)
    head = scripts.eagle3.Eagle3(target.config, LAYERS, 40, torch.arange(1, VOCAB, 2))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(parameter.mean(), 0.2)
    return head.eval()


def test_the_example_pair_has_one_tokenizer_and_prompts_for_it():
    folders = MODELS / "target", MODELS / "draft"
    tokenizer, draft = map(transformers.AutoTokenizer.from_pretrained, folders)
    assert draft.get_vocab() == tokenizer.get_vocab()
    assert len(tokenizer) == 4096
    assert len({(folder / "tokenizer.json").read_bytes() for folder in folders}) == 1
    for folder in folders:
        assert transformers.AutoConfig.from_pretrained(folder).vocab_size == len(tokenizer)
    lines = (MODELS / "prompts.jsonl").read_text("utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert len(prompts) == 200
    # Encoding a decoded window anew may merge tokens at its edges.
    assert all(126 <= len(tokenizer(prompt).input_ids) <= 128 for prompt in prompts)


class TestExampleHeads:
    @pytest.mark.parametrize("kind", ["eagle3", "dflash"])
    def test_weights_are_in_bfloat16_and_counted(self, kind):
        weights = load_file(MODELS / kind / "model.safetensors")
        whole = {name for name, tensor in weights.items() if not tensor.is_floating_point()}
        assert whole == ({"d2t", "t2d"} if kind == "eagle3" else set())
        learnt = [weights[name] for name in set(weights) - whole]
        assert all(tensor.dtype == torch.bfloat16 for tensor in learnt)
        metrics = json.loads((MODELS / kind / "metrics.json").read_text("utf-8"))
        assert metrics["parameters"] == sum(tensor.numel() for tensor in learnt)

    def test_loads_in_the_script(self, scripts):
        head, _ = scripts.heads.load_head(MODELS / "eagle3", MODELS / "target", "cpu")
        assert head.config() == json.loads((MODELS / "eagle3" / "config.json").read_text("utf-8"))


class TestTarget:
    def test_features_are_the_layers_outputs_before_any_norm(self, target):
        batch = tokens(2)
        hidden = target._model(batch, output_hidden_states=True).hidden_states
        first, second, last = target(batch).split(HIDDEN, -1)
        assert torch.equal(first, hidden[1])
        assert torch.equal(second, hidden[2])
        # What transformers calls the last has been normed.
        torch.testing.assert_close(target._model.model.norm(last), hidden[4])

    def test_layers_are_vllms_own_choice(self, scripts):
        wanted = {30: (2, 15, 27), 8: (2, 4, 5), 4: LAYERS, 2: (1, 2), 1: (1,)}
        for count, layers in wanted.items():
            target = SimpleNamespace(num_hidden_layers=count)
            assert scripts.heads.head_layers(target) == layers


class TestHead:
    def test_every_weight_learns(self, scripts, target, head):
        head.loss(target, answered(scripts, target, head)).backward()
        assert all(one.grad.abs().max() > 0 for one in head.parameters())

    def test_drafts_do_not_depend_on_what_follows(self, scripts, target, head):
        text = tokens(1)[0]
        whole, logits = head.draft(target, text, 5)
        assert whole.shape == (LENGTH - 1, 5)
        assert len(set(map(tuple, whole.tolist()))) > 5  # or nothing would differ
        for end in (2, 9, LENGTH - 1):
            part, first = head.draft(target, text[:end], 5)
            assert torch.equal(part, whole[: end - 1])
            torch.testing.assert_close(first, logits[: end - 1])

    def test_padding_changes_no_loss(self, scripts, target, head):
        batch = answered(scripts, target, head)
        batch[:, 14:, 1 + LIKELY :] = 0  # from here on no token is an answer's
        other = batch.clone()
        other[:, 20:, 0] = 3
        torch.testing.assert_close(head.loss(target, batch), head.loss(target, other))

    def test_saved_heads_draft_the_same(self, scripts, target, head, tmp_path):
        head, text = head.to(torch.bfloat16).float(), tokens(1)[0]
        scripts.heads.save_head(head, tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
        loaded, _ = scripts.heads.load_head(tmp_path, target.folder, "cpu")
        drafts = zip(loaded.draft(target, text, 4), head.draft(target, text, 4), strict=True)
        assert all(torch.equal(one, other) for one, other in drafts)

    def test_vocabulary_is_of_the_most_frequent_tokens(self, scripts):
        counts = np.bincount([5, 5, 5, 1, 7, 7, 2, 2], minlength=9)
        assert scripts.heads.most_frequent(counts, 3).tolist() == [2, 5, 7]
        with pytest.raises(SequoiaError, match="--tokens 10: the target has 9"):
            scripts.heads.most_frequent(counts, 10)
