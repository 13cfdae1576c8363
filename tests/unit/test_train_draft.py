"""``python examples/train_drafter``: drafters distilled from a tiny target, in seconds."""

import hashlib
import json
import re
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.prompts import Prompt
from tests.support.models import save_llama
from tests.support.train_drafter import run_here, script_modules
from tests.support.vocabularies import train_byte_level

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MODULES = ("chat_prompts", "draft_data", "draft_model", "eagle3", "heads", "training")
VOCABULARY, KEPT, ANSWER = 600, 380, 12


@pytest.fixture(scope="module")
def scripts():
    with script_modules(*MODULES) as modules:
        yield modules


@pytest.fixture(scope="module")
def target(scripts, tmp_path_factory):
    """A random Llama with a byte-pair tokenizer of this repository's words."""
    folder = tmp_path_factory.mktemp("target")
    texts = [one.prompt for one in scripts.chat_prompts.prompts(False, 400, seed=0)]
    controls = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = train_byte_level(texts, VOCABULARY, controls)
    tokenizer.save_pretrained(folder)
    return save_llama(
        folder, seed=0, scale=2.0, vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, head_dim=16, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


@torch.no_grad()
def answered(scripts, target: Path, part: str, count: int):
    """A shard as vLLM would give it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    asked = scripts.chat_prompts.prompts(part == "validation", count, seed=0)
    temperatures = [scripts.draft_data.TEMPERATURES[place % 3] for place in range(count)]
    texts, prompt_lengths, likely, values = [], [], [], []
    torch.manual_seed(1)
    for one, temperature in zip(asked, temperatures, strict=True):
        ids = tokenizer(one.prompt, return_tensors="pt").input_ids
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
        text = model.generate(
            ids, max_new_tokens=ANSWER, eos_token_id=None, attention_mask=torch.ones_like(ids),
            **sampling,
        )  # fmt: skip
        law = model(text).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
        best = law.topk(scripts.draft_data.LIKELIEST)
        texts.append(text[0].tolist())
        prompt_lengths.append(ids.shape[1])
        likely.append(best.indices)
        values.append(best.values)
    return scripts.draft_data.Shard(
        tokens=np.array([token for text in texts for token in text], dtype=np.uint16),
        ends=np.cumsum([len(text) for text in texts]),
        prompt_lengths=np.array(prompt_lengths),
        temperatures=np.array(temperatures, dtype=np.float32),
        likely=torch.cat(likely).numpy().astype(np.uint16),
        log_probabilities=torch.cat(values).numpy().astype(np.float16),
        seconds=1.0,
    )


@pytest.fixture(scope="module")
def data(scripts, target, tmp_path_factory):
    """What draft-data leaves."""
    folder = tmp_path_factory.mktemp("data")
    draft_data = scripts.draft_data
    recipe = draft_data.DraftDataRecipe(str(target), None, ANSWER, 0, "float32")
    draft_data._keep_recipe(recipe, folder)
    for part, count in (("training", 24), ("validation", 15)):
        shard = answered(scripts, target, part, count)
        draft_data._save(shard, draft_data._shard_path(folder, part, 0))
    return folder


@pytest.fixture(scope="module")
def tokenizer(target):
    return transformers.AutoTokenizer.from_pretrained(target)


def refused(words: str, *arguments) -> str:
    """The error of a command that must end with one."""
    done = run_here(*arguments)
    assert done.returncode == 1
    assert words in done.stderr
    return done.stderr


GOOD = '{"prompt": "a"}'


class TestPrompts:
    @pytest.mark.parametrize(
        ("line", "words"),
        [
            (b'{"prompt": ', "is not JSON"),
            (b'{"prompt": "caf\xe9"}', "is not UTF-8"),
            (b'{"messages": [{"role": "user", "content": "a"}]}', "no chat template"),
            (json.dumps({"prompt": "many " * 600}).encode(), "tokens, and the target reads 511"),
        ],
    )
    def test_a_wrong_line_is_named_before_the_engine_starts(self, line, words, target, tmp_path):
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(b"\n".join([GOOD.encode(), b"", line, GOOD.encode()]))
        options = ["--target", target, "--prompts", path, "--out", tmp_path / "out"]
        said = refused(words, "draft-data", *options)
        assert f"error: prompts {path}, line 3" in said
        assert said.count("\n") == 0
        assert not (tmp_path / "out").exists()

    def test_subjects_are_held_out(self, scripts):
        learnt, held = (scripts.chat_prompts.prompts(part, 2000, seed=0) for part in (False, True))
        topics = scripts.chat_prompts.WORDS["topics"]

        def seen(prompts):
            chats = [one.prompt for one in prompts[::5]]  # kinds take turns
            return {
                topic for topic in topics if any(re.search(rf"\b{topic}\b", text) for text in chats)
            }

        assert seen(held) >= set(topics[::8])
        assert not seen(held) & (set(topics) - set(topics[::8]))
        assert not seen(learnt) & set(topics[::8])

    def test_a_file_of_ones_own(self, scripts, tmp_path):
        lines = [{"prompt": f"p{number}"} for number in range(17)]
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
        held = scripts.chat_prompts.read_prompts(path, True, 100, seed=0)
        assert {one.prompt for one in held} == {"p0", "p8", "p16"}
        assert len(scripts.chat_prompts.read_prompts(path, False, 100, seed=0)) == 14
        path.write_text("", "utf-8")
        with pytest.raises(SequoiaError, match="at least 2"):
            scripts.chat_prompts.read_prompts(path, True, 100, seed=0)


class TestTokens:
    def test_the_most_frequent_are_kept_with_what_they_are_made_of(self, scripts, tokenizer):
        counts = np.zeros(VOCABULARY, dtype=np.int64)
        longest = max(tokenizer.get_vocab(), key=len)
        counts[tokenizer.convert_tokens_to_ids(longest)] = 9
        reduced = scripts.draft_model.reduced_tokenizer(tokenizer, counts, KEPT)
        assert len(reduced) == KEPT
        assert longest in reduced.get_vocab()
        text = f"{longest.replace('Ġ', ' ')} größe ☃"
        assert reduced.decode(reduced(text).input_ids) == text
        assert reduced.convert_tokens_to_ids(longest) in reduced(text).input_ids
        assert (reduced.bos_token, reduced.eos_token) == (tokenizer.bos_token, tokenizer.eos_token)

    def test_the_engine_will_match_each_of_them(self, scripts, tokenizer):
        reduced = scripts.draft_model.reduced_tokenizer(tokenizer, np.arange(VOCABULARY), KEPT)
        words = scripts.draft_model.matching(tokenizer, reduced, VOCABULARY, KEPT)
        assert words.num_shared == KEPT
        for token, number in reduced.get_vocab().items():
            assert words.drawn[tokenizer.convert_tokens_to_ids(token)] == number

    def test_what_cannot_be_reduced(self, scripts, tokenizer):
        with pytest.raises(SequoiaError, match="--tokens 100: special tokens"):
            scripts.draft_model.reduced_tokenizer(tokenizer, np.zeros(VOCABULARY), 100)
        with pytest.raises(SequoiaError, match="no byte-pair encoding"):
            scripts.draft_model.reduced_tokenizer(object(), np.zeros(VOCABULARY), 100)


def test_the_loss_is_the_cross_entropy_of_what_is_known(scripts, target, data):
    """Written out for one text: likely tokens that the draft has, and the rest together."""
    [shard] = scripts.draft_data.read_shards(data, "validation")
    tokenizer, words = scripts.draft_model.draft_vocabulary(target, VOCABULARY, [shard], KEPT)
    config = transformers.AutoConfig.from_pretrained(target)
    model = scripts.draft_model.new_draft((16, 1, 2, 16), config, KEPT, tokenizer)
    prompt, tokens = int(shard.prompt_lengths[0]), shard.tokens[: shard.ends[0]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(torch.from_numpy(words.read[tokens])[None]).logits[0]
    log_q = logits.float().log_softmax(-1)
    losses = []
    for place in range(ANSWER):
        row, loss, rest, left = log_q.detach()[prompt - 1 + place], 0.0, 1.0, 1.0
        for token, value in zip(shard.likely[place], shard.log_probabilities[place], strict=True):
            share, drafted = float(np.exp(np.float32(value))), int(words.drawn[token])
            rest -= share
            if drafted >= 0:
                loss -= share * float(row[drafted])
                left -= float(row[drafted].exp())
        losses.append(loss - max(rest, 0) * np.log(left))
    texts = scripts.training.Texts([shard], words, 1 << 20)
    found = scripts.draft_model.distillation_loss(model, texts.batch([0])).item()
    assert found == pytest.approx(np.mean(losses), rel=1e-3)
    # Padding beside a longer text changes nothing.
    both, other = (
        scripts.draft_model.distillation_loss(model, texts.batch(rows)).item()
        for rows in ([0, 1], [1])
    )
    assert both == pytest.approx((found + other) / 2, rel=1e-2)


OPTIONS = ["--shape", "32x1x2x48", "--tokens", str(KEPT), "--learning-rate", "1e-2"]
OPTIONS += ["--batch-size", "8", "--sequence-length", "96", "--validate-every", "10"]


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("drafts") / "draft"
    done = run_here("train-draft", "--data", data, "--out", out, *OPTIONS, "--steps", "30")
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
@pytest.mark.sharded
class TestTrainDraft:
    def test_leaves_a_draft_that_learns_and_its_record(self, trained):
        metrics = json.loads((trained / "metrics.json").read_text("utf-8"))
        assert [point["step"] for point in metrics["validation_loss"]] == [10, 20, 30]
        losses = [point["loss"] for point in metrics["validation_loss"]]
        assert losses[2] < losses[1] < losses[0]
        assert metrics["vocabulary"] == KEPT
        weights = hashlib.sha256((trained / "model.safetensors").read_bytes()).hexdigest()
        assert metrics["sha256"]["the weights"] == weights
        model = transformers.AutoModelForCausalLM.from_pretrained(trained)
        assert model.dtype == torch.bfloat16
        assert (model.config.vocab_size, model.config.max_position_embeddings) == (KEPT, 512)
        tokenizer = transformers.AutoTokenizer.from_pretrained(trained)
        assert model.config.eos_token_id == tokenizer.eos_token_id

    @pytest.mark.parametrize(("shape", "problem"), [("16x1", "is not HIDDEN"), ("6x1x2x8", "2 ×")])
    def test_a_wrong_shape_is_named(self, shape, problem, data, tmp_path):
        options = ["--data", data, "--out", tmp_path, "--shape", shape]
        assert f"--shape {shape}" in refused(problem, "train-draft", *options)

    def test_what_was_made_before_is_left_alone(self, trained, data, target):
        options = ["--data", data, "--out", trained, *OPTIONS]
        refused("has a trained drafter", "train-draft", *options)
        options = ["--target", target, "--out", data, "--answer", "99"]
        refused("data of another recipe", "draft-data", *options)

    @pytest.mark.parametrize("own", [False, True])
    def test_more_texts_fill_the_last_shard(self, own, scripts, target, tmp_path, monkeypatch):
        """The same answers as if all of them had been asked for at first."""
        draft_data = scripts.draft_data

        def answer(llm, tokenizer, recipe, questions, seed, began):
            places = range(len(questions))
            return draft_data.Shard(
                tokens=np.array([seed + place for place in places]),
                ends=np.arange(1, len(questions) + 1),
                prompt_lengths=np.array([len(one.prompt) for one in questions]),
                temperatures=np.array([place % 3 for place in places]),
                likely=np.zeros((len(questions), 2)),
                log_probabilities=np.zeros((len(questions), 2)), seconds=1.0,
            )  # fmt: skip

        def ask(llm, opening, questions, seed):
            return [
                one or Prompt(prompt="?" * (1 + (seed + place) % 7))
                for place, one in enumerate(questions)
            ]

        monkeypatch.setattr(draft_data, "_engine", lambda recipe: nullcontext())
        monkeypatch.setattr(draft_data, "_answer", answer)
        monkeypatch.setattr(draft_data, "_ask", ask)
        monkeypatch.setattr(draft_data, "_opening", lambda tokenizer: [1] if own else None)
        recipe = draft_data.DraftDataRecipe(str(target), None, ANSWER, 0, "auto")
        for texts in (20, 60, 200, 100):
            draft_data.write_draft_data(recipe, texts, tmp_path / "grown", lambda *_: None)
        draft_data.write_draft_data(recipe, 200, tmp_path / "whole", lambda *_: None)
        for part, count in (("training", 200), ("validation", 30)):
            grown, whole = (
                draft_data.read_shards(tmp_path / name, part) for name in ("grown", "whole")
            )
            assert sum(len(one.ends) for one in grown) == count
            for one, other in zip(grown, whole, strict=True):
                for name, value in asdict(one).items():
                    if name != "seconds":
                        np.testing.assert_array_equal(value, getattr(other, name))


@pytest.mark.slow
@pytest.mark.sharded
class TestTrainHead:
    def test_leaves_a_head_that_learnt_and_its_record(self, data, tmp_path):
        options = ["--mlp", "40", "--tokens", str(KEPT), "--steps", "20", "--validate-every", "10"]
        done = run_here("train-head", "--data", data, "--out", tmp_path, *options)
        assert done.returncode == 0, done.stderr
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"config.json", "model.safetensors", "metrics.json"}
        metrics = json.loads((tmp_path / "metrics.json").read_text("utf-8"))
        assert [point["step"] for point in metrics["validation_loss"]] == [10, 20]
        losses = [point["loss"] for point in metrics["validation_loss"]]
        assert losses[1] < losses[0]
        assert metrics["vocabulary"] == KEPT
        assert set(metrics["sha256"]) == {"the weights", "the target's weights", "the answers"}

    def test_a_target_of_another_form(self, scripts, tmp_path):
        config = transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1)
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
        with pytest.raises(SequoiaError, match="Llama's and Qwen's form"):
            scripts.eagle3.FrozenTarget(tmp_path, (1,), "cpu")
