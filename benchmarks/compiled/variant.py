"""One way in which a kernel is compiled, and the devices that it is compiled for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CAPABILITIES = (80, 89, 90, 100, 120)
"""Compute capabilities (times ten) that the kernels are compiled for."""

SHARED_MEMORY_LIMITS = {
    80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024,
}  # fmt: skip
"""Bytes of shared memory that one block of threads may have, if it asks for them."""

_NAMES = {
    "*bf16": """
        a b convolved d draft_logits dt dt_bias gates history inputs kept key_cache output
        query sinks strengths value_cache weights
    """,
    "*fp32": """
        all_min_p all_temperatures all_top_p context_lse decays draft_stats
        draft_temperatures found frequency key_scale keys log_a lowest min_p partial_lse
        partial_output partials presence related repetition statistics target_temperatures
        temperature temperatures temperatures_out top_p updates value_scale
    """,
    "*i1": "ancestors invalid",
    "*i32": """
        accepted all_modes all_token_ids all_tokens all_top_k block_table bounds branch_lengths
        children
        computed computed_before context_lens contexts counts cu_nodes cu_num_logits
        cu_rows decided_in decisions depths first_rows inner_index inner_rows input_ids
        modes modes_out node_table nodes num_nodes num_sampled num_words offsets output_counts
        merged parents places plan programs prompt_bits
        prompt_lens query_start_loc read root_positions_out roots row_nodes row_slots scored
        seq_lens starts state_indices state_rows state_rows_out texts token_ids
        token_ids_out top_k total_lens visits words
    """,
    "*i64": """
        addresses all_seeds candidates last_rows layout noted_slots positions positions_out
        predictions requests rows sampled_tokens seeds seeds_out shifts slots target_tokens tokens
        tokens_out told
    """,
    "fp32": "lower_bound scale soft_cap",
    "i32": """
        accepted_stride ahead ancestors_stride at_once axis_stride bits_stride
        block_size branches children_stride columns context_lse_stride counts_stride depth
        first first_node gate_stride has_statistics ids_stride layer_rows length longest mask_token
        max_children max_len max_nodes max_positions max_requests max_trees most_nodes
        num_blocks num_invalid num_nodes_launched num_parts num_programs num_requests num_rows
        num_state_rows num_states num_visits of_all offsets_stride path_columns row_tiles
        rows_per_tree sampled_stride scored_stride slot_rows splits state_offset
        stats_inner_stride stats_state_stride steps strength_stride table_stride texts_stride
        told_columns told_stride tree_size trees walks_sampled wave width window words_stride
    """,
    "i32:16": """
        block_stride channels draft_inner_stride draft_state_stride dt_stride hidden
        input_stride key_block_stride key_head_stride key_row_stride key_slot_stride
        key_token_stride layer_stride
        logits_stride output_head_stride output_token_stride padded_rows query_head_stride
        query_token_stride slots_stride states_stride token_stride value_block_stride
        value_head_stride value_row_stride value_slot_stride value_token_stride vocabulary
    """,
    "i64": "tokens_stride",
    "i64:16": "head_stride slot_stride",
}
TYPES = {name: kind for kind, names in _NAMES.items() for name in names.split()}
"""Types of arguments in most kernels, by their names, as in `Variant.signature`."""


@dataclass(frozen=True)
class Variant:
    """One way a kernel is compiled."""

    name: str
    kernel: Any
    signature: Mapping[str, str] = field(default_factory=dict)
    """Triton types of arguments where they are not those of `TYPES`, by name: ``"*bf16"``,
    ``"fp32"``, ``"i32"``, ... With ``":16"`` at its end it is a multiple of 16, as Triton finds for
    itself when a kernel is called; pointers without it are taken to be aligned so, as torch's
    memory is, unless the kernel is not specialised on that. Names that have a value in
    ``constexprs`` are constants; others than the kernel's do nothing."""
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None  # per thread, ``maxnreg`` of a launch
    capabilities: tuple[int, ...] = CAPABILITIES  # devices that it is meant for

    @property
    def types(self) -> dict[str, str]:
        """The type of each argument that is no constexpr."""
        known = {**TYPES, **self.signature}
        return {name: known[name] for name in self.kernel.arg_names if name not in self.constexprs}

    @property
    def launch(self) -> dict[str, Any]:
        """All but name and kernel: what the compiler is told, for hashing and comparing."""
        told = ("num_warps", "num_stages", "max_registers", "capabilities")
        return {
            "signature": {name: self.types.get(name) for name in self.kernel.arg_names},
            "constexprs": {name: str(value) for name, value in sorted(self.constexprs.items())},
            **{name: getattr(self, name) for name in told},
        }
