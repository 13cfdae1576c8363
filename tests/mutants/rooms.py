"""What is mutated, and by which tests each part is checked. Another part is another entry."""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sequoia_vllm"


class Room(NamedTuple):
    """A part of the package and its own tests."""

    name: str
    paths: str  # files and folders of the package
    tests: str  # files: ``unit/test_NAME.py``, or ``kernels/test_NAME_interpreted.py``
    laws: str = ""  # files: ``ops/test_NAME.py``
    interpreted: bool = False  # with kernels, which Triton interprets

    @property
    def sources(self) -> list[Path]:
        """The files that are mutated."""
        paths = [PACKAGE / path for path in self.paths.split()]
        files = [path.rglob("*.py") if path.is_dir() else [path] for path in paths]
        return sorted(file for found in files for file in found)

    @property
    def test_files(self) -> list[str]:
        """Paths of the tests, from the root."""
        form = "kernels/test_{}_interpreted.py" if self.interpreted else "unit/test_{}.py"
        laws = [f"tests/ops/test_{name}.py" for name in self.laws.split()]
        return [f"tests/{form.format(name)}" for name in self.tests.split()] + laws


ROOMS = (
    Room(
        "verification",
        "verification",
        "verifier verification_methods replaced retrieval prediction sampling truncation "
        "thinking_budgets",
        laws="continue_texts follow_predictions",
    ),
    Room("tree", "tree", "optimize tree_bad_input tree_tables"),
    Room("eligibility", "engine/core/eligibility.py", "eligibility"),
    Room("config", "config.py", "config"),
    Room(
        "drafting",
        "drafting/chain_pieces.py drafting/draft_plan.py drafting/dynamic_trees.py "
        "drafting/tree_tables.py",
        "chain_pieces draft_plan tree_tables step",
    ),
    Room(
        "growth",
        "drafting/block_growth.py drafting/draft_batch.py drafting/drafted_trees.py "
        "drafting/dynamic_levels.py drafting/growth.py",
        "begin_drafting block_growth children dynamic_trees growth no_waits truncation",
        interpreted=True,
    ),
    Room(
        "adaptation",
        "adaptation",
        "adaptation draft_controller fading_acceptance prompt_steps step_times told_branches",
    ),
    Room("step", "step", "step truncation", laws="move"),
    Room(
        "library",
        "library",
        "library computed_trees known_pairs cli_tree streamed_weights tree_bad_input plan",
    ),
    Room(
        "hardware",
        "hardware",
        "hardware_cost hardware_device model_config families streamed_weights known_pairs "
        "calibration_times draft_plan heads config",
    ),
)
