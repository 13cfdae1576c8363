"""Models are looked at before anything starts, and why one cannot be had: a line with the fix."""

from typing import Annotated

import pytest

pytest.importorskip("vllm")
import httpx2 as httpx
import huggingface_hub
import torch
from huggingface_hub import errors
from pydantic import BeforeValidator, TypeAdapter, ValidationError
from safetensors.torch import save_file

from sequoia_vllm.config import ConfigError, SequoiaConfig
from sequoia_vllm.engine.frontend import drafts
from sequoia_vllm.engine.frontend.drafts import DraftReader, draft_problem
from sequoia_vllm.measuring.engines import load_config
from sequoia_vllm.model_source import folder_problem, hub_problem, weight_names
from sequoia_vllm.prompts import load_tokenizer
from tests.support.commands import command as run
from tests.support.models import DRAFT, TARGET


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


def complaint(error: ValueError) -> ValidationError:
    """The error that vLLM's configuration raises where one of its checks raises this one."""

    def refuse(value):
        raise error

    with pytest.raises(ValidationError) as found:
        TypeAdapter(Annotated[int, BeforeValidator(refuse)]).validate_python(1)
    return found.value


@KINDS
def test_the_engine_says_the_same(error, words):
    assert words in draft_problem("a/b", complaint(wrapped(error, ValueError)))


@KINDS
@pytest.mark.parametrize("command", ["advise", "tune", "bench"])
def test_commands_say_the_same(command, error, words, monkeypatch):
    def ask(*_, **__):
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", ask)
    model = ["a/b"] if command == "advise" else ["--model", "a/b"]
    said = run(command, *model, "--draft-model", "c/d", code=2).stderr
    assert words in said
    assert said.count("\n") == 1


OFFLINE = httpx.ConnectError("[Errno -2] Name or service not known")


@pytest.mark.parametrize("error", [GATED[0], UNKNOWN[0], OFFLINE])
def test_an_engine_asks_for_its_draft_once(error, monkeypatch):
    """vLLM would ask again and again, for minutes."""
    asked = []

    def ask(_, name, *, timeout, **__):
        asked.append((name, timeout <= 10))
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", ask)
    monkeypatch.setattr(drafts, "get_config", lambda *_: 1 / 0)
    reader = DraftReader(None, SequoiaConfig(model="a/b"))
    with pytest.raises(
        ConfigError, match=r"the draft 'a/b' is no folder here, and .*folder"
    ) as found:
        reader.kind("a/b")
    assert "\n" not in str(found.value)
    assert asked == [("a/b", True)]


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
    said = run(command, *model, "--draft-model", "c/d", code=2).stderr
    assert f"is a file: give the folder that it lies in, {str(tmp_path)!r}" in said
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"")
    assert folder_problem("draft", str(gguf)) is None


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
    for there in ("somebody/something", "gpt2", DRAFT):
        assert folder_problem("draft", there) is None


@pytest.mark.parametrize(
    ("words", "role"),
    [
        (["bench", "--model", TARGET, "--draft-model", "/nope"], "draft"),
        (["bench", "--model", "/nope", "--draft-model", DRAFT], "target"),
        (["tune", "--model", TARGET, "--draft-model", "/nope"], "draft"),
        (["tune", "--model", "/nope", "--draft-model", DRAFT], "target"),
        (["demo", "--draft", "/nope"], "draft"),
    ],
)
def test_commands_look_for_models_first(tmp_path, monkeypatch, words, role):
    monkeypatch.setattr("sequoia_vllm.measuring.engines.open_engine", None)
    monkeypatch.chdir(tmp_path)
    said = run(*words, code=2).stderr
    assert f"error: there is no {role} model at '/nope'" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("Invalid repository ID or local directory specified: 'd'.\nPlease\n1.",
         "does not give 'd': Invalid repository ID"),
        ("Unknown quantization method: zzz.", 'mend or leave out "quantization"'),
        ("speculative_draft_tensor_parallel_size=3 cannot be other", "it is the target"),
        ("", 'Error; choose another "model"'),
    ],
)  # fmt: skip
def test_complaints_of_vllm_name_the_draft_and_the_fix(message, fix):
    for error in (ValueError(message), complaint(ValueError(message))):
        said = draft_problem("d", error)
        assert said.startswith("vLLM cannot use the draft model 'd': ")
        assert fix in said
        assert "\n" not in said
        assert "validation error" not in said


def test_names_of_weights_are_read_without_the_weights(tmp_path, monkeypatch):
    """Of an index alone, as vLLM loads what it names; else of every file's header."""
    assert weight_names(str(tmp_path)) is None  # others than safetensors
    for name in ("one", "other"):
        save_file({f"{name}.weight": torch.zeros(2)}, tmp_path / f"{name}.safetensors", {"a": "b"})
    assert weight_names(str(tmp_path)) == {"one.weight", "other.weight"}
    cached = {"model.safetensors": str(tmp_path / "one.safetensors")}
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda _, name, **__: cached.get(name)
    )
    assert weight_names("a/b") == {"one.weight"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"one.weight": "one.safetensors"}}', "utf-8")
    assert weight_names(str(tmp_path)) == {"one.weight"}
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *names, **_: asked.append(names) or str(index)
    )
    cached.clear()
    assert weight_names("a/b", "main") == {"one.weight"}
    assert asked == [("a/b", index.name)]
    index.write_text("{}", "utf-8")
    assert weight_names("a/b") is None
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    assert weight_names("a/b") is None
    assert len(asked) == 2
