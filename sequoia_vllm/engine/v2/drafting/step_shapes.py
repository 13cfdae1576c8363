"""Which trees a step grows on Model Runner V2: the engine's, or dynamic ones for all requests."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.drafting.drafted_trees import DraftedTrees
from sequoia_vllm.drafting.dynamic_levels import DynamicLevels, DynamicTrees, SlotTables
from sequoia_vllm.drafting.tree_tables import DraftLevels, TreeTables
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.runner.tensor_parallel import take_from_rank0
from sequoia_vllm.engine.v2.drafting.request_modes import RequestModes


class StepShapes:
    """Chooses the levels that a step grows, and keeps the topologies that come of it.

    One pass grows all trees of a step. So they are dynamic only if all requests can choose.

    Attributes:
        dynamic: The batch's dynamic trees; None: trees are static.
    """

    def __init__(
        self,
        tables: TreeTables,
        drafted: DraftedTrees,
        modes: RequestModes,
        settings: SequoiaSettings,
    ) -> None:
        self._tables, self._modes, self._settings = tables, modes, settings
        self.dynamic = DynamicTrees(tables, drafted) if isinstance(tables, SlotTables) else None
        self._steps = 0  # that grew trees

    def every_level(self, drafts: int) -> dict[type[DraftLevels], DraftLevels]:
        """Levels of all kinds of trees with so many drafts."""
        static = self._tables.levels_of(drafts)
        dynamic = None if self.dynamic is None else self.dynamic.levels_of(drafts)
        return {type(levels): levels for levels in (static, dynamic) if levels is not None}

    def choose(self, slots: NDArray[np.intp], drafts: int) -> DraftLevels:
        """The levels of the step's trees, of the requests in these slots."""
        static = self._tables.levels_of(drafts)
        if self.dynamic is None:
            return static
        self._steps += 1
        if self._settings.is_static_step(self._steps) or not self._modes.can_choose(slots):
            return static
        return self.dynamic.levels_of(drafts) or static

    def keep(self, slots: Tensor, levels: DraftLevels, told: DraftBatch | None) -> None:
        """Gives request slots ``[R]`` the topologies of the trees that grew by these levels.

        ``told`` may say that some requests have branches in their place; None: none has.
        """
        if self.dynamic is None:
            return
        chosen = isinstance(levels, DynamicLevels)
        if chosen:
            take_from_rank0(self.dynamic.parents[: len(slots)])
        if told is None:
            self.dynamic.write(slots, chosen)
        else:
            self.dynamic.write_with_branches(slots, chosen, told, levels.tree.depth)
