"""The head of `benchmarks.gpu.rival`, and its sampling of answers."""

from contextlib import nullcontext
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch

import benchmarks.gpu.rival.__main__ as rival
from benchmarks.gpu.results import GpuRunError
from benchmarks.gpu.rival import comparison
from benchmarks.gpu.rival.comparison import RemoteEngine
from benchmarks.gpu.rival.head import write_grown_head
from benchmarks.synthetic_target import write_synthetic_target
from sequoia_vllm.bench.measure import BenchSettings
from sequoia_vllm.bench.methods import BenchError, chain, plain
from sequoia_vllm.measuring.engines import EngineSpec
from tests.oracles.dflash import dflash_drafts, target_layers
from tests.support.models import MODELS, TARGET
from tests.support.train_drafter import script_modules

HEAD = MODELS / "eagle3"


def test_a_dflash_head_grown_like_its_target_drafts_the_same(tmp_path):
    folder, large = tmp_path / "target", tmp_path / "head"
    write_synthetic_target(TARGET, folder, layers=5, width=900, hidden=768, dtype="float32")
    write_grown_head(MODELS / "dflash", large, 3, 700)
    tokens = torch.randint(5, 4000, (24,), generator=torch.Generator().manual_seed(1))
    drafts = []
    with script_modules() as modules:
        for head, target in ((MODELS / "dflash", MODELS / "target"), (large, folder)):
            states = modules.eagle3.FrozenTarget(target, target_layers(head), "cpu")
            drafts.append(dflash_drafts(head, states, tokens, 4))
    assert torch.equal(*drafts)


@pytest.mark.parametrize("times", [3, 4])
def test_a_head_grown_like_its_target_drafts_the_same(tmp_path, times):
    grown = write_synthetic_target(
        TARGET, tmp_path / "target", layers=5, width=900, hidden=256 * times, dtype="float32"
    )
    write_grown_head(HEAD, tmp_path / "head", times, 700)
    tokens = torch.randint(5, 4000, (48,), generator=torch.Generator().manual_seed(1))
    with script_modules() as modules:
        small, large = (
            head.draft(target, tokens, 4)
            for head, target in (
                modules.heads.load_head(HEAD, MODELS / "target", "cpu"),
                modules.heads.load_head(tmp_path / "head", grown.folder, "cpu"),
            )
        )
    assert torch.equal(small[0], large[0])
    assert torch.allclose(small[1], large[1], atol=1e-3)


def test_methods_are_compared_on_real_questions(tmp_path, monkeypatch):
    (tmp_path / "target").symlink_to(TARGET)
    (tmp_path / "eagle3").symlink_to(HEAD)
    called = []
    monkeypatch.setattr(comparison, "compare_side_by_side", lambda *given: called.append(given))
    rival.compare(tmp_path, tmp_path / "out")
    [(settings, questions, rates, arriving, _)] = called
    names = "plain vLLM; chain of 3, probabilistic, block; Sequoia; Sequoia, lookup"
    assert "; ".join(method.name for method in settings.methods) == names
    assert settings.methods[1].speculative_config["method"] == "eagle3"
    assert (len(settings.prompts), len(questions)) == (12, 120)
    assert (rates, arriving) == ((16, 48, 16, 48), 5)


def test_what_failed_is_told_after_all_else_was_measured(tmp_path, monkeypatch):
    methods = [plain(), chain(str(HEAD), 2)]
    spec = EngineSpec(TARGET, str(HEAD))
    settings = BenchSettings(spec, methods=tuple(methods), prompts=([1],))
    engines = {methods[0].name: SimpleNamespace(method=methods[0])}
    monkeypatch.setattr(comparison, "open_side_by_side", lambda *given: nullcontext(engines))
    monkeypatch.setattr(comparison, "_compare", lambda *given: None)
    with pytest.raises(GpuRunError, match=r"says: chain of 2; plain vLLM, 16 requests/s$"):
        comparison.compare_side_by_side(settings, [[1]], [16.0], 1.0, tmp_path)


def test_engines_in_processes_answer_like_engines_here():
    """Attributes that are values, methods, and errors; vLLM is left out."""
    here, there = Pipe()

    def answer(value, error=None):
        there.send((value, error))

    engine = RemoteEngine(plain(), here)
    answer("float32")
    assert engine.dtype == "float32"
    assert there.recv() == ("dtype", ())
    answer(7)
    assert engine.drafts(4) == 7
    assert there.recv() == ("drafts", (4,))
    answer(None, "out of memory")
    with pytest.raises(BenchError, match="plain vLLM: out of memory"):
        engine.generate([[1]], 0.0, 4)
    there.close()
    with pytest.raises(BenchError, match="has ended"):
        engine.answer()
