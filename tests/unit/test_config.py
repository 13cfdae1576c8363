"""The configuration: what is accepted, and the error for each wrong thing."""

import json

import pytest

from sequoia_vllm.config import ConfigError, SequoiaConfig, TreeSpec
from sequoia_vllm.tree import TokenTree
from sequoia_vllm.verification.methods import method_names

ACCEPTED = [
    "sequoia",
    {"method": "sequoia", "model": "draft", "tree": "auto"},
    {"method": "sequoia", "model": "draft", "tree": "h100-llama"},
    {"method": "sequoia", "model": "draft", "tree": "path/to/tree.json"},
    {"method": "sequoia", "model": "draft", "tree": {"size": 16, "depth": 4}},
    {"method": "sequoia", "model": "draft", "tree": {"parents": [-1, 0, 0, 1]}},
    {"method": "sequoia", "model": "draft", "tree": TokenTree.chain(3).to_dict()},
    {"method": "sequoia", "tree": {"size": 9, "branch": 3}, "acceptance": [0.6, 0.2]},
    {"method": "sequoia", "acceptance": [[0.6, 0.2], [0.5, 0.1]]},
    {"method": "sequoia", "acceptance": "acceptance.json"},
    {"method": "sequoia", "num_speculative_tokens": 7, "quantization": "awq"},
    {"method": "sequoia", "draft_vocabulary": 32000},
    {"method": "sequoia", "draft_vocabulary": [7, 0, 3]},
    {"method": "sequoia", "num-speculative-tokens": 7, "draft-tensor-parallel-size": 2},
    {"method": "sequoia", "num_speculative_tokens_per_batch_size": [[1, 4, 15], [5, 64, 0]]},
]

REFUSED = [
    ({"method": "draft_model"}, "method: Input should be 'sequoia'"),
    ({"method": "sequoia", "modle": "d"}, "unknown key 'modle': did you mean 'model'?"),
    ({"method": "sequoia", "zzz": 1}, "unknown key 'zzz': valid keys are acceptance, "),
    ({"method": "sequoia", "prompt_lookup_max": 3}, "unknown key 'prompt_lookup_max'"),
    ({"method": "sequoia", "model": 7}, "model: Input should be a valid string"),
    ({"method": "sequoia", "tree": {"size": 8, "dept": 3}}, "did you mean 'depth'?"),
    ({"method": "sequoia", "tree": {"parents": [-1, 1]}}, "tree: node 1 has parent 1"),
    ({"method": "sequoia", "tree": {"parents": 3}}, "\"parents\" must be a list of node numbers"),
    ({"method": "sequoia", "tree": {"depth": 3}}, "tree.size: Field required"),
    ({"method": "sequoia", "tree": {"size": 1}}, "tree.size: Input should be greater than or"),
    ({"method": "sequoia", "tree": {"size": 5000}}, "tree.size: Input should be less than or"),
    ({"method": "sequoia", "tree": {"size": "big"}}, "tree.size: Input should be a valid integer"),
    ({"method": "sequoia", "tree": {"size": 8, "depth": 0}}, "tree.depth: Input should be greater"),
    ({"method": "sequoia", "num_speculative_tokens": 0}, "num_speculative_tokens: Input should be"),
    ({"method": "sequoia", "max_model_len": 0}, "max_model_len: Input should be greater"),
    ({"method": "sequoia", "draft_tensor_parallel_size": 0}, "draft_tensor_parallel_size: Input"),
    ({"method": "sequoia", "draft_vocabulary": 0}, "draft_vocabulary: Input should be greater"),
    ({"method": "sequoia", "draft_vocabulary": []}, "draft_vocabulary: List should have at least"),
    ({"method": "sequoia", "draft_vocabulary": [3, -1]}, "draft_vocabulary.1: Input should be gr"),
    ({"method": "sequoia", "num_speculative_tokens_per_batch_size": 4},
     "num_speculative_tokens_per_batch_size: Input should be a valid list"),
    *(({"method": "sequoia", "num_speculative_tokens_per_batch_size": ranges}, message)
      for ranges, message in [
          ([], "num_speculative_tokens_per_batch_size: needs a range, [first, last, drafts]"),
          ([[1, 4]], "num_speculative_tokens_per_batch_size.0.2: Field required"),
          ([[1, 4, 1.5]], "num_speculative_tokens_per_batch_size.0.2: Input should be a valid int"),
          ([[0, 4, 3]], "[0, 4, 3] begins at batch size 0: the smallest is 1"),
          ([[1, 4, -3]], "[1, 4, -3] has -3 drafts: give 0 to turn speculation off"),
          ([[4, 1, 3]], "[4, 1, 3] ends before it begins"),
          ([[1, 4, 3], [4, 8, 2]], "[4, 8, 2] repeats batch size 4: give each batch size once"),
          ([[1, 4, 3], [6, 8, 2]], "no range has batch size 5, before [6, 8, 2]"),
          ([[3, 8, 2]], "no range has batch size 1 to 2, before [3, 8, 2]"),
      ]),
]  # fmt: skip


