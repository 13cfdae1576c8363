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
from sequoia_vllm.bench.methods import PLAIN, BenchError, chain
from sequoia_vllm.measuring.engines import EngineSpec
from tests.oracles.dflash import dflash_drafts, target_layers
from tests.support.models import MODELS, TARGET
from tests.support.train_drafter import script_modules

HEAD = MODELS / "eagle3"


@pytest.mark.parametrize(("kind", "times"), [("dflash", 3), ("eagle3", 3), ("eagle3", 4)])
def test_a_head_grown_like_its_target_drafts_the_same(tmp_path, kind, times):
    small, large = (MODELS / kind, MODELS / "target"), (tmp_path / "head", tmp_path / "target")
    write_synthetic_target(
        TARGET, large[1], layers=5, width=900, hidden=256 * times, dtype="float32"
    )
    write_grown_head(small[0], large[0], times, 700)
    tokens = torch.randint(5, 4000, (48,), generator=torch.Generator().manual_seed(1))
    with script_modules() as modules:
        if kind == "dflash":
            drafts = [
                dflash_drafts(
                    head, modules.eagle3.FrozenTarget(target, target_layers(head), "cpu"), tokens, 4
                )
                for head, target in (small, large)
            ]
            assert torch.equal(*drafts)
        else:
            loaded = [modules.heads.load_head(*pair, "cpu") for pair in (small, large)]
            drafts, laws = zip(*(head.draft(of, tokens, 4) for head, of in loaded), strict=True)
            assert torch.equal(*drafts)
            assert torch.allclose(*laws, atol=1e-3)


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
    methods = [PLAIN, chain(str(HEAD), 2)]
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

    engine = RemoteEngine(PLAIN, here)
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
