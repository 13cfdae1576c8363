"""``sequoia-vllm advise``: what it reads, predicts and says. No engine is started."""

import json
from pathlib import Path

import pytest

from sequoia_vllm.drafters.registry import known_for
from sequoia_vllm.hardware.choose import choose_tree
from sequoia_vllm.hardware.cost import CostModel
from sequoia_vllm.hardware.device import identify
from sequoia_vllm.hardware.models import published_shape
from sequoia_vllm.hardware.roofline import roofline_profile
from sequoia_vllm.library.files import AcceptanceFile
from sequoia_vllm.library.tree_library import shipped_directory
from sequoia_vllm.tree import MOST_RECURRENT_NODES
from tests.support.commands import command, in_words
from tests.support.families import MIXTURES
from tests.support.models import save_config

ROOT = Path(__file__).parents[2]
PAIR = str(ROOT / "examples" / "models" / "target")
LLAMA, DRAFT = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"


@pytest.fixture(autouse=True)
def no_hub_and_no_own_trees(monkeypatch, library):
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: 1 / 0)


def advise(*arguments: str, code: int = 0) -> str:
    return in_words(command("advise", *arguments, code=code).output)


def advice(*arguments: str):
    return json.loads(command("advise", *arguments, "--json").stdout)


PREDICTIONS = (ROOT / "docs" / "predictions.md").read_text(encoding="utf-8")


def gemma(**text) -> dict:
    """The configuration of a Gemma 3 that reads images."""
    common = {"model_type": "gemma3_text", "vocab_size": 262208, "tie_word_embeddings": True}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "text_config": common | text,
    }  # fmt: skip


