"""Developers' tools about trees and their predicted times: `python -m benchmarks...`."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.generate_trees import generate
from benchmarks.predicted import Offload, class_of, device_of, predict
from benchmarks.scaling import scaling, scaling_rows
from sequoia_vllm.hardware.choose import choose_tree
from sequoia_vllm.hardware.cost import CostModel
from sequoia_vllm.hardware.device import identify, known_devices
from sequoia_vllm.hardware.models import every_class
from sequoia_vllm.hardware.roofline import roofline_profile
from sequoia_vllm.library.tree_library import shipped_directory
from sequoia_vllm.tree import Acceptance
from tests.support.reference_trees import published

SHIPPED, STRONG = (Acceptance.of(published()[name]) for name in ("shipped", "appendix_e"))
PAIR = every_class()["70b-1b"]


def run(tool, *arguments: object, code: int = 0):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(tool)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def run_json(tool, *arguments: object):
    return json.loads(run(tool, *arguments, "--json").stdout)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


class TestPredictedTrees:
    """The fastest trees by the profiles that the roofline predicts."""

    def best(self, device, name, size=128, vector=SHIPPED, offload=None, devices=1, **box):
        times = predict(device_of(device, **box), class_of(name), devices, offload=offload)
        tree = choose_tree(vector, times, max_size=size)
        return tree, CostModel(times).estimate(tree, vector, 1).speedup

    def test_more_and_slower_links_give_smaller_trees(self):
        bus = {"interconnect_gb_s": 64, "interconnect_kind": "bus"}
        (two, most), (eight, less), (slow, least) = (
            self.best("h200", "70b-1b", devices=devices, **box)
            for devices, box in ((2, {}), (8, {}), (8, bus))
        )
        assert most > less > least > 1
        assert two.size > eight.size > slow.size

    def test_heads_that_cost_less_a_level_have_deeper_trees(self):
        depths = [
            self.best("h100-sxm", name, size=64)[0].depth
            for name in ("8b-1b", "8b-eagle3", "8b-dflash")
        ]
        assert depths == sorted(depths)
        assert depths[0] < depths[-1]

    def test_trees_are_wide_where_layers_are_prefetched(self):
        (prefetched, more), (uva, less) = (
            self.best("l40", "70b-8b", 768, STRONG, Offload(200, backend))
            for backend in ("prefetch", "uva")
        )
        assert (prefetched.size, uva.size) == (768, 128)
        assert more > less > 5


class TestScaling:
    def test_rows(self):
        specs = [identify("h100-sxm").spec, identify("h200").spec]
        rows = scaling_rows(specs, PAIR, SHIPPED, (1, 2), (1, 16))
        shown = [(row.device.id, row.tensor_parallel_size, row.problem) for row in rows]
        assert shown == [
            ("h100-sxm", 1, "does not fit"),
            ("h100-sxm", 2, None),
            ("h200", 1, "no room for a KV cache"),
            ("h200", 2, None),
        ]
        assert [len(row.predictions) for row in rows] == [0, 2, 0, 2]

    def test_a_prediction_is_the_chosen_trees(self):
        spec = identify("h100-sxm").spec
        (row,) = scaling_rows([spec], PAIR, SHIPPED, (4,), (16,))
        (entry,) = row.predictions
        times = roofline_profile(spec, PAIR.target, PAIR.draft, tensor_parallel_size=4)
        tree = choose_tree(SHIPPED, times, 16)
        estimate = CostModel(times).estimate(tree, SHIPPED, 16)
        assert (entry.size, entry.depth) == (tree.size, tree.depth)
        assert entry.speedup == estimate.speedup
        assert entry.plain_seconds == CostModel(times).plain_seconds(16)
        assert entry.seconds_per_token == pytest.approx(entry.plain_seconds / entry.speedup)

    def test_contexts_that_do_not_fit(self):
        (row,) = scaling_rows([identify("h100-sxm").spec], PAIR, SHIPPED, (2,), (1, 64))
        assert row.problem.startswith("KV cache for ")
        assert row.predictions == []

    def test_rows_of_more_devices_are_offloaded_on_each(self):
        common = ([known_devices()["l40"].spec()], every_class()["70b-8b"], STRONG)
        [one, two] = scaling_rows(*common, (1, 2), (1,), offload=Offload(1000))
        assert one.problem is two.problem is None
        assert one.streamed.bytes_per_pass == 2 * two.streamed.bytes_per_pass
        ratio = one.predictions[0].plain_seconds / two.predictions[0].plain_seconds
        assert ratio == pytest.approx(2, rel=1e-3)
        assert one.predictions[0].size == 768
        [without] = scaling_rows(*common, (1,), (1,))
        assert (without.problem, without.streamed) == ("does not fit", None)

    def test_json_and_table_are_the_same(self):
        options = ["--devices", "h100-sxm", "--tensor-parallel-sizes", "1,8"]
        data = run_json(scaling, *options)
        assert (data["source"], data["target"]) == ("roofline", "meta-llama/Llama-3.1-70B")
        one, eight = data["rows"]
        assert (one["problem"], one["predictions"]) == ("does not fit", [])
        assert [entry["batch_size"] for entry in eight["predictions"]] == [1, 16]
        entry = eight["predictions"][0]
        assert entry["speedup"] > eight["predictions"][1]["speedup"] > 1
        cells = [
            "h100-sxm", "8", "1", f"{1e3 * entry['plain_seconds']:.1f}",
            f"{1e3 * entry['draft_level_seconds']:.2f}", str(entry["size"]), str(entry["depth"]),
            f"{entry['expected_tokens']:.2f}", f"{entry['speedup']:.2f}x",
        ]  # fmt: skip
        lines = run(scaling, *options).stdout.splitlines()
        assert f"| {' | '.join(cells)} |" in lines
        assert len({line.count("|") for line in lines}) == 1
        assert "does not fit" in lines[2]

    def test_vectors_by_name_and_by_file(self, tmp_path):
        path = tmp_path / "vector.json"
        path.write_text("[0.6, 0.2, 0.1]")
        options = ["--class", "70b-8b", "--devices", "h200", "--tensor-parallel-sizes", 4]
        by_name, by_file = (
            run_json(scaling, *options, "--acceptance", name) for name in ("appendix-e", path)
        )
        assert by_name["acceptance"] == published()["appendix_e"]
        assert by_file["acceptance"] == [0.6, 0.2, 0.1]
        speedups = [data["rows"][0]["predictions"][0]["speedup"] for data in (by_name, by_file)]
        assert speedups[0] > speedups[1]

    @pytest.mark.parametrize(
        ("option", "value", "message"),
        [
            ("--tensor-parallel-sizes", "1,x", "give whole numbers separated by commas"),
            ("--tensor-parallel-sizes", "3", "use 1, 2, 4, 8, 16"),
            ("--batch-sizes", "0", "batch size 0"),
            ("--devices", "h200,abacus", "no datasheet values for 'abacus'"),
            ("--acceptance", "guessed", "name a file, or one of appendix-e"),
            ("--class", "1b-1b", "no model class '1b-1b'; there are 7b-68m"),
            ("--dtype", "int3", "dtype 'int3'"),
            ("--context-length", 0, "must be at least 1"),
            ("--interconnect-gb-s", 0, "give the rate in one direction"),
            ("--interconnect-kind", "rope", "--interconnect-kind"),
            ("--devices", "NVIDIA H200 MIG 3g.71gb", "slices have no link to each other"),
        ],
    )
    def test_errors(self, option, value, message):
        assert message in " ".join(run(scaling, option, value, code=2).stderr.split())

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--link", "pcie4"], "give --offload-gb"),
            (["--link-gb-s", 20], "give --offload-gb"),
            (["--offload-backend", "uva"], "give --offload-gb"),
            (["--offload-gb", 9, "--link", "pcie4", "--link-gb-s", 20], "give it or --link-gb-s"),
            (["--offload-gb", 0], "size 0 must be above 0"),
            (["--offload-gb", "nan"], "size nan must be above 0"),
            (["--offload-gb", 9, "--link-gb-s", 0], "rate 0 must be above 0"),
            (["--class", "70b-8b", "--offload-gb", 9], "smaller or quantized draft"),
        ],
    )
    def test_what_does_not_go_together(self, arguments, message):
        pair = ("--class", "8b-1b", "--devices", "t4", "--tensor-parallel-sizes", 1)
        result = run(scaling, *pair, *arguments, code=2)
        assert message in " ".join(result.stderr.split())


class TestGenerate:
    def test_brings_a_directory_up_to_date(self, tmp_path, monkeypatch):
        files = {path.name: path.read_text() for path in shipped_directory().glob("l4*.json")}
        monkeypatch.setattr(
            "benchmarks.generate_trees.generate_library", lambda inputs, report: dict(files)
        )
        output = tmp_path / "out"
        stale = run(generate, "--output", output, "--check", code=1)
        assert "would change l4.json" in stale.stdout
        assert not output.exists()
        assert "3 changed" in run(generate, "--output", output).stdout
        run(generate, "--output", output, "--check")
        # A file that is no library file belongs to somebody else.
        (output / "mine.json").write_text("{}")
        (output / "old.json").write_text(files["l4.json"])
        stale = run(generate, "--output", output, "--check", code=1)
        assert "would remove old.json" in stale.stdout
        assert "0 changed, 1 removed" in run(generate, "--output", output).stdout
        assert sorted(path.name for path in output.glob("*")) == sorted([*files, "mine.json"])

    def test_without_inputs(self, tmp_path):
        message = "no acceptance vectors in"
        assert message in run(generate, "--inputs", tmp_path, code=2).stderr
