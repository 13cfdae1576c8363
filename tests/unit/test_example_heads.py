"""The example heads, and the script that trains such heads: what it computes and what it saves."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.train_drafter import run_here, script_modules
from tests.unit.test_example_models import MODELS, run_script

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

KINDS = ("eagle3", "dflash")
ARCHITECTURES = {"eagle3": "LlamaForCausalLMEagle3", "dflash": "DFlashDraftModel"}
MAX_BYTES = 6_000_000
VOCAB, HIDDEN, LENGTH = 96, 32, 24


@pytest.fixture(scope="module")
def scripts():
    with script_modules() as modules:
        yield modules


@pytest.fixture(scope="module")
def target(scripts, tmp_path_factory):
    """A random Llama of four layers whose predictions differ from place to place."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("target")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return scripts.frozen_target.FrozenTarget(folder, scripts.heads.LAYERS, "cpu")


def tokens(batch: int, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)


def new_head(kind, scripts, target):
    """A head that has learnt nothing but whose parts all matter."""
    torch.manual_seed(2)
    layers = scripts.heads.LAYERS
    if kind == "eagle3":
        drafted = torch.arange(1, VOCAB, 2)
        head = scripts.eagle3.Eagle3(target.config, layers, 40, drafted)
    else:
        head = scripts.dflash.DFlash(target.config, layers, 40)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(parameter.mean(), 0.2)
    return head


class TestExampleHeads:
    def test_take_at_most_6_mb(self):
        files = [path for kind in KINDS for path in (MODELS / kind).iterdir()]
        assert {path.name for path in files} == {
            "config.json",
            "model.safetensors",
            "metrics.json",
        }
        assert sum(path.stat().st_size for path in files) <= MAX_BYTES

    @pytest.mark.parametrize("kind", KINDS)
    def test_vllm_knows_their_method_and_architecture(self, kind):
        config = pytest.importorskip("vllm.config")
        speculative = config.SpeculativeConfig(
            method=kind,
            model=str(MODELS / kind),
            num_speculative_tokens=4,
            target_model_config=config.ModelConfig(str(MODELS / "target")),
            target_parallel_config=config.ParallelConfig(),
        )
        draft = speculative.draft_model_config
        assert draft.architectures == [ARCHITECTURES[kind]]
        architecture = draft.registry.resolve_model_cls(draft.architectures, draft)[1]
        assert architecture == ARCHITECTURES[kind]

    @pytest.mark.parametrize("kind", KINDS)
    def test_vllms_runner_takes_the_layers_that_they_learnt_from(self, kind, scripts):
        utils = pytest.importorskip("vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils")
        config = transformers.AutoConfig.from_pretrained(MODELS / kind)
        draft = SimpleNamespace(hf_config=config)
        speculative = SimpleNamespace(draft_model_config=draft)
        assert utils.get_eagle3_aux_layers_from_config(speculative) == scripts.heads.LAYERS

    @pytest.mark.parametrize("kind", KINDS)
    def test_load_in_the_script_with_bfloat16_weights(self, kind, scripts):
        safetensors = pytest.importorskip("safetensors.torch")
        weights = safetensors.load_file(MODELS / kind / "model.safetensors")
        whole = {name for name, tensor in weights.items() if not tensor.is_floating_point()}
        assert whole == ({"d2t", "t2d"} if kind == "eagle3" else set())
        assert all(weights[name].dtype == torch.bfloat16 for name in set(weights) - whole)
        layers = scripts.heads.LAYERS
        target = scripts.frozen_target.FrozenTarget(MODELS / "target", layers, "cpu")
        head = scripts.heads.load_head(MODELS / kind, target, "cpu")
        assert head.config() == json.loads((MODELS / kind / "config.json").read_text("utf-8"))
        metrics = json.loads((MODELS / kind / "metrics.json").read_text("utf-8"))
        assert metrics["parameters"] == sum(one.numel() for one in head.parameters())

    def test_the_draft_vocabulary_is_of_different_tokens_of_the_target(self):
        safetensors = pytest.importorskip("safetensors.torch")
        weights = safetensors.load_file(MODELS / "eagle3" / "model.safetensors")
        drafted = weights["d2t"] + torch.arange(len(weights["d2t"]))
        assert (drafted.diff() > 0).all()
        assert weights["t2d"].nonzero()[:, 0].tolist() == drafted.tolist()


