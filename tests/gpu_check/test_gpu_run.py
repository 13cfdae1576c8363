"""The program that measures on GPUs: processes, results, models. No engine runs here."""

import importlib.util
import inspect
import json
from functools import partial
from pathlib import Path

import psutil
import pytest
from transformers import AutoConfig

import benchmarks.gpu.rival.__main__ as rival
from benchmarks.gpu import command, items, stages
from benchmarks.gpu.item_run import ItemRun, run_item
from benchmarks.gpu.items import ITEMS, MACHINE, RIVALS, Item, in_order
from benchmarks.gpu.models import pair_of, write_models
from benchmarks.gpu.results import FILE, GpuRunError, Results
from benchmarks.gpu.serving import MONITORS
from benchmarks.gpu.sizes import ON_A_GPU
from benchmarks.gpu.steps import speculation
from benchmarks.gpu.table import lines_of
from examples import smollm2
from sequoia_vllm.config import SequoiaConfig
from sequoia_vllm.hardware.budget import drafts_by_batch, rungs
from sequoia_vllm.hardware.graph_sizes import MOST_TOKENS, decode_shapes
from sequoia_vllm.hardware.model_config import read_shape


def item(function: str, **options: str) -> Item:
    measure = f"tests.gpu_check.fake_items:{function}"
    return Item(function, "for the test", measure, 1.0, options, needs_vllm=False)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(command, "_LEAST_SECONDS", 0.0)


def run(folder: Path, *items: Item) -> Results:
    return command.run_items(items, folder, True, 100.0, "fork")


def test_a_second_run_goes_on_where_the_first_ended(tmp_path):
    folder = tmp_path / "out"
    items = [item("fail_in_the_middle"), item("die"), item("succeed", value="once")]
    results = run(folder, *items)
    found = results.of("fail_in_the_middle")
    assert found.state == "failed"
    assert "RuntimeError: out of registers" in found.errors["second"]
    assert "fake_items.py" in found.errors["second"]
    assert found.parts.keys() == {"first", "third"}
    assert (results.of("die").state, results.of("die").parts) == ("ended", {"before": {}})
    assert results.of("succeed").parts == {"a part": {"value": "once", "argument": True}}
    new = item("hang")
    assert [left.name for left in in_order([*items, new], results)] == [
        "hang", "fail_in_the_middle", "die",
    ]  # fmt: skip

    (folder / "mended").touch()
    again = run(folder, items[0], item("succeed", value="twice"))
    mended = again.of("fail_in_the_middle")
    assert (mended.state, mended.errors) == ("done", {})
    assert mended.parts == {**found.parts, "second": {"is_mended": True}}
    assert again.of("succeed").parts == results.of("succeed").parts
    table = "\n".join(lines_of(results, [MACHINE, *items]))
    assert "ERROR fail_in_the_middle, second: RuntimeError: out of registers" in table


@pytest.mark.slow
def test_an_item_ends_with_its_time_and_its_processes_with_it(tmp_path):
    assert run_item(item("hang"), tmp_path, True, 3.0, "fork") == "timeout"
    found = Results(tmp_path / FILE).of("hang")
    assert not psutil.pid_exists(found.parts["child"]["pid"])


def test_results_of_another_commit_are_not_mixed_in(tmp_path):
    results = run(tmp_path, item("succeed"))
    machine = results.of(MACHINE.name).parts["machine"]
    results.add(MACHINE.name, part="machine", values={**machine, "commit": "another"})
    with pytest.raises(GpuRunError, match=r"is of commit another, this is .*: give another --out"):
        run(tmp_path, item("succeed"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--items", "kernels,everything"], "no item 'everything'; there are machine"),
        (["--output", "/nowhere/run"], "there is no folder /nowhere"),
        (["--report", "/nowhere/results.jsonl"], "there is no such file"),
    ],
)
def test_refusals(arguments, message, capsys):
    assert command.main(arguments) == command.CANNOT
    assert message in capsys.readouterr().err


def test_without_a_gpu_the_program_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET")
    arguments = ["--items", "kernels", "--output", str(tmp_path / "out")]
    assert command.main(arguments, start_method="fork") == command.CANNOT
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("monitor", "file"),
    [("waits", "utils/gpu_sync_debug.py"), ("compilations", "utils/jit_monitor.py")],
)
def test_vllms_monitors_write_what_is_counted(monitor, file):
    [folder] = importlib.util.find_spec("vllm").submodule_search_locations
    assert MONITORS[monitor].search((Path(folder) / file).read_text())


@pytest.mark.parametrize("name", sorted({i.options["pair"] for i in ITEMS if "pair" in i.options}))
def test_models_have_the_shapes_that_the_library_has_of_them(name, tmp_path):

    pair = pair_of(name)
    for shape, folder in zip((pair.target, pair.draft), write_models(pair, tmp_path), strict=True):
        config = AutoConfig.from_pretrained(folder)
        kind = "model" if shape.head is None else shape.head.kind
        assert read_shape(config, shape.name, kind=kind) == shape
        assert config.rope_parameters["rope_theta"] >= 10000


