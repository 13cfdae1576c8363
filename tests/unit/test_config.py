"""The configuration: what is accepted, the error for each wrong thing, and its document.

``python -m tests.unit.test_config`` writes the tables of docs/configuration.md anew.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import BaseModel

from benchmarks import markdown_table
from sequoia_vllm.config import ConfigError, OffloadSpec, SequoiaConfig, TreeSpec
from sequoia_vllm.library.tree_library import TreeLibrary, find_tree, find_vector
from sequoia_vllm.tree import Acceptance, TokenTree

ACCEPTED = [
    {"model": "draft", "tree": "auto"},
    {"model": "draft", "tree": "h100-llama"},
    {"model": "draft", "tree": "path/to/tree.json"},
    {"model": "draft", "tree": {"size": 16, "depth": 4}},
    {"model": "draft", "tree": {"parents": [-1, 0, 0, 1]}},
    {"model": "draft", "tree": TokenTree.chain(3).to_dict()},
    {"tree": {"size": 9, "branch": 3}, "acceptance": [0.6, 0.2]},
    {"acceptance": [[0.6, 0.2], [0.5, 0.1]]},
    {"acceptance": "acceptance.json"},
    {"num_speculative_tokens": 7, "quantization": "awq"},
    {"draft_vocabulary": 32000},
    {"draft_vocabulary": [7, 0, 3]},
    {"num-speculative-tokens": 7, "draft-tensor-parallel-size": 2},
    {"num_speculative_tokens_per_batch_size": [[1, 4, 15], [5, 64, 0]]},
    {"offload": {"directory": "a/disk", "memory_gib": 3}},
]

SCHEDULE = "num_speculative_tokens_per_batch_size"
REFUSED = [
    ({"method": "draft_model"}, "method: Input should be 'sequoia'"),
    ({"modle": "d"}, "unknown key 'modle': did you mean 'model'?"),
    ({"zzz": 1}, "unknown key 'zzz': valid keys are acceptance, "),
    ({"prompt_lookup_max": 3}, "unknown key 'prompt_lookup_max'"),
    ({"max-model-len": 8, "max_model_len": 9}, "'max_model_len' is given twice"),
    ({"model": 7}, "model: Input should be a valid string"),
    ({"tree": 16}, '"auto", a name, a path'),
    ({"tree": {"size": 8, "dept": 3}}, "did you mean 'depth'?"),
    ({"tree": {"parents": [-1, 1]}}, "tree: node 1 has parent 1"),
    ({"tree": {"parents": 3}}, "\"parents\" must be a list of node numbers"),
    ({"tree": {"depth": 3}}, "tree.size: Field required"),
    ({"tree": {"size": 1}}, "tree.size: Input should be greater than or"),
    ({"tree": {"size": 5000}}, "tree.size: Input should be less than or"),
    ({"tree": {"size": "16"}}, "tree.size: Input should be a valid integer, without quotes"),
    ({"adapt": "no"}, "adapt: Input should be true or false, without quotes"),
    ({"retrieval": 1}, "retrieval: Input should be true or false"),
    ({"max_model_len": "2048"}, "max_model_len: Input should be a valid integer, without quotes"),
    ({"offload": {"directory": "/", "memory_gib": "1"}}, "valid number, without quotes"),
    ({SCHEDULE: [["1", 4, 15]]}, f"{SCHEDULE}.0.0: Input should be a valid integer, without"),
    ({"tree": {"size": 8, "depth": 0}}, "tree.depth: Input should be greater"),
    ({"num_speculative_tokens": 0}, "num_speculative_tokens: Input should be"),
    ({"max_model_len": 0}, "max_model_len: Input should be greater"),
    ({"draft_tensor_parallel_size": 0}, "draft_tensor_parallel_size: Input"),
    ({"draft_vocabulary": 0}, "draft_vocabulary: Input should be greater"),
    ({"draft_vocabulary": []}, "draft_vocabulary: List should have at least"),
    ({"draft_vocabulary": [3, -1]}, "draft_vocabulary.1: Input should be gr"),
    ({SCHEDULE: 4}, f"{SCHEDULE}: Input should be a valid list"),
    ({SCHEDULE: []}, f"{SCHEDULE}: needs a range, [first, last, drafts]"),
    ({SCHEDULE: [[1, 4]]}, f"{SCHEDULE}.0.2: Field required"),
    ({SCHEDULE: [[1, 4, 1.5]]}, f"{SCHEDULE}.0.2: Input should be a valid int"),
    ({SCHEDULE: [[0, 4, 3]]}, "[0, 4, 3] begins at batch size 0: the smallest is 1"),
    ({SCHEDULE: [[1, 4, -3]]}, "[1, 4, -3] has -3 drafts: give 0 to turn speculation off"),
    ({SCHEDULE: [[4, 1, 3]]}, "[4, 1, 3] ends before it begins"),
    ({SCHEDULE: [[1, 4, 3], [4, 8, 2]]},
     "[4, 8, 2] repeats batch size 4: give each batch size once"),
    ({SCHEDULE: [[1, 4, 3], [6, 8, 2]]}, "no range has batch size 5, before [6, 8, 2]"),
    ({SCHEDULE: [[3, 8, 2]]}, "no range has batch size 1 to 2, before [3, 8, 2]"),
    ({"verification": "block"}, "verification: there is no method 'block': give one of "),
]  # fmt: skip


def parsed(**keys):
    return SequoiaConfig.parse({"method": "sequoia", **keys})


def refused(**keys) -> str:
    """The error, which is one line."""
    with pytest.raises(ConfigError) as error:
        parsed(**keys)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("keys", ACCEPTED, ids=json.dumps)
def test_accepted(keys):
    assert parsed(**keys).method == SequoiaConfig.parse("sequoia").method == "sequoia"


@pytest.mark.parametrize(("keys", "message"), REFUSED, ids=lambda value: json.dumps(value))
def test_refused_by_name(keys, message):
    assert message in refused(**keys)


def test_several_problems_are_reported_together_and_messages_stay_short():
    said = refused(model=1, max_model_len=0)
    assert "model: " in said
    assert "max_model_len: " in said
    said = refused(num_speculative_tokens_per_batch_size=[["x", "y", "z"]] * 1000)
    assert said.count("Input should be") == 8
    assert said.endswith("; and more")
    assert len(refused(**{"k" * 10**6: 1})) < 600
    said = refused(tree=16, max_model_len=0)
    assert said.endswith("; max_model_len: Input should be greater than or equal to 1")
    # A wrong tree is reported once.
    said = refused(tree={"size": 16, "dept": 4})
    assert said.endswith("tree: unknown key 'dept': did you mean 'depth'?")
    assert ";" not in said


def test_ranges_of_batch_sizes_may_come_in_any_order():
    config = parsed(num_speculative_tokens_per_batch_size=[[5, 64, 0], [1, 4, 15]])
    assert config.num_speculative_tokens_per_batch_size == [(1, 4, 15), (5, 64, 0)]


def test_every_field_is_documented_and_draft_keys_are_vllms_own():
    for model in (SequoiaConfig, TreeSpec):
        assert all(field.description for field in model.model_fields.values())
    config = parsed(
        model="d", tree={"size": 4}, revision="r", num_speculative_tokens=3, acceptance=[0.5],
        draft_vocabulary=9,
    )  # fmt: skip
    assert config.draft_keys() == {"revision": "r"}
    ours = parsed(
        drafter="model", retrieval=False, recycling=False, dynamic_tree=True, adapt=True,
        history=True, verification="traversal", offload={"directory": "/disk"}, max_model_len=9,
    )  # fmt: skip
    assert ours.draft_keys() == {"max_model_len": 9}


def test_what_is_left_to_us():
    schedule = {SCHEDULE: [[1, 4, 15]]}
    assert parsed().adapts
    assert parsed(**schedule, adapt=True).adapts
    assert not parsed(**schedule).adapts
    assert not parsed(adapt=False).adapts
    for keys in ({}, {"tree": "auto"}):
        assert parsed(**keys).is_tree_chosen
        assert not parsed(**keys, acceptance=[0.5]).is_tree_chosen
    assert not parsed(tree="mine").is_tree_chosen


def test_trees_and_vectors_that_are_named_are_loaded(tmp_path):
    file, tree = tmp_path / "mine.json", TokenTree.chain(3)
    tree.save(file)
    found = parsed(tree=str(file)).loaded().tree
    assert (found.title, found.tree) == (f"mine.json: {file}", tree)
    found = parsed(tree={"parents": [-1, 0, 0]}).loaded().tree
    assert (found.title, found.tree.parents) == ("given as parents", (-1, 0, 0))
    name = TreeLibrary().entries()[0].name
    assert parsed(tree=name).loaded().tree == replace(find_tree(name), title=name)
    for nothing in ({}, {"tree": "auto"}, {"tree": {"size": 4}}):
        config = parsed(**nothing)
        assert config.loaded() == config
    vector = tmp_path / "vector.json"
    vector.write_text('{"acceptance": [0.5, 0.25]}')
    for given in (str(vector), [0.5, 0.25], Acceptance.of([0.5, 0.25])):
        assert parsed(acceptance=given).loaded().acceptance == Acceptance.of([0.5, 0.25])
    assert parsed(acceptance="shipped").loaded().acceptance == find_vector("shipped")


def test_dashes_count_as_underscores_and_each_key_is_given_once():
    assert parsed(**{"max-model-len": 8}).max_model_len == 8
    said = refused(**{"max-model-len": 8, "max_model_len": 9})
    assert said == "'max_model_len' is given twice, with dashes and with underscores"


def test_offloaded_layers_have_a_name():
    kept = OffloadSpec(directory="/disk", memory_gib=1.5)
    assert (kept.name, OffloadSpec(directory="/disk").name) == ("disk-1.5gib", "disk-0gib")


@pytest.mark.parametrize(
    ("keys", "problems"),
    [
        ({"offload": 3}, "offload: Input should be a JSON object"),
        ({"tree": 16}, 'tree: Input should be "auto", a name, a path, {"parents": [...]} or '
                       '{"size": n, "depth": d}'),
        ({"model": 1}, "model: Input should be a valid string"),
        ({"verification": "block"},
         "verification: there is no method 'block': give one of sequoia, traversal"),
        ({"modle": 1}, "unknown key 'modle': did you mean 'model'?"),
        ({"tree": {"size": 1}}, "tree.size: Input should be greater than or equal to 2"),
    ],
)  # fmt: skip
def test_the_whole_line_of_a_problem(keys, problems):
    assert refused(**keys) == f"speculative config of method 'sequoia': {problems}"


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


PATH = Path(__file__).parents[2] / "docs" / "configuration.md"
DOCUMENT = PATH.read_text(encoding="utf-8")
VLLMS = (
    "quantization", "revision", "code_revision", "draft_tensor_parallel_size", "max_model_len",
    "draft_load_config",
)  # fmt: skip


def table(model: type[BaseModel], keys: list[str]) -> str:
    """The keys with their defaults and descriptions, as Markdown."""
    rows = []
    for key in keys:
        field = model.model_fields[key]
        default = "required" if field.is_required() else ""
        if not field.is_required() and field.default is not None:
            default = f"`{json.dumps(field.default)}`"
        rows.append([f"`{key}`", default, " ".join(field.description.split())])
    return markdown_table(["key", "default", "meaning"], rows)


TABLES = {
    "## Keys": table(
        SequoiaConfig, [key for key in SequoiaConfig.model_fields if key not in VLLMS]
    ),
    "## Keys of vLLM, for the draft": table(SequoiaConfig, list(VLLMS)),
    "## A tree by its size": table(TreeSpec, list(TreeSpec.model_fields)),
    "## Weights on a disk": table(OffloadSpec, list(OffloadSpec.model_fields)),
}


@pytest.mark.parametrize("heading", TABLES)
def test_tables_are_the_models(heading):
    wanted = f"\n{heading}\n\n{TABLES[heading]}\n\n"
    assert wanted in DOCUMENT, "run: python -m tests.unit.test_config"


def test_examples_are_valid():
    found = re.findall(r'^\{"method".*\}$', DOCUMENT, flags=re.MULTILINE)
    assert len(found) > 3
    for example in found:
        SequoiaConfig.parse(json.loads(example))


if __name__ == "__main__":
    text = DOCUMENT
    for heading, wanted in TABLES.items():
        before, _, after = text.partition(f"\n{heading}\n\n")
        text = f"{before}\n{heading}\n\n{wanted}\n\n" + after.partition("\n\n")[2]
    PATH.write_text(text, encoding="utf-8")
