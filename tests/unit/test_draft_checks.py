"""Models are looked at before anything starts: are they there, do they fit each other?"""

import json

import pytest

pytest.importorskip("vllm")
from pydantic import TypeAdapter, ValidationError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from sequoia_vllm.cli import app
from sequoia_vllm.config import ConfigError
from sequoia_vllm.engine.draft_checks import check_folder, draft_problem
from sequoia_vllm.engine.vocabulary import check_vocabularies
from tests.support.models import DRAFT, TARGET

WORDS = [f"w{number}" for number in range(400)]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/nope", "there is no draft model at '/nope': give the path of a model's folder, or"),
        ("./nope", "there is no draft model at './nope'"),
        ("~/nope", "there is no draft model at '~/nope'"),
        ("", "there is no draft model at ''"),
        ("{folder}", "as it has no config.json"),
    ],
)
def test_folders_without_a_model(tmp_path, model, message):
    with pytest.raises(ConfigError) as error:
        check_folder("draft", model.format(folder=tmp_path))
    assert message in str(error.value)


def test_names_on_the_hub_and_models_pass():
    for model in ("somebody/something", "gpt2", DRAFT):
        check_folder("draft", model)


@pytest.mark.parametrize("command", ["bench", "calibrate", "profile", "tune"])
@pytest.mark.parametrize(("target", "draft", "role"), [(TARGET, "/nope", "draft"),
                                                       ("/nope", DRAFT, "target")])  # fmt: skip
def test_commands_look_for_models_first(tmp_path, monkeypatch, command, target, draft, role):
    monkeypatch.setattr("sequoia_vllm.measuring.engines.open_engine", None)
    monkeypatch.chdir(tmp_path)
    words = [command, "--model", target, "--draft-model", draft]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert f"error: there is no {role} model at '/nope'" in result.stderr


def test_the_demo_looks_for_models_first():
    result = CliRunner().invoke(app, ["demo", "--draft", "/nope"])
    assert result.exit_code == 2
    assert "there is no draft model at '/nope'" in result.stderr


def complaint(message: str) -> Exception:
    """As vLLM's configuration raises it."""

    def refuse(value):
        raise ValueError(message)

    from typing import Annotated

    from pydantic import BeforeValidator

    try:
        TypeAdapter(Annotated[int, BeforeValidator(refuse)]).validate_python(1)
    except ValidationError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (complaint("Invalid repository ID or local directory specified: 'd'.\nPlease\n1."),
         "there is none of this name"),
        (complaint("Unknown quantization method: zzz."), 'mend or leave out "quantization"'),
        (complaint("speculative_draft_tensor_parallel_size=3 cannot be other"), "it is the target"),
        (ValueError("Target and draft model should have the same vocabulary size."),
         "a draft of the target's family"),
        (OSError(), 'OSError; choose another "model"'),
    ],
)  # fmt: skip
def test_complaints_of_vllm_name_the_draft_and_the_fix(error, fix):
    message = draft_problem("d", error)
    assert message.startswith("vLLM cannot use the draft model 'd': ")
    assert fix in message
    assert "\n" not in message
    assert "validation error" not in message


def tokenizer(folder, words, special=()):
    folder.mkdir()
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "w0"))
    fast = PreTrainedTokenizerFast(tokenizer_object=made)
    fast.add_special_tokens({"additional_special_tokens": list(special)})
    fast.save_pretrained(folder)
    return str(folder)


def test_the_same_vocabulary_passes(tmp_path, caplog):
    ours = tokenizer(tmp_path / "a", WORDS, ["<one>"])
    theirs = tokenizer(tmp_path / "b", WORDS, ["<other>", "<more>"])
    check_vocabularies(ours, theirs)
    check_vocabularies(TARGET, DRAFT)
    assert not caplog.messages


def test_other_tokens_of_the_same_number_are_refused(tmp_path):
    ours = tokenizer(tmp_path / "a", WORDS)
    theirs = tokenizer(tmp_path / "b", WORDS[:200] + WORDS[:199:-1])
    with pytest.raises(ConfigError) as error:
        check_vocabularies(ours, theirs)
    message = str(error.value)
    assert "200 of 400 tokens differ, the first is number 200: 'w200' of the target" in message
    assert "'w399' of the draft" in message
    assert f"draft model {theirs!r} has another vocabulary than the target {ours!r}" in message


def test_a_few_renamed_tokens_are_mentioned(tmp_path, caplog):
    ours = tokenizer(tmp_path / "a", WORDS)
    theirs = tokenizer(tmp_path / "b", [*WORDS[:-1], "renamed"])
    check_vocabularies(ours, theirs)
    assert "1 of 400 tokens differ, the first is number 399" in caplog.text


def test_models_without_tokenizers_cannot_be_compared(tmp_path):
    ours = tokenizer(tmp_path / "a", WORDS)
    (tmp_path / "b").mkdir()
    check_vocabularies(ours, str(tmp_path / "b"))
    (tmp_path / "b" / "tokenizer.json").write_text(json.dumps("nonsense"))
    check_vocabularies(ours, str(tmp_path / "b"))
