"""Developers' tools about trees and their predicted times: `python -m benchmarks...`."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.generate_trees import generate
from benchmarks.predicted import Offload
from benchmarks.scaling import scaling, scaling_rows
from sequoia_vllm.hardware.device import identify, known_devices
from sequoia_vllm.hardware.models import every_class
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

    @pytest.mark.parametrize(
        ("option", "value", "message"),
        [
            ("--tensor-parallel-sizes", "3", "use 1, 2, 4, 8, 16"),
            ("--devices", "h200,abacus", "no datasheet values for 'abacus'"),
            ("--acceptance", "guessed", "name a file, or one of appendix-e"),
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
            (["--offload-gb", 0], "size 0 must be above 0"),
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