class TestCard:
    @pytest.fixture
    def card(self):
        return (MODELS / "README.md").read_text("utf-8")

    @pytest.fixture
    def evaluation(self):
        return json.loads((MODELS / "heads.json").read_text("utf-8"))

    def test_shows_the_evaluation(self, card, evaluation):
        assert set(evaluation["quality"]) == {"draft", *KINDS}
        for chains in evaluation["quality"].values():
            assert set(chains) == {"4", "7"}
            for count, chain in chains.items():
                mean, error = chain["tokens_per_step"].values()
                depths = " ".join(f"{share:.2f}" for share in chain["acceptance"])
                assert f"| {count} | {mean:.3f} | {error:.3f} | {depths} |" in card

    def test_gives_the_command_of_the_evaluation(self, card, evaluation):
        # The script had another name when these heads were measured.
        command = " ".join(evaluation["provenance"]["argv"]).replace("train_pair", "train_drafter")
        assert f"python {command}\n" in card

    @pytest.mark.parametrize("kind", KINDS)
    def test_shows_the_last_loss_and_the_parameters(self, kind, card):
        metrics = json.loads((MODELS / kind / "metrics.json").read_text("utf-8"))
        last = metrics["validation_loss"][-1]
        assert f"{last['loss']:.3f} after {last['step']}" in card
        assert f"{metrics['parameters']:,}" in card

    def test_heads_draft_better_than_the_draft(self, evaluation):
        """At the same length; or nobody would want them."""
        means = {
            name: chains["4"]["tokens_per_step"]["mean"]
            for name, chains in evaluation["quality"].items()
        }
        assert means["eagle3"] > means["draft"]


class TestTarget:
    def test_features_are_the_layers_outputs_before_any_norm(self, target):
        batch = tokens(2)
        outputs = target._model(batch, output_hidden_states=True)
        hidden = outputs.hidden_states
        features = target(batch).features.split(HIDDEN, -1)
        assert torch.equal(features[0], hidden[1])
        assert torch.equal(features[1], hidden[2])
        # What transformers calls the last has been normed.
        torch.testing.assert_close(target._model.model.norm(features[2]), hidden[4])

    def test_writes_greedily_what_transformers_does(self, target):
        beginnings = tokens(3, 8)
        ours = target.write(beginnings, 20, torch.zeros(3))
        theirs = target._model.generate(
            beginnings, max_new_tokens=20, do_sample=False, eos_token_id=None,
            attention_mask=torch.ones_like(beginnings),
        )  # fmt: skip
        assert torch.equal(ours, theirs)

    def test_writes_by_its_law(self, target):
        torch.manual_seed(3)
        beginnings = tokens(1, 8).expand(4000, -1)
        drawn = target.write(beginnings, 1, torch.ones(4000))[:, -1]
        law = target(beginnings[:1]).log_probabilities[0, -1].exp()
        shares = torch.bincount(drawn, minlength=VOCAB) / 4000
        assert (shares - law).abs().sum() / 2 < 0.08
        assert law.max() < 0.9  # or the law would be no test

    def test_continuations_end_before_an_end(self, target, monkeypatch):
        row = torch.tensor([5, 6, 7, 2, 8, 2])
        monkeypatch.setattr(target, "write", lambda *_: torch.stack((row, row.clamp(3))))
        first, second = target.continue_greedily(row[None, :2].expand(2, -1), 4)
        assert first.tolist() == [5, 6, 7]
        assert second.tolist() == row.clamp(3).tolist()