def test_what_is_timed_has_graphs_of_its_own_size():
    """Padded steps once took twice as long: graphs for 15 drafts began at 36 requests."""
    sizes = ON_A_GPU
    keys = speculation(sizes.batches, sizes.drafts)
    assert SequoiaConfig.parse({"method": "sequoia", "model": "draft", **keys}).adapts
    entries, most = keys["num_speculative_tokens_per_batch_size"], sizes.batches[-1] + 3
    scheduled = drafts_by_batch(entries, sizes.drafts[-1], most)
    tokens = [drafts + 1 for drafts in scheduled]
    others = [drafts + 1 for drafts in rungs(scheduled)]
    shapes = decode_shapes(tokens, MOST_TOKENS, others, tokens)
    for batch in sizes.batches:
        for drafts in sizes.drafts[1:]:
            assert (drafts + 1, batch) in shapes or batch * (drafts + 1) > MOST_TOKENS


def test_results_of_an_h100_are_shown(capsys):
    path = Path(command.__file__).with_name("h100-eagle3.jsonl")
    assert command.main(["--report", str(path)]) == 0
    assert "batch 1, 59 drafts 62 13.520 7.122" in " ".join(capsys.readouterr().out.split())


def test_methods_side_by_side_are_shown_with_the_chains_that_were_tried(tmp_path):
    path = Path(command.__file__).with_name("h100-rival.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    results, [one_head] = Results(tmp_path / FILE), [i for i in ITEMS if i.name == "rival"]
    results.add("rival", part="bench", values={"lines": [one for one in found if "results" in one]})
    results.add("rival", part="arrivals", values={"lines": [one for one in found if "rate" in one]})
    table = "\n".join(" ".join(line.split()) for line in lines_of(results, [one_head]))
    chain = "chain of {}, probabilistic, block"
    assert f"chains that were tried: {chain.format(2)}; {chain.format(4)}\n" in table
    assert f"0 1 {chain.format(2)} 222.7 1.364x (1.333 to 1.396) 1.597 7.17 best chain" in table
    assert f"48.0 {chain.format(4)} 2911.8 55.11 6.736 479.5" in table


def test_items_say_what_they_lack(monkeypatch):
    """One GPU runs all but the items of two; without FlashInfer vLLM is told to do without."""
    [two] = [item for item in ITEMS if item.needs_gpus > 1]
    monkeypatch.setattr(items, "_gpus", lambda: 1)
    assert two.reason_to_skip(tiny=False) == "needs 2 GPUs, there are 1"
    monkeypatch.setattr(items, "_gpus", lambda: 2)
    assert two.reason_to_skip(tiny=False) == ""
    monkeypatch.delenv(items.FLASHINFER, raising=False)
    for library, expected in ((None, "0"), (object(), None)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=library: found)
        assert items.environment_of(two, Path()).get(items.FLASHINFER) == expected


@pytest.mark.parametrize("item", [i for i in ITEMS if i.measure == RIVALS], ids=lambda i: i.name)
def test_rivals_use_targets_answers_and_heads_of_earlier_items(item, tmp_path, monkeypatch):
    called, takes = [], inspect.signature(rival.compare)
    kind = item.options.get("kind", "eagle3")

    def write(name, folder, **sizes):
        called.append(name)
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").touch()

    def compare(folder, out, **options):
        called.append(takes.bind(folder, out, **options).arguments)
        out.mkdir(parents=True)
        (out / "bench.jsonl").write_text('{"results": []}\n')
        if len(called) > 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "is_cached", lambda folder: True)
    for function, name in (("target", "target"), ("head", "eagle3"), ("dflash", "dflash")):
        monkeypatch.setattr(rival, function, partial(write, name))
    monkeypatch.setattr(rival, "compare", compare)
    folder = tmp_path / ("rival" if kind == "eagle3" else "rival-embedded")
    (folder / kind).mkdir(parents=True)  # half a head
    stages.compare_methods(ItemRun("earlier", tmp_path, tiny=False), **item.options)
    with pytest.raises(KeyboardInterrupt):  # its time is over
        stages.compare_methods(ItemRun(item.name, tmp_path, tiny=False), **item.options)
    first, second, compared, again = called
    assert (first, second, again["kind"]) == ("target", kind, kind)
    assert again["out"] == folder / "found" / item.name
    assert {**again, "out": compared["out"]} == compared
    assert Results(tmp_path / FILE).of(item.name).parts["bench"] == {"lines": [{"results": []}]}


def test_a_chat_model_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(GpuRunError, match=r"run python -m examples\.smollm2 first"):
        stages.compare_methods(ItemRun("rival", tmp_path, tiny=False))
