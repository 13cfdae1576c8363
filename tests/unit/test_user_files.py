"""The user's directory, and engines that have none, or cannot look into it or write there."""

import logging
import pwd
import time
from types import SimpleNamespace

import platformdirs
import pytest
from typer.testing import CliRunner

pytest.importorskip("vllm")

from sequoia_vllm.adaptation.controller import DraftController
from sequoia_vllm.cli import app
from sequoia_vllm.config import SequoiaConfig
from sequoia_vllm.engine.common.step_messages import StepOutcome
from sequoia_vllm.engine.core import adapting
from sequoia_vllm.hardware.models import model_classes
from sequoia_vllm.library.files import LibraryError
from sequoia_vllm.library.pair_key import PairKey, PairShapes
from sequoia_vllm.library.tree_library import TreeLibrary, tuned_measurements
from sequoia_vllm.library.user_files import make_writable, reason_not_to_keep, user_directory
from sequoia_vllm.tree import TokenTree
from tests.support.plans import planned

VARIABLE = "SEQUOIA_VLLM_TREES"
PAIR = PairKey("NVIDIA H200", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B", "bfloat16")
CLASS = model_classes()["7b-68m"]


def test_user_directory(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert user_directory() == tmp_path
    monkeypatch.delenv(VARIABLE)
    assert user_directory().name == "trees"
    assert "sequoia-vllm" in str(user_directory())


@pytest.fixture(params=["no home", "out of reach", "no directory"])
def nowhere(request, monkeypatch, tmp_path):
    """Nothing can be kept here, whoever runs the tests: root may enter and write everywhere."""
    if request.param == "no home":
        for name in (VARIABLE, "HOME", "XDG_DATA_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    elif request.param == "out of reach":  # an error for who looks, as where one may not enter
        monkeypatch.setenv(VARIABLE, str(tmp_path / ("x" * 300) / "trees"))
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "trees"))
    return request.param


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(adapting, "logger", logging.getLogger("user files"))
    caplog.set_level(logging.INFO, "user files")
    return caplog


def test_who_has_no_home_is_told_the_fix(monkeypatch):
    for name in (VARIABLE, "HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(LibraryError, match=f"no home directory.*set {VARIABLE} to"):
        user_directory()
    older = "~/.local/share/sequoia-vllm"  # what platformdirs made of it
    monkeypatch.setattr(platformdirs, "user_data_dir", lambda *_, **__: older)
    with pytest.raises(LibraryError, match=f"no home directory.*set {VARIABLE} to"):
        user_directory()


def test_a_directory_that_can_be_made_is_as_good_as_one(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "not" / "yet"))
    assert reason_not_to_keep() is None
    assert not (tmp_path / "not").exists()
    make_writable(user_directory())
    assert reason_not_to_keep() is None
    assert user_directory().is_dir()


def test_a_directory_of_somebody_else_is_not(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert VARIABLE in reason_not_to_keep()
    with pytest.raises(LibraryError, match=VARIABLE):
        make_writable(tmp_path)


@pytest.mark.usefixtures("nowhere")
def test_trees_are_chosen_as_where_nothing_was_kept(tmp_path):
    library = TreeLibrary()
    assert library.select(PAIR) == TreeLibrary(user=tmp_path / "empty").select(PAIR)
    assert library.entries() == TreeLibrary(user=tmp_path / "empty").entries()
    assert tuned_measurements(PAIR) is None
    with pytest.raises(LibraryError, match="no tree named 'user/mine'"):
        library.entry("user/mine")


@pytest.mark.usefixtures("nowhere")
def test_trees_are_shown_but_not_saved(tmp_path):
    done = CliRunner().invoke(app, ["tree", "show", "h200/8b-1b/shipped"])
    assert done.exit_code == 0, done.output
    library = TreeLibrary()
    with pytest.raises(LibraryError, match=VARIABLE):
        library.save_user_tree(PAIR, library.entry("h200/8b-1b/shipped"))
    with pytest.raises(LibraryError, match=VARIABLE):
        make_writable(library.measurements(PAIR).directory)


def plan_here(**keys):
    config = SequoiaConfig.parse({"method": "sequoia", "model": "some/draft", **keys})
    pair = PairKey("NVIDIA L40S", "/m/timed", "some/draft", "float16")
    shapes = PairShapes(CLASS.target, CLASS.draft)
    return planned(config, pair, shapes=shapes, not_kept=reason_not_to_keep())


def warnings(plan):
    return [line for level, line in plan.notes if level == logging.WARNING]


@pytest.mark.usefixtures("nowhere")
def test_engines_keep_nothing_and_say_so_once():
    found = plan_here()
    assert "computed/l40s" in found.settings.tree_source
    assert found.settings.keeps is False
    assert found.settings.adapts_as is not None  # while it runs
    [warning] = warnings(found)
    assert f"set {VARIABLE} to a directory that can be written to" in warning
    with_nothing_to_keep = plan_here(tree={"size": 8}, adapt=False)
    assert with_nothing_to_keep.settings.keeps is False
    assert warnings(with_nothing_to_keep) == []


def test_engines_that_can_keep_say_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    found = plan_here()
    assert found.settings.keeps
    assert warnings(found) == []


class Now:
    """In the place of a thread."""

    def __init__(self, target, args, daemon) -> None:
        self.start = lambda: target(*args)


def follow_an_hour(monkeypatch, keeps: bool) -> None:
    monkeypatch.setattr(adapting.threading, "Thread", Now)
    tree = TokenTree.chain(3)
    adapter = adapting.SchedulerAdapter(
        DraftController(tree, [3] * 9, [3] * 9, [3, 1]), "a-pair", keeps=keeps
    )
    idle = SimpleNamespace(
        num_scheduled_tokens={}, num_spec_tokens_to_schedule=0, scheduled_new_reqs=[],
        finished_req_ids=[],
    )  # fmt: skip
    for minute in range(60):
        adapter.follow(idle, StepOutcome(), 0, time.perf_counter() + 61 * minute, is_busy=False)


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("keeps", [False, True])
def test_what_is_learned_is_lost_with_one_warning(log, monkeypatch, keeps):
    """The front end's, which knows already; or the engine core's, where that runs elsewhere."""
    follow_an_hour(monkeypatch, keeps)
    assert len(log.messages) == keeps
    assert all(VARIABLE in message for message in log.messages)


def test_what_is_learned_is_kept(log, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    follow_an_hour(monkeypatch, keeps=True)
    assert (tmp_path / "adaptation" / "a-pair.json").is_file()
    assert log.messages == []