@pytest.mark.parametrize("kind", KINDS)
class TestHeads:
    def test_loss_on_a_batch_falls(self, kind, scripts, target):
        head = new_head(kind, scripts, target)
        head.start_from(target)
        torch.manual_seed(4)
        optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
        batch = tokens(4)
        losses = []
        for _ in range(40):
            loss = head.loss(target, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        # The target's own uncertainty remains.
        assert max(losses[-5:]) < 0.9 * losses[0]

    def test_every_weight_learns(self, kind, scripts, target):
        head = new_head(kind, scripts, target)
        head.loss(target, tokens(2)).backward()
        assert all(one.grad.abs().max() > 0 for one in head.parameters())

    def test_drafts_do_not_depend_on_what_follows(self, kind, scripts, target):
        head = new_head(kind, scripts, target).eval()
        text = tokens(1)[0]
        whole = head.draft(target, text, target(text[None]), 5)
        assert whole.shape == (LENGTH - 1, 5)
        assert len(set(map(tuple, whole.tolist()))) > 5  # or nothing would differ
        for end in (2, 9, LENGTH - 1):
            part = head.draft(target, text[:end], target(text[None, :end]), 5)
            assert torch.equal(part, whole[: end - 1])

    def test_saved_heads_draft_the_same(self, kind, scripts, target, tmp_path):
        head = new_head(kind, scripts, target).to(torch.bfloat16).float().eval()
        text = tokens(1)[0]
        scripts.heads.save_head(head, tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
        loaded = scripts.heads.load_head(tmp_path, target, "cpu")
        frozen = target(text[None])
        assert torch.equal(
            loaded.draft(target, text, frozen, 4), head.draft(target, text, frozen, 4)
        )


class TestEagle3:
    def test_chains_are_the_layer_run_on_one_text_after_another(self, scripts, target):
        """The third draft of every chain, by causal attention over the chain written out."""
        head = new_head("eagle3", scripts, target)
        text = tokens(1)[0]
        features = target(text[None]).features
        chains = scripts.eagle3.Chains(head, target, features[:, :-3])
        logits = [chains.extend(text[None, 1 + step : LENGTH - 2 + step]) for step in range(3)]
        for start in (0, 7, LENGTH - 4):
            hidden = list(head.fc(features[0, : start + 1]))
            for step in range(3):
                states = self.causal(head, target, hidden, text[1 : start + 2 + step])
                drafted = head.lm_head(head.norm(states[-1]))
                torch.testing.assert_close(drafted, logits[step][0, start])
                hidden.append(states[-1])

    @staticmethod
    def causal(head, target, hidden, inputs):
        """What the layer gives at every position of one text, ``[tokens, hidden]``."""
        layer, size = head.midlayer, target.config.head_dim
        hidden = torch.stack(hidden)
        mixed = torch.cat(
            (layer.input_layernorm(target.embed(inputs)), layer.hidden_norm(hidden)), -1
        )
        heads = [
            layer.self_attn[name](mixed).view(len(inputs), -1, size).transpose(0, 1)[None]
            for name in ("q_proj", "k_proj", "v_proj")
        ]
        rotary = target._model.model.rotary_emb
        cosine, sine = rotary(hidden, torch.arange(len(inputs))[None])
        apply = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
        query, key = apply(heads[0], heads[1], cosine, sine)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, heads[2], is_causal=True
        )
        joined = attended[0].transpose(0, 1).reshape(len(inputs), -1)
        hidden = hidden + layer.self_attn["o_proj"](joined)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def test_drafts_only_its_vocabulary(self, scripts, target):
        head = new_head("eagle3", scripts, target)
        text = tokens(1)[0]
        assert (head.draft(target, text, target(text[None]), 3) % 2 == 1).all()

    def test_vocabulary_is_of_the_most_frequent_tokens(self, scripts):
        seen = np.array([5, 5, 5, 1, 7, 7, 2, 2], dtype=np.uint16)
        assert scripts.heads.most_frequent(seen, 9, 3).tolist() == [2, 5, 7]


class TestDFlash:
    def test_blocks_see_nothing_of_each_other(self, scripts, target):
        head = new_head("dflash", scripts, target)
        text = tokens(1)
        features = target(text).features

        def logits(anchors, counts):
            places = torch.tensor([anchors]), torch.tensor([counts])
            return head.logits(target, text, features, *places, 5)[0]

        both = logits([4, 15], [5, 3])
        torch.testing.assert_close(both[:1], logits([4], [5]))
        torch.testing.assert_close(both[1:, :3], logits([15], [3])[:, :3])

    def test_drafts_of_a_block_see_all_of_it(self, scripts, target):
        """No causal mask: with more masks behind them, the first drafts change."""
        head = new_head("dflash", scripts, target)
        text = tokens(1)
        features = target(text).features
        short, long = (
            head.logits(target, text, features, torch.tensor([[9]]), torch.tensor([[count]]), count)
            for count in (2, 6)
        )
        assert (short[0, 0, 0] - long[0, 0, 0]).abs().max() > 1e-3


class TestChains:
    def test_accepted_drafts_end_at_the_first_wrong_one(self, scripts):
        text = torch.tensor([9, 8, 1, 2, 3, 4, 5])
        drafts = torch.tensor([[1, 2], [2, 0], [0, 4], [4, 5], [5, 0], [0, 0]])
        assert scripts.head_quality.accepted(drafts, text).tolist() == [2, 1, 0, 2]

    def test_steps_follow_each_other(self, scripts):
        lengths = np.array([9, 1, 9, 0, 2, 9, 9, 1])
        assert scripts.head_quality.walk(lengths, prompt_length=2).tolist() == [2, 1, 3, 2]

    def test_the_standalone_drafts_chains_are_what_it_generates(self, scripts):
        draft = scripts.head_quality.StandaloneDraft(MODELS / "draft", "cpu")
        text = torch.arange(300, 330)
        drafts = draft.draft(None, text, None, 4)
        assert drafts.shape == (29, 4)
        for end in (2, 15, 30):
            generated = draft._model.generate(
                text[None, :end], max_new_tokens=4, do_sample=False, eos_token_id=None,
                attention_mask=torch.ones_like(text[None, :end]),
            )  # fmt: skip
            assert drafts[end - 2].tolist() == generated[0, end:].tolist()


def test_no_text_with_a_prompt_is_learnt_from(scripts):
    prompts = ["tail = 1\nthe longest of its lines\nx =", "one line alone"]
    texts = [
        "the longest of its lines",
        "a\ntail = 1\nthe longest of its lines\nx = 3",
        "there is one line alone here",
        "nothing",
    ]
    kept = list(scripts.head_data.without_prompts(iter(texts), prompts))
    assert kept == ["the longest of its lines", "nothing"]


def call(*arguments, run=run_here):
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A pair with two heads that the commands trained, for two steps each."""
    folder = tmp_path_factory.mktemp("heads")
    for name in ("target", "draft", "prompts.jsonl"):
        (folder / name).symlink_to(MODELS / name)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    source = ["--folder", stdlib / "email", "--folder", stdlib / "asyncio"]
    call("head-data", "--pair", folder, "--out", folder / "data", *source,
         "--sequences", "8", "--sequence-length", "32", run=run_script)  # fmt: skip
    for kind in KINDS:
        call("train-head", kind, "--pair", folder, "--data", folder / "data",
             "--out", folder / kind, "--steps", "2", "--batch-size", "4",
             "--sequence-length", "32")  # fmt: skip
    return folder


@pytest.mark.slow
class TestCommands:
    def test_data_is_of_people_and_the_target_in_turn(self, trained):
        data = np.fromfile(trained / "data" / "training.bin", dtype=np.uint16).reshape(16, 32)
        assert np.array_equal(data[::2, :8], data[1::2, :8])
        assert (data[::2] != data[1::2]).any(-1).all()

    @pytest.mark.parametrize("kind", KINDS)
    def test_leave_a_head_and_its_record(self, kind, trained):
        names = {path.name for path in (trained / kind).iterdir()}
        assert names == {"config.json", "model.safetensors", "metrics.json"}
        metrics = json.loads((trained / kind / "metrics.json").read_text("utf-8"))
        assert [point["step"] for point in metrics["validation_loss"]] == [2]

    def test_evaluate_measures_the_draft_and_both_heads(self, trained):
        lines = (MODELS / "prompts.jsonl").read_text("utf-8").splitlines()[:2]
        (trained / "two.jsonl").write_text("\n".join(lines), "utf-8")
        call("evaluate-heads", trained, "--prompts", trained / "two.jsonl",
             "--out", trained / "quality.json")  # fmt: skip
        quality = json.loads((trained / "quality.json").read_text("utf-8"))["quality"]
        assert set(quality) == {"draft", *KINDS}
        for chains in quality.values():
            for count, chain in chains.items():
                accepted = sum(chain["acceptance"])
                assert chain["tokens_per_step"]["mean"] == pytest.approx(1 + accepted)
                assert len(chain["acceptance"]) == int(count)

    def test_without_data_says_what_to_run(self, trained, tmp_path):
        result = run_here("train-head", "eagle3", "--pair", trained, "--data", tmp_path,
                          "--out", tmp_path / "head")  # fmt: skip
        assert result.returncode == 1
        assert "head-data" in result.stderr