GEMMAS: dict[str, dict] = {
    "google/gemma-3-27b-it": gemma(
        hidden_size=5376, intermediate_size=21504, num_hidden_layers=62, num_attention_heads=32,
        num_key_value_heads=16, head_dim=128,
    ),
    "google/gemma-3-12b-it": gemma(
        hidden_size=3840, intermediate_size=15360, num_hidden_layers=48, num_attention_heads=16,
        num_key_value_heads=8, head_dim=256,
    ),
    "google/gemma-3-270m-it": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 640,
        "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("row", [x for x in PREDICTIONS.splitlines() if "(predicted) | " in x])
def test_recipes_are_predictions(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, config in GEMMAS.items():
        save_config(Path(name), config)
    model, draft, hardware, gains, plain = row.strip("| ").split(" | ")
    found = advice(model, "--draft-model", draft, "--device", hardware.split()[1])["batches"]
    assert gains == ", ".join(f"{x['tree_speedup']:.2f}x" for x in found) + " (predicted)"
    assert plain == ", ".join(f"{x['plain_tokens_per_second']:,.0f}" for x in found)


QWEN_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {"depth": 27},
    "text_config": {
        "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408,
        "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4,
        "head_dim": 256, "vocab_size": 248320, "full_attention_interval": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "mtp_num_hidden_layers": 1,
    },
}  # fmt: skip
QWEN_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
FP8_BY_CHANNEL = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
}
ON_THE_HUB: dict[str, dict] = {
    **GEMMAS, "Qwen/Qwen3.5-27B": QWEN_27B, "Qwen/Qwen3.8-27B": QWEN_27B,
    "Qwen/Qwen3-8B-FP8": QWEN_8B | {"quantization_config": {"quant_method": "fp8"}},
    "Qwen/Qwen3-8B-AWQ": QWEN_8B | {"quantization_config": {"quant_method": "awq", "bits": 4}},
    "RedHatAI/gemma-3-12b-it-FP8-dynamic": {
        **GEMMAS["google/gemma-3-12b-it"], "quantization_config": FP8_BY_CHANNEL
    },
    "RedHatAI/Qwen3-8B-speculator.eagle3": QWEN_8B | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "num_hidden_layers": 1, "draft_vocab_size": 32000,
    },
}  # fmt: skip


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Configurations of published models."""
    monkeypatch.chdir(tmp_path)
    for name, config in ON_THE_HUB.items():
        save_config(Path(name), config)


def typed() -> list[list[str]]:
    rows = PREDICTIONS.partition("### Type this")[2].partition("\n#")[0].splitlines()
    return [row.strip("| ").split(" | ") for row in rows if row.startswith("| ") and "`vllm" in row]


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("row", typed(), ids=lambda row: row[0])
def test_what_to_type_is_what_it_prints(row):
    model, device, line, gains = row
    found = advice(model, "--device", device.split()[1])
    assert line == f"`{found['command']}`"
    assert device.split()[0] == str(found["pair"]["tensor_parallel_size"])
    speeds = ", ".join(f"{x['tree_speedup']:.2f}x" for x in found["batches"])
    assert gains == f"{speeds} (predicted)"


@pytest.mark.usefixtures("hub")
def test_models_that_do_not_fit_one_device():
    gemma, fix = ["google/gemma-3-12b-it", "--device"], "quantise, or use 2"
    found = advice(*gemma, "rtx-4090")
    assert found["pair"]["tensor_parallel_size"] == 2
    said = "do not fit 1 device of NVIDIA GeForce RTX 4090: quantise, or use 2, as here"
    assert said in found["devices"]
    assert said in advise(*gemma, "rtx-4090")
    one = advise(*gemma, "rtx-4090", "--tensor-parallel-size", "1", code=2)
    assert f"{fix} (--tensor-parallel-size 2)" in one
    four = advice(*gemma, "rtx-4090", "--tensor-parallel-size", "4")
    assert (four["pair"]["tensor_parallel_size"], four["devices"]) == (4, None)
    assert "--tensor-parallel-size 4" in four["command"]
    assert advice(*gemma, "h100")["devices"] is None


def test_devices_without_bfloat16():
    found = advice(
        "meta-llama/Llama-3.2-1B", "--draft-model", "JackFram/llama-68m", "--device", "t4"
    )
    assert found["pair"]["dtype"] == "float16"
    assert " --dtype float16" in found["command"]


def test_what_is_known_of_a_name_comes_before_an_error():
    """Without a network: it is in the package."""
    said = advise("Qwen/Qwen3-4B", "--device", "h100", code=2)
    assert said.startswith("Qwen3")
    assert "AngelSlim/Qwen3-4B_eagle3 (EAGLE-3 head, the default on GPUs)" in said
    assert said.index("EAGLE-3 head") < said.index("does not give 'Qwen/Qwen3-4B'")


def test_a_known_head_that_cannot_be_read_is_said_in_one_line(tmp_path):
    """Of three that are known."""
    target = save_config(tmp_path / "Qwen3-8B", QWEN_8B)
    said = advise(target, "--device", "h100")
    head = "RedHatAI/Qwen3-8B-speculator.eagle3"
    assert said.count("note:") == said.count("engines that can read") == 1
    assert f"engines that can read {head} draft with it; here it cannot be read" in said


def test_drafts_without_weights_can_be_asked_for():
    found = advice(LLAMA, "--draft-model", "lookup", "--device", "h100")
    config = '{"method": "sequoia", "drafter": "lookup"}'
    assert found["command"] == f"vllm serve {LLAMA} --speculative-config '{config}'"
    assert found["conclusion"].startswith("The engine drafts without one, from the request's text.")
    assert found["conclusion"].endswith(f"bench --model {LLAMA} --draft-model lookup")


def test_a_published_pair_is_predicted_from_the_datasheet():
    found = advice(LLAMA, "--device", "h100", "--batch-sizes", "32,1")
    assert found["pair"]["draft"] == DRAFT
    assert [row["batch_size"] for row in found["batches"]] == [1, 32]
    one, many = found["batches"]
    times = roofline_profile(identify("h100").spec, published_shape(LLAMA), published_shape(DRAFT))
    vector = AcceptanceFile.load(shipped_directory() / "acceptance" / "shipped.json").vector
    assert one["plain_tokens_per_second"] == pytest.approx(1 / CostModel(times).plain_seconds(1))
    chain = choose_tree(vector, times, 1, max_size=9, max_branch=1)
    assert one["chain_drafts"] == chain.num_speculative_tokens
    assert one["tree_speedup"] > one["chain_speedup"] > 1
    assert one["tree_nodes"] > many["tree_nodes"] > 1
    assert not one["measured"]
    assert "roofline, not measured" in found["times"]
    assert found["acceptance"].startswith("assumed, as this pair was not measured")
    assert found["conclusion"].startswith("By these predictions drafting pays: up to ")


def test_the_documents_example_is_what_it_prints():
    command = PREDICTIONS.split("$ sequoia-vllm advise ")[1].split("\n")[0]
    example = PREDICTIONS.split("```\nbatch ")[1].split("```")[0]
    assert " ".join(example.split()) in advise(*command.split())


def test_a_measured_pair_is_marked():
    found = advice(PAIR, "--device", "AMD EPYC", "--batch", "1")
    assert found["acceptance"].startswith("measured on this pair")
    assert found["times"] == "measured: AMD EPYC, 256 tokens of context"
    [row] = found["batches"]
    assert row["measured"]
    assert (row["tree_nodes"], row["tree_speedup"]) == (1, 1.0)
    assert found["command"] == f"vllm serve {PAIR}"
    assert found["conclusion"].startswith("By these measurements drafting is slower")


def test_times_of_another_cpu_are_predictions():
    """And measured times without acceptance."""
    found = advice(PAIR, "--device", "Intel(R) Xeon(R) Processor", "--batch", "1")
    assert found["times"] == (
        "measured: AMD EPYC, 256 tokens of context; not Intel(R) Xeon(R) Processor, "
        "so speeds here are predictions"
    )
    assert not found["batches"][0]["measured"]
    assert found["conclusion"].startswith("By these predictions")
    found = advice("meta-llama/Llama-2-7b-hf", "--device", "h100", "--batch", "1")
    assert found["times"].startswith("measured: NVIDIA H100")
    assert found["acceptance"].startswith("assumed")
    assert not found["batches"][0]["measured"]


def test_large_models_take_more_devices():
    found = advice("meta-llama/Llama-3.1-70B", "--device", "h100", "--batch", "1")
    assert found["pair"]["tensor_parallel_size"] == 4
    assert "--tensor-parallel-size 4" in found["command"]
    assert "do not fit 8 devices" in advise("meta-llama/Llama-3.1-405B", "--device", "l4", code=2)


EAGLE_3 = {
    "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1,
    "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "draft_vocab_size": 32000,
}  # fmt: skip


def test_mixtures_of_experts_are_predicted(tmp_path):
    """Against a dense target of the parameters of one token, trees are smaller and gain less."""
    config = MIXTURES["Qwen3-30B-A3B"][0]
    targets = config, config | {"num_experts": None, "intermediate_size": 8 * 768}
    options = ["--draft-model", save_config(tmp_path / "head", EAGLE_3), "--device", "h100"]
    sparse, dense = (
        advice(save_config(tmp_path / str(number), target), *options, "--batch", "1")["batches"][0]
        for number, target in enumerate(targets)
    )
    speed = "plain_tokens_per_second"
    assert sparse[speed] == pytest.approx(dense[speed], rel=0.02)
    assert sparse["tree_nodes"] < dense["tree_nodes"]
    assert sparse["tree_speedup"] < dense["tree_speedup"]


def test_heads_that_are_known_for_a_mixture_are_taken(tmp_path, monkeypatch):
    """No draft model is known for it. Heads need a GPU."""
    head = "AngelSlim/Qwen3-a3B_eagle3"
    target = save_config(tmp_path / "Qwen3-30B-A3B", MIXTURES["Qwen3-30B-A3B"][0])
    save_config(tmp_path / head, EAGLE_3)
    known = [pair for pair in known_for(target) if pair[0].kind == "eagle3"]
    assert known[0][1].draft == head
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sequoia_vllm.cli.measuring.known_for", lambda name: known)
    assert advice(target, "--device", "h100", "--batch", "1")["pair"]["draft"] == head
    assert "No draft is known" in advise(target, "--device", "AMD EPYC")


def test_without_a_known_draft_the_command_drafts_without_one(tmp_path):
    config = MIXTURES["DeepSeek-V3"][0] | {"quantization_config": {"quant_method": "fp8"}}
    target = save_config(tmp_path / "DeepSeek-V3", config)
    found = advice(target, "--device", "h200")
    assert found["command"] == (
        f"vllm serve {target} --tensor-parallel-size 8 --speculative-config sequoia"
    )
    assert found["batches"] == []
    assert "is not predicted; to measure it: sequoia-vllm bench --model" in found["conclusion"]
    shown = advise(target, "--device", "h200")
    assert shown.startswith("DeepSeek V2, V3, R1 (DeepseekV3ForCausalLM): runs as a target")
    assert shown.endswith(f"{found['command']} {found['conclusion']}")
    # The published one has a layer of its own, with latents.
    own = save_config(tmp_path / "DeepSeek-R1", {**config, "num_nextn_predict_layers": 1})
    found = advice(own, "--device", "h200", "--batch-sizes", "1")
    assert '{"method": "sequoia", "drafter": "mtp"}' in found["command"]
    assert found["batches"][0]["tree_speedup"] > 1.1


def test_a_targets_own_mtp_layer_is_taken_where_no_draft_is_known(tmp_path):
    """Recurrent layers take no larger trees."""
    target = save_config(tmp_path / "Qwen3.8-27B", QWEN_27B)
    found = advice(target, "--device", "h100", "--batch-sizes", "1,32")
    one, many = found["batches"]
    assert one["plain_tokens_per_second"] == pytest.approx(3.35e12 / 54e9, rel=0.3)
    assert one["tree_speedup"] > one["chain_speedup"] > 1
    assert many["tree_nodes"] <= one["tree_nodes"] <= MOST_RECURRENT_NODES
    assert '{"method": "sequoia", "drafter": "mtp"}' in found["command"]
    layer = "with its own multi-token prediction (MTP) layer on h100"
    said = advise(target, "--device", "h100")
    assert layer in said
    assert said.count("note:") == 1
    assert "is known: a multi-token prediction (MTP) layer of its own drafts" in said
    assert "layers are for GPUs" in advise(target, "--device", "AMD EPYC", code=2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no/such"], "does not give 'no/such': division by zero; give the path of a folder"),
        ([str(ROOT)], "has no config.json: give the path of a model's folder"),
        ([str(ROOT / "README.md")], f"is a file: give the folder that it lies in, {str(ROOT)!r}"),
        ([LLAMA, "--device", "abacus"], "device 'abacus': name one of a100-40gb"),
        ([LLAMA, "--device", "4090"], "(did you mean rtx-4090?): name one of"),
        ([LLAMA, "--device", "mi300x"], "CUDA GPUs and x86 CPUs, not on AMD Instinct MI300X (use"),
        ([LLAMA, "--device", "cpu"], "tune one (sequoia-vllm tune)"),
        (["openai/gpt-oss-20b", "--batch", "0"], "a batch has at least one request"),
        (["mistralai/none"], "the target 'mistralai/none' is no folder"),
    ],
)
def test_errors_name_the_fix(arguments, said):
    assert said in advise(*arguments, code=2)


def test_configurations_that_say_too_little(tmp_path):
    config = json.loads(Path(PAIR, "config.json").read_text()) | {"num_local_experts": 8}
    said = advise(save_config(tmp_path, config), "--device", "h100", code=2)
    assert "many a token goes to; measure the pair instead (sequoia-vllm tune)" in said