@pytest.mark.parametrize("request_", ACCEPTED, ids=json.dumps)
def test_accepted(request_):
    assert SequoiaConfig.parse(request_).method == "sequoia"


@pytest.mark.parametrize(("request_", "message"), REFUSED, ids=lambda value: json.dumps(value))
def test_refused_by_name(request_, message):
    with pytest.raises(ConfigError) as error:
        SequoiaConfig.parse(request_)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_several_problems_are_reported_together():
    with pytest.raises(ConfigError) as error:
        SequoiaConfig.parse({"method": "sequoia", "model": 1, "max_model_len": 0})
    assert "model: " in str(error.value)
    assert "max_model_len: " in str(error.value)


def test_messages_stay_short():
    ranges = [["x", "y", "z"]] * 1000
    with pytest.raises(ConfigError) as error:
        SequoiaConfig.parse({"method": "sequoia", "num_speculative_tokens_per_batch_size": ranges})
    assert str(error.value).count("Input should be") == 8
    assert str(error.value).endswith("; and more")
    with pytest.raises(ConfigError) as error:
        SequoiaConfig.parse({"method": "sequoia", "k" * 10**6: 1})
    assert len(str(error.value)) < 600


def test_a_key_in_both_spellings_is_given_twice():
    keys = {"max-model-len": 8, "max_model_len": 9}
    with pytest.raises(ConfigError, match="'max_model_len' is given twice"):
        SequoiaConfig.parse({"method": "sequoia", **keys})


def test_a_wrong_tree_is_reported_once():
    with pytest.raises(ConfigError) as error:
        SequoiaConfig.parse({"method": "sequoia", "tree": {"size": 16, "dept": 4}})
    assert str(error.value).endswith("tree: unknown key 'dept': did you mean 'depth'?")
    assert ";" not in str(error.value)
    with pytest.raises(ConfigError, match='"auto", a name, a path'):
        SequoiaConfig.parse({"method": "sequoia", "tree": 16})


def test_ranges_of_batch_sizes_may_come_in_any_order():
    ranges = {"num_speculative_tokens_per_batch_size": [[5, 64, 0], [1, 4, 15]]}
    config = SequoiaConfig.parse({"method": "sequoia", **ranges})
    assert config.num_speculative_tokens_per_batch_size == [(1, 4, 15), (5, 64, 0)]


def test_every_field_is_documented():
    for model in (SequoiaConfig, TreeSpec):
        assert all(field.description for field in model.model_fields.values())


def test_draft_keys_are_vllms_own():
    config = SequoiaConfig.parse(
        {"method": "sequoia", "model": "d", "tree": {"size": 4}, "revision": "r",
         "num_speculative_tokens": 3, "acceptance": [0.5], "draft_vocabulary": 9}
    )  # fmt: skip
    assert config.draft_keys() == {"revision": "r"}


def test_tokens_to_draft_may_lie_in_a_file(tmp_path):
    file = tmp_path / "tokens.json"
    config = SequoiaConfig.parse({"draft_vocabulary": str(file)})
    with pytest.raises(ConfigError, match="cannot read draft_vocabulary file"):
        config.loaded()
    file.write_text("[5, 2]")
    assert config.loaded().draft_vocabulary == [5, 2]
    for wrong in ("[5, -5]", '{"tokens": 5}', "[1.5]"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="draft_vocabulary"):
            config.loaded()


def test_verification_names_a_registered_method():
    for name in method_names():
        assert SequoiaConfig.parse({"method": "sequoia", "verification": name}).verification == name
    with pytest.raises(ConfigError, match="verification: there is no method 'block': give one of "):
        SequoiaConfig.parse({"method": "sequoia", "verification": "block"})
