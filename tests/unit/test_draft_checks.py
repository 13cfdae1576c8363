"""Models are looked at before anything starts: are they there, do they fit each other?"""

from collections.abc import Callable
from typing import Annotated, Any

import pytest

pytest.importorskip("vllm")
from pydantic import BeforeValidator, TypeAdapter, ValidationError
from typer.testing import CliRunner

from sequoia_vllm.cli import app
from sequoia_vllm.engine.frontend.drafts import draft_problem
from sequoia_vllm.model_source import folder_problem
from tests.support.models import DRAFT, TARGET


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
    assert message in folder_problem("draft", model.format(folder=tmp_path))


def test_names_on_the_hub_and_models_pass():
    for model in ("somebody/something", "gpt2", DRAFT):
        assert folder_problem("draft", model) is None


@pytest.mark.parametrize("command", ["bench", "tune"])
@pytest.mark.parametrize(("target", "draft", "role"), [(TARGET, "/nope", "draft"),
                                                       ("/nope", DRAFT, "target")])  # fmt: skip
def test_commands_look_for_models_first(tmp_path, monkeypatch, command, target, draft, role):
    monkeypatch.setattr("sequoia_vllm.measuring.engines.open_engine", None)
    monkeypatch.chdir(tmp_path)
    words = [*command.split(), "--model", target, "--draft-model", draft]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert f"error: there is no {role} model at '/nope'" in result.stderr


def test_the_demo_looks_for_models_first():
    result = CliRunner().invoke(app, ["demo", "--draft", "/nope"])
    assert result.exit_code == 2
    assert "there is no draft model at '/nope'" in result.stderr


def complaint(message: str | Callable[[Any], None]) -> Exception:
    """The error that vLLM's configuration raises, with this message or of this check."""

    def say(value):
        raise ValueError(message)

    refuse = say if isinstance(message, str) else message

    try:
        TypeAdapter(Annotated[int, BeforeValidator(refuse)]).validate_python(1)
    except ValidationError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (complaint("Invalid repository ID or local directory specified: 'd'.\nPlease\n1."),
         "does not give 'd': Invalid repository ID"),
        (complaint("Unknown quantization method: zzz."), 'mend or leave out "quantization"'),
        (complaint("speculative_draft_tensor_parallel_size=3 cannot be other"), "it is the target"),
        (OSError(), 'OSError; choose another "model"'),
    ],
)  # fmt: skip
def test_complaints_of_vllm_name_the_draft_and_the_fix(error, fix):
    message = draft_problem("d", error)
    assert message.startswith("vLLM cannot use the draft model 'd': ")
    assert fix in message
    assert "\n" not in message
    assert "validation error" not in message
