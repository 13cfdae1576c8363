"""Times of drawing, verification and commit, each alone."""

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.check.stage import KernelRun
from benchmarks.gpu.check.tree_batch import TreeBatch, best_tree
from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.kernels.commit import CacheLayers
from sequoia_vllm.kernels.modes import SAMPLED
from tests.support.committing import tables as block_tables

ACCEPTED, REJECTED = "verification, drafts accepted", "verification, drafts rejected"
DRAWING = "time of drawing"
_TREE_SIZE, _TREE_DEPTH = 64, 8


def reject_drafts(batch: TreeBatch, logits: Tensor) -> None:
    """Makes every child of the roots impossible: each costs a pass over the vocabulary."""
    by_node = logits.view(batch.num_reqs, batch.tables.tree.size, -1)
    children = batch.tables.children[0].long()
    tokens = batch.drafted.tokens[:, children[children >= 0]]
    by_node[:, 0].scatter_(1, tokens, float("-inf"))


def time_verification(run: KernelRun) -> None:
    """At batch 1 and 8, with vocabularies of 32k and 128k."""
    tree = best_tree(6, 2) if run.tiny else best_tree(_TREE_SIZE, _TREE_DEPTH)
    tables = TreeTables(tree, run.machine.device)
    for requests in (2,) if run.tiny else (1, 8):
        for vocabulary in (60,) if run.tiny else (32000, 128256):
            with run.attempt(f"verification, vocabulary {vocabulary}, batch {requests}"):
                _time_one(run, tables, requests, vocabulary)
        with run.attempt(f"commit, batch {requests}"):
            _time_commit(run, tables, requests)


def _time_one(run: KernelRun, tables: TreeTables, requests: int, vocabulary: int) -> None:
    dtype = torch.float32 if run.tiny else torch.bfloat16
    batch = TreeBatch(tables, requests, vocabulary, dtype, SAMPLED)
    logits = batch.draw_accepted()
    where = f"batch {requests}, vocabulary {vocabulary}"
    for depth, level in enumerate(tables.levels.levels):
        given = logits[: requests * level.width].to(dtype)
        run.time(f"{DRAWING}, level {depth}, {where}", [partial(batch.draw, level, given)])
    # What was drawn above is from other logits.
    logits = batch.draw_accepted()
    tree = tables.tree
    # Depth that is reached by first children alone.
    first_children = int((tree.ancestor_mask @ tree.child_ranks == 0).sum()) - 1
    for what in (ACCEPTED, REJECTED):
        if what == REJECTED:
            reject_drafts(batch, logits)
        for method in ("traversal", "sequoia"):
            run.time(f"{what}, by {method}, {where}", [partial(batch.verify, logits, method)])
        emitted = batch.num_sampled - 1
        right = emitted >= first_children if what == ACCEPTED else emitted == 0
        run.check(f"{what}, {where}: wrong paths", int((~right).sum()), 0)


def _time_commit(run: KernelRun, tables: TreeTables, requests: int) -> None:
    context = 20 if run.tiny else 1024
    layers, heads, size = (2, 2, 16) if run.tiny else (32, 32, 128)
    dtype = torch.float32 if run.tiny else torch.bfloat16
    columns = -(-(context + tables.tree.size) // 16)
    shape = (requests * columns, heads, 16, 2 * size)
    caches = [torch.zeros(shape, dtype=dtype, device=run.machine.device) for _ in range(layers)]
    block_table = block_tables(requests, columns, len(caches[0])).to(run.machine.device)
    batch = TreeBatch(tables, requests, 8, torch.float32, SAMPLED)
    batch.requests.roots.fill_(context)
    # The path to the last of the deepest nodes, so that most tokens move.
    path = tables.tree.ancestor_mask[tables.tree.levels[-1][-1]].nonzero()[0]
    batch.accepted.copy_(torch.from_numpy(path[1:]))
    commit = partial(batch.commit, CacheLayers.of(caches), block_table)
    run.time(f"commit of {layers} layers, {tables.tree.depth} tokens, batch {requests}", [commit])
