"""Why a model cannot be had: one line with the fix, whichever library says so."""

import pytest

pytest.importorskip("vllm")
import httpx2 as httpx
from huggingface_hub import errors
from typer.testing import CliRunner

from sequoia_vllm.cli import app
from sequoia_vllm.engine.frontend.drafts import draft_problem
from sequoia_vllm.measuring.engines import load_config
from sequoia_vllm.model_source import folder_problem, hub_problem
from sequoia_vllm.prompts import load_tokenizer
from tests.unit.test_draft_checks import complaint


def refused(kind, status):
    request = httpx.Request("GET", "https://huggingface.co/api/models/a/b")
    return kind(f"{status} Client Error.", response=httpx.Response(status, request=request))


GATED = refused(errors.GatedRepoError, 403), "'a/b' is gated on the Hub: accept its licence"
UNKNOWN = refused(errors.RepositoryNotFoundError, 401), "the Hub has no 'a/b', or it is private"
REFUSED = refused(errors.HfHubHTTPError, 401), "the Hub refuses 'a/b' (HTTP 401)"
KINDS = pytest.mark.parametrize(("error", "words"), [GATED, UNKNOWN, REFUSED])


def wrapped(error, kind=OSError):
    """The same error as transformers and vLLM pass it on."""
    try:
        raise kind("Invalid repository ID or local directory specified: 'a/b'.\nPlease") from error
    except kind as wrapper:
        return wrapper


@KINDS
def test_the_reason_is_found_behind_any_wrapper(error, words):
    for shown in (error, wrapped(error), wrapped(wrapped(error), ValueError)):
        said = hub_problem("a/b", shown)
        assert said.startswith(words)
        assert "hf auth login" in said
        assert "give the path of a folder" in said
        assert "\n" not in said


@KINDS
def test_the_engine_says_the_same(error, words):
    def refuse(value):
        raise wrapped(error, ValueError)

    assert words in draft_problem("a/b", complaint(refuse))


@KINDS
@pytest.mark.parametrize("command", ["advise", "tune", "bench"])
def test_commands_say_the_same(command, error, words, monkeypatch):
    def ask(*_, **__):
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", ask)
    model = ["a/b"] if command == "advise" else ["--model", "a/b"]
    done = CliRunner().invoke(app, [command, *model, "--draft-model", "c/d"])
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@KINDS
def test_libraries_that_load_say_the_same(error, words, monkeypatch):
    def load(*_, **__):
        raise wrapped(error)

    for name, used in (("AutoConfig", load_config), ("AutoTokenizer", load_tokenizer)):
        monkeypatch.setattr(f"transformers.{name}.from_pretrained", load)
        with pytest.raises(ValueError, match="hf auth login") as found:
            used("a/b")
        assert words in str(found.value)


@pytest.mark.parametrize("command", ["advise", "tune", "bench", "demo"])
def test_a_file_is_no_model(command, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    model = [str(file)] if command == "advise" else ["--model", str(file)]
    done = CliRunner().invoke(app, [command, *model, "--draft-model", "c/d"])
    assert done.exit_code == 2
    assert f"is a file: give the folder that it lies in, {str(tmp_path)!r}" in done.stderr
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"")
    assert folder_problem("draft", str(gguf)) is None
