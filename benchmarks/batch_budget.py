"""Simulates a budget of tree nodes that a whole batch shares, along recorded answers.

    python -m benchmarks.batch_budget record "$(python -m examples.smollm2)" /tmp/traces
    python -m benchmarks.batch_budget simulate /tmp/traces --out budget.json

A trace has a target's answer, and of each of its positions the trees that the draft grows there.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks import markdown_table
from sequoia_vllm.drafting.dynamic_trees import inner_width
from sequoia_vllm.library.tree_library import find_vector
from sequoia_vllm.measuring.provenance import model_hashes, provenance
from sequoia_vllm.tree import Acceptance, TokenTree, optimize_tree
from sequoia_vllm.verification.retrieval import (
    TOLD_SHARE,
    continuations,
    following,
    preferred,
)
from sequoia_vllm.vocabulary.mapped import MappedVocabulary
from sequoia_vllm.vocabulary.matching import NONE, match
from sequoia_vllm.vocabulary.tokens import load_tokenizer, read_vocabulary
from tests.support.h200_arrivals import MACHINE

app = typer.Typer(add_completion=False)
DRAFT = "examples/models/smollm2-draft"
KINDS = ("chat", "summary", "code", "arithmetic", "translation")
LEVELS, WIDTH, BRANCH, TOLD = 8, 4, 6, 16  # of greedy trees; tokens of a told chain
REPLICATES = 2  # trees drawn at each position of a sampled answer
DRAWN = optimize_tree(find_vector("smollm2-sampled"), 16, 6)


# -- recording -------------------------------------------------------------------------------


def questions(each: int) -> Iterator[dict[str, Any]]:
    """So many of each kind, and as many that echo a text."""
    folder, left = Path("examples/smollm2"), dict.fromkeys((*KINDS, "echo"), each)
    for name in ("questions", "echoes"):
        for line in (folder / f"{name}.jsonl").read_text("utf-8").splitlines():
            found = json.loads(line)
            kind = "echo" if name == "echoes" else found["kind"]
            if left.get(kind, 0) > 0:
                left[kind] -= 1
                asked = [{"role": "user", "content": found.get("prompt", "")}]
                yield {"kind": kind, "messages": found.get("messages", asked)}


@torch.inference_mode()
def answers(model: Any, prompts: list[list[int]], temperature: float, most: int, end: int) -> Any:
    """The answers to some prompts, and P ``[tokens, V]`` before each of their tokens."""
    longest = max(map(len, prompts))
    rows = [[end] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    ids, past, tokens, laws = torch.tensor(rows), None, [], []
    for _ in range(most):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = model(ids, attention_mask=mask, position_ids=positions, past_key_values=past,
                    logits_to_keep=1)  # fmt: skip
        past, logits = out.past_key_values, out.logits[:, -1].float()
        if temperature > 0:
            laws.append((logits / temperature).softmax(dim=1))
            ids = laws[-1].multinomial(1)
        else:
            ids = logits.argmax(dim=1, keepdim=True)
        tokens.append(ids)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    for row, drawn in enumerate(torch.cat(tokens, 1).tolist()):
        count = drawn.index(end) + 1 if end in drawn else most
        yield drawn[:count], torch.stack([law[row] for law in laws[:count]]) if laws else None


class Draft:
    """The draft model, a Llama, over nodes that each see a part of one text and their own path."""

    def __init__(self, folder: str, target: str) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.weights, self.config = model.state_dict(), model.config
        ours, theirs = (read_vocabulary(load_tokenizer(name)) for name in (target, folder))
        assert ours is not None
        assert theirs is not None
        rows = json.loads(Path(target, "config.json").read_text("utf-8"))["vocab_size"]
        matching = match(ours, theirs, rows, self.config.vocab_size)
        self.vocabulary = MappedVocabulary(matching, torch.device("cpu"))
        # The target's token of each column; one more column is for what the text tells.
        self.drafted = torch.from_numpy((matching.drawn != NONE).nonzero()[0])
        self.column = torch.full((rows,), -1)
        self.column[self.drafted] = torch.arange(len(self.drafted))

    def read(
        self, tokens: Tensor, positions: Tensor, seen: Tensor, keys: Any = None, path: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Logits ``[M, columns]`` after M nodes, and keys with values ``[layers, 2, M, H, d]``.

        Args:
            seen: bool ``[M, L]``: tokens of the text ``keys`` (None: the nodes themselves).
            path: ``[layers, 2, M, p, H, d]`` of each node's ancestors below the root.
        """
        c, w, kept = self.config, self.weights, []
        heads, size = c.num_attention_heads, c.head_dim
        x = w["model.embed_tokens.weight"][self.vocabulary.read(tokens)]
        angles = positions[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
        cos, sin = (part(angles).repeat(1, 2)[:, None] for part in (torch.cos, torch.sin))

        def norm(x: Tensor, name: str) -> Tensor:
            return x * (x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps).rsqrt() * w[name]

        def turned(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            return x * cos + torch.cat([-second, first], dim=-1) * sin

        for layer in range(c.num_hidden_layers):
            name = f"model.layers.{layer}."
            h = norm(x, f"{name}input_layernorm.weight")
            q, k, v = (
                (h @ w[f"{name}self_attn.{part}_proj.weight"].T).view(-1, heads, size)
                for part in "qkv"
            )
            q, k = turned(q), turned(k)
            kept.append(torch.stack([k, v]))
            near_k, near_v = (k, v) if keys is None else keys[layer]
            scores = torch.einsum("mhd,lhd->mhl", q, near_k)
            scores = scores.masked_fill(~seen[:, None], -torch.inf)
            if keys is not None:
                own_k, own_v = (
                    torch.cat([path[layer, part], new[:, None]], 1)
                    for part, new in enumerate((k, v))
                )
                own = torch.einsum("mhd,mphd->mhp", q, own_k)
                scores = torch.cat([scores, own], dim=2)
            shares = (scores / size**0.5).softmax(dim=2)
            out = torch.einsum("mhl,lhd->mhd", shares[..., : len(near_v)], near_v)
            if keys is not None:
                out += torch.einsum("mhp,mphd->mhd", shares[..., len(near_v) :], own_v)
            x = x + out.flatten(1) @ w[f"{name}self_attn.o_proj.weight"].T
            h = norm(x, f"{name}post_attention_layernorm.weight")
            up = h @ w[f"{name}mlp.up_proj.weight"].T
            gate = torch.nn.functional.silu(h @ w[f"{name}mlp.gate_proj.weight"].T)
            x = x + (gate * up) @ w[f"{name}mlp.down_proj.weight"].T
        raw = norm(x, "model.norm.weight") @ w["model.embed_tokens.weight"].T
        return self.vocabulary.target_logits(raw)[:, self.drafted], torch.stack(kept)


@dataclass
class Text:
    """A prompt with its answer, as the draft sees it; R positions are roots of trees."""

    draft: Draft
    prompt: list[int]
    answer: list[int]

    def __post_init__(self) -> None:
        self.ids = torch.tensor(self.prompt + self.answer)
        count, length = len(self.answer) - 1, len(self.ids)
        self.roots = len(self.prompt) + torch.arange(count)
        places = torch.arange(length)
        seen = places <= places[:, None]
        self.logits, self.keys = self.draft.read(self.ids, places, seen)
        texts, rows = self.ids[None].int(), torch.zeros(count, dtype=torch.int64)
        self.told = continuations(texts, rows, self.roots + 1, TOLD)
        # int64 [R, TOLD + 1]: what the answer has after each root; -2 beyond its end.
        ahead = self.roots[:, None] + 1 + torch.arange(TOLD + 1)
        self.next = torch.where(ahead < length, self.ids[ahead.clamp(max=length - 1)], -2)
        seen_grams, self.matches = set(), np.zeros(length, dtype=np.int64)
        whole = self.ids.tolist()
        for end in range(1, length + 1):
            for many in range(1, min(8, end) + 1):
                gram = tuple(whole[end - many : end])
                self.matches[end - 1] = many if gram in seen_grams else self.matches[end - 1]
                seen_grams.add(gram)
        self.matches = self.matches[self.roots.numpy()]  # tokens of the longest match

    def columns(self, tokens: Tensor) -> Tensor:
        """Columns of told tokens, int64; -1 where nothing is told."""
        found = self.draft.column[tokens.clamp(min=0)]
        return torch.where(tokens < 0, -1, torch.where(found < 0, len(self.draft.drafted), found))

    def scores(self, logits: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """Logits with a column for ``given`` tokens ``[M]``: as they are, and as Q prefers them."""
        raw = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)
        return raw, preferred(raw, self.columns(given))

    def tokens(self, columns: Tensor, given: Tensor) -> Tensor:
        """The target's tokens of columns ``[M, n]`` where ``given [M]`` are told."""
        drafted = torch.nn.functional.pad(self.draft.drafted, (0, 1), value=-3)
        found = drafted[columns]
        return torch.where(found == -3, given[:, None].expand_as(found), found)

    def below(self, tokens: Tensor, level: int, roots: Tensor, path: Tensor) -> Any:
        """Logits and keys of nodes ``[R, m]`` of a level, see `Draft.read`."""
        many = tokens.shape[1]
        seen = (torch.arange(len(self.ids)) <= roots[:, None]).repeat_interleave(many, 0)
        positions = (roots + level).repeat_interleave(many)
        return self.draft.read(tokens.flatten(), positions, seen, self.keys, path)


def ranks(text: Text) -> Tensor:
    """int64 ``[R, LEVELS]``: place of the text's tokens among the draft's, from each root on."""
    found = []
    for level in range(LEVELS):
        place = (text.roots + level).clamp(max=len(text.ids) - 1)
        given = following(text.ids[place][:, None], text.told, level)[:, 0]
        _, scores = text.scores(text.logits[place], given)
        after = text.next[:, level]
        column = torch.where(after == given, text.columns(given), text.draft.column[after])
        is_there = (column >= 0) & (after >= 0)
        own = scores.gather(1, column.clamp(min=0)[:, None])
        found.append(torch.where(is_there, (scores > own).sum(dim=1), 9999))
    return torch.stack(found, dim=1)


def grown(text: Text) -> dict[str, Tensor]:
    """Candidates ``[R, C]`` of greedy trees: at each level a told one, then the draft's."""
    count, told = len(text.roots), text.told
    logits, path = text.logits[text.roots], torch.empty(0)
    kept: Any = None
    before = -1
    tokens, values = text.ids[text.roots][:, None], torch.zeros(count, 1)
    ids = torch.full((count, 1), -1)  # candidates that are read; the root: -1
    on_chain = told[:, :1] >= 0
    first, rows = 0, []
    for level in range(TOLD):
        is_told = torch.ones(count, 1, dtype=torch.bool)
        mine = {
            "parent": torch.full((count, 1), before),
            "told": is_told, "exists": told[:, level, None] >= 0, "q": torch.zeros(count, 1),
            "logit": torch.zeros(count, 1), "inner": torch.full((count, 1), 99),
            "ok": told[:, level, None] == text.next[:, level, None], "beside": ~is_told,
        }  # fmt: skip
        before, size = first, 1
        if level < LEVELS:
            width = tokens.shape[1]
            given = following(tokens, told, level).flatten()
            raw, scores = text.scores(logits, given)
            best = scores.log_softmax(dim=1).topk(BRANCH, dim=1)
            likely = raw.log_softmax(dim=1).gather(1, best.indices).clamp(-20, -1e-6)
            shape = count, width * BRANCH
            children = text.tokens(best.indices, given).view(shape)
            chained = on_chain.repeat_interleave(BRANCH, 1) & (children == told[:, level, None])
            inner = torch.arange(width).repeat_interleave(BRANCH).expand(shape)
            logit = (likely - torch.log(-torch.expm1(likely))).view(shape)
            drafts = {
                "parent": ids.repeat_interleave(BRANCH, 1), "told": torch.zeros_like(chained),
                "exists": ~chained, "q": best.values.view(shape), "logit": logit, "inner": inner,
                "ok": children == text.next[:, level, None],
                "beside": on_chain.repeat_interleave(BRANCH, 1),
            }  # fmt: skip
            has = chained.any(dim=1)
            where = chained.int().argmax(dim=1, keepdim=True)
            for key in ("q", "logit", "inner"):
                mine[key][has] = drafts[key].gather(1, where)[has]
            mine = {key: torch.cat([mine[key], drafts[key]], 1) for key in mine}
            size += width * BRANCH
            if level + 1 < LEVELS:
                whole = values.repeat_interleave(BRANCH, 1) + drafts["q"]
                values, chosen = whole.topk(min(WIDTH, whole.shape[1]), dim=1)
                ids = torch.where(chained.gather(1, chosen), first, first + 1 + chosen)
                on_chain = chained.gather(1, chosen)
                tokens, above = children.gather(1, chosen), chosen // BRANCH
                if level == 0:
                    c = text.draft.config
                    path = torch.empty(
                        c.num_hidden_layers, 2, tokens.numel(), 0, c.num_attention_heads, c.head_dim
                    )
                else:
                    rows_above = (torch.arange(count)[:, None] * width + above).flatten()
                    path = torch.cat([path, kept[:, :, :, None]], 3)[:, :, rows_above]
                logits, kept = text.below(tokens, level + 1, text.roots, path)
        rows.append(mine)
        first += size
    found = {key: torch.cat([row[key] for row in rows], 1) for key in rows[0]}
    found["level"] = torch.cat([torch.full((row["q"].shape[1],), n) for n, row in enumerate(rows)])
    return found


def drawn(text: Text, law: Tensor, temperature: float) -> dict[str, Tensor]:
    """Drawn trees `DRAWN` given the text: nodes ``[R * REPLICATES, N]``, level by level.

    Given that Algorithm 2 emits y after a node, it accepts the next child x as y with probability
    min(1, D(y) / R(y)); else x comes from max(D - R, 0), whatever y is.
    """
    text.roots = text.roots.repeat_interleave(REPLICATES)
    text.told, text.next = (
        values.repeat_interleave(REPLICATES, 0) for values in (text.told, text.next)
    )
    count, tree, pad = len(text.roots), DRAWN, len(text.draft.drafted)
    tokens, on = {0: text.ids[text.roots]}, {0: torch.ones(count, dtype=torch.bool)}
    kept: dict[int, Tensor] = {}
    found: dict[str, dict[int, Tensor]] = {"logit": {}, "told": {}, "on": {}}
    for node in np.argsort(tree.depths, kind="stable").tolist():
        if not tree.children[node]:
            continue
        level = int(tree.depths[node])
        if node == 0:
            logits = text.logits[text.roots]
        else:
            line = []
            up = tree.parents[node]
            while up > 0:
                line.append(kept[up])
                up = tree.parents[up]
            c = text.draft.config
            none = torch.empty(c.num_hidden_layers, 2, count, 0, c.num_attention_heads, c.head_dim)
            path = torch.stack(line[::-1], 3) if line else none
            logits, kept[node] = text.below(tokens[node][:, None], level, text.roots, path)
        given = following(tokens[node][:, None], text.told, level)[:, 0]
        _, scores = text.scores(logits / temperature, given)
        d = torch.nn.functional.pad(scores.softmax(dim=1), (0, 1))  # the last column: all others
        y = text.next[:, level]
        p = law[(text.roots - len(text.prompt) + 1 + level).clamp(max=len(law) - 1)]
        r = torch.zeros_like(d)
        r[:, :pad] = p[:, text.draft.drafted]
        extra = (given >= 0) & (text.draft.column[given.clamp(min=0)] < 0)
        r[extra, pad] = p[extra, given[extra]]
        r[:, pad + 1] = (1 - r[:, : pad + 1].sum(dim=1)).clamp(min=0)
        column = text.draft.column[y.clamp(min=0)]
        column = torch.where(extra & (y == given), pad, torch.where(column < 0, pad + 1, column))
        open_ = on[node] & (y >= 0)
        for child in tree.children[node]:
            best = d.max(dim=1).values.clamp(1e-6, 1 - 1e-6)
            found["logit"][child], found["told"][child] = best.logit(), given >= 0
            of_y = d.gather(1, column[:, None])[:, 0] / r.gather(1, column[:, None])[:, 0]
            taken = open_ & (torch.rand(count) < of_y)
            left = torch.where(open_[:, None], (d - r).clamp(min=0), d)
            left[left.sum(dim=1) <= 0] = d[left.sum(dim=1) <= 0]
            place = torch.where(taken, column, left.multinomial(1)[:, 0])
            on[child] = found["on"][child] = taken
            tokens[child] = text.tokens(place[:, None].clamp(max=pad), given)[:, 0]
            rest = (r - d).clamp(min=0)
            mass = rest.sum(dim=1, keepdim=True)
            r = torch.where(mass > 0, rest / mass.clamp(min=1e-30), r)
            d = d.scatter(1, place[:, None], 0.0)
            d = d / d.sum(dim=1, keepdim=True).clamp(min=1e-30)
            open_ = open_ & ~taken
    nodes = np.argsort(tree.depths, kind="stable")[1:].tolist()
    return {key: torch.stack([of[node] for node in nodes], 1) for key, of in found.items()}


@app.command()
def record(
    target: Annotated[str, typer.Argument(help="Folder of the target.")],
    out: Annotated[Path, typer.Argument(help="Folder for the traces.")],
    each: Annotated[int, typer.Option(help="Questions of each kind.")] = 16,
    most: Annotated[int, typer.Option(help="Tokens of an answer.")] = 96,
    temperatures: Annotated[str, typer.Option(help="Comma-separated.")] = "0,0.6,1",
    batch: Annotated[int, typer.Option(help="Questions answered together.")] = 16,
) -> None:
    """Lets the target answer, and the draft grow its trees along the answers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    draft, asked = Draft(DRAFT, target), list(questions(each))
    prompts = [
        tokenizer.apply_chat_template(
            one["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for one in asked
    ]
    out.mkdir(exist_ok=True)
    order = sorted(range(len(asked)), key=lambda one: len(prompts[one]))
    for temperature in map(float, temperatures.split(",")):
        traces = []
        for first in range(0, len(order), batch):
            part = order[first : first + batch]
            replies = answers(model, [prompts[one] for one in part], temperature, most,
                              tokenizer.eos_token_id)  # fmt: skip
            for one, (answer, law) in zip(part, replies, strict=True):
                if len(answer) < 4:
                    continue
                with torch.inference_mode():
                    text = Text(draft, prompts[one], answer)
                    trace: dict[str, Any] = {"kind": asked[one]["kind"], "length": len(answer)}
                    trace["matches"] = text.matches
                    if law is None:
                        trace |= grown(text) | {"ranks": ranks(text)}
                    else:
                        trace |= drawn(text, law, temperature)
                    traces.append(trace)
            typer.echo(f"T = {temperature:g}: {len(traces)} answers")
        torch.save(traces, out / f"{temperature:g}.pt")


# -- simulating ------------------------------------------------------------------------------


class Traces:
    """Trees at P positions of all answers of one temperature, C candidates each.

    Attributes:
        on: bool ``[P, C]``: whether the text goes through a candidate.
        features: float32 ``[P, C, K]``, of which acceptance given the parent's is a logistic
            function; all are known before the candidate's own token is drawn, unless greedy.
    """

    def __init__(self, traces: list[dict[str, Any]]) -> None:
        self.greedy = "ranks" in traces[0]
        self.lengths = np.array([trace["length"] for trace in traces])
        self.first = np.concatenate([[0], np.cumsum(self.lengths - 1)])
        fields = {
            key: np.concatenate([np.asarray(trace[key]) for trace in traces])
            for key in traces[0].keys() - {"kind", "length", "level"}
        }
        matches, one = fields["matches"], np.float32(1)
        self.draws = 1  # trees drawn at each position
        if self.greedy:
            self.level = np.asarray(traces[0]["level"])
            self.parent, self.ranks, self.q = fields["parent"], fields["ranks"], fields["q"]
            self.told, self.exists, self.inner = fields["told"], fields["exists"], fields["inner"]
            self.on = fields["ok"] & fields["exists"]
            for level in range(1, TOLD):
                at = self.level == level
                self.on[:, at] &= np.take_along_axis(self.on, self.parent[:, at], 1)
            self.previous: list[int] | None = None
            rank, beside = np.zeros_like(self.parent), fields["beside"]
        else:
            order = np.argsort(DRAWN.depths, kind="stable")[1:]
            place = np.zeros(DRAWN.size, dtype=np.int64)
            place[order] = np.arange(len(order))
            parents = DRAWN.parents_array[order]
            self.level = DRAWN.depths[order] - 1
            self.parent = np.where(parents == 0, -1, place[parents])[None]
            ranks = DRAWN.child_ranks[order]
            self.previous = [
                place[DRAWN.children[parent][rank - 1]] if rank else -1
                for parent, rank in zip(parents, ranks, strict=True)
            ]
            self.on = fields["on"]
            self.draws = len(self.on) // len(matches)
            matches = np.repeat(matches, self.draws)
            for level in range(1, self.level.max() + 1):
                at = self.level == level
                self.on[:, at] &= self.on[:, self.parent[0, at]]
            self.told = fields["told"] & (ranks == 0)
            rank, beside = np.broadcast_to(ranks, self.on.shape), fields["told"] & (ranks > 0)
            self.exists = np.ones_like(self.on)
        logit, model = fields["logit"].astype(np.float32), ~self.told
        columns = [model * (rank == r) * x for r in (0, 1) for x in (logit, one)]
        columns += [model * (rank > 1) * x for x in (logit, one)]
        columns += [model & beside, model & (self.level > 0)]
        for low, high in ((2, 2), (3, 3), (4, 7), (8, 8)):
            columns.append(self.told & ((matches >= low) & (matches <= high))[:, None])
        columns += [self.told * logit, self.told * np.log1p(self.level)]
        columns.append(self.told & (fields["inner"] == 99) if self.greedy else 0 * self.told)
        self.features = np.stack([np.asarray(c, dtype=np.float32) for c in columns], axis=-1)

    def begin(self) -> np.ndarray:
        """Weights that are assumed before anything was seen."""
        slope, bias = (1.0, 0.0) if self.greedy else (0.5, -0.2)
        weights = [slope, bias, slope, bias - 1, slope, bias - 2, -1, 0, 0.5, 1, 1.5, 2, 0.1, 0, 0]
        return np.array(weights)


@dataclass(frozen=True)
class Policy:
    """How nodes are chosen.

    Attributes:
        tree: A static tree, or nodes of `DRAWN` for sampled requests; None: by value.
        passes, width: Levels that the draft reads, and nodes of each.
        shared: Whether requests share the budget.
        calibrated: Values are fitted acceptance; else Q.
        chains: Told tokens may follow where the draft reads nothing.
        history: Weight of what the request accepted so far, relative to what was expected.
        most, deepest: Nodes that a request may get, and levels: buffers may be no larger.
    """

    name: str
    passes: int
    width: int = WIDTH
    tree: Any = None
    shared: bool = False
    calibrated: bool = True
    chains: bool = True
    history: float = 0.0
    most: int = 999
    deepest: int = TOLD


class Estimator:
    """Acceptance of a candidate given its parent's: fitted to what was verified."""

    def __init__(self, weights: np.ndarray) -> None:
        self._begin = self.weights = weights
        self._seen: list[tuple[np.ndarray, np.ndarray]] = []

    def chances(self, features: np.ndarray, shift: Any = 0.0) -> np.ndarray:
        """Chances ``[N, C]``; ``shift`` is added to their log-odds."""
        odds = features @ self.weights.astype(np.float32) + shift
        return np.clip(1 / (1 + np.exp(-odds)), 1e-4, 0.998)

    def learn(self, features: np.ndarray, accepted: np.ndarray, step: int) -> None:
        """Adds what a step showed; now and then fits the latest ones anew."""
        self._seen.append((features, accepted))
        if step % 16 == 15 or step in (2, 6):
            self._seen = self._seen[-128:]
            x = np.concatenate([a for a, _ in self._seen]).astype(np.float64)[-8000:]
            y = np.concatenate([b for _, b in self._seen])[-8000:]
            for _ in range(3):
                p = 1 / (1 + np.exp(-x @ self.weights))
                slope = x.T @ (y - p) - 2.0 * (self.weights - self._begin)
                curve = (x * (p * (1 - p))[:, None]).T @ x + 2.0 * np.eye(x.shape[1])
                self.weights = self.weights + np.linalg.solve(curve, slope)


def static_walks(traces: Traces, tree: TokenTree) -> np.ndarray:
    """Accepted drafts of a static tree at each position."""
    found = np.zeros(len(traces.ranks), dtype=np.int64)
    for place, row in enumerate(traces.ranks.tolist()):
        node = 0
        for rank in row:
            if rank >= len(tree.children[node]):
                break
            node = tree.children[node][rank]
            found[place] += 1
    return found


class View:
    """The candidates of some traces that a policy may choose from, of P positions n."""

    def __init__(self, traces: Traces, policy: Policy) -> None:
        readable = traces.exists & (traces.level < policy.passes)
        features = traces.features
        kept = np.arange(len(traces.level))
        if traces.greedy:
            is_read = readable = readable & (traces.inner < policy.width)
            if policy.chains:
                told = traces.exists & traces.told & (traces.level < policy.deepest)
                readable = readable | told
            kept = np.flatnonzero(readable.any(axis=0))
            # The draft's opinion of told tokens, where it reads so far.
            features = features[:, kept].copy()
            features[..., 12] *= is_read[:, kept]
            features[..., 14] = traces.told[:, kept] & ~is_read[:, kept]
            likely = np.exp(np.minimum(traces.q[:, kept], -1e-4)).astype(np.float32)
            self.q = np.where(is_read[:, kept], likely, np.float32(TOLD_SHARE))
        self.features, self.readable = features, readable[:, kept]
        self.on, level = traces.on[:, kept], traces.level[kept]
        self.levels = [np.flatnonzero(level == n) for n in range(level.max() + 1)]
        # Places of parents, plus one: 0 is the root, the last one is nowhere.
        place = np.full(len(traces.level) + 1, len(kept) + 1)
        place[0], place[kept + 1] = 0, np.arange(len(kept)) + 1
        of_kept = traces.parent[:, kept] if traces.greedy else traces.parent
        self.above = np.broadcast_to(place[of_kept + 1], self.on.shape)
        self.previous = traces.previous


def simulate_once(
    traces: Traces, policy: Policy, view: View | None, requests: int, drafts: int, seed: int
) -> float:
    """Tokens per step of a request, while a stream of answers is served."""
    rng = np.random.default_rng(seed)
    answers = len(traces.lengths)
    # A bootstrap: its spread is that of the questions and of their order.
    queue = rng.integers(answers, size=5 * requests).tolist()
    running = np.array([queue.pop() for _ in range(requests)])
    at = (rng.random(requests) * (traces.lengths[running] - 1)).astype(np.int64)
    history = np.zeros((requests, 2))
    estimator = Estimator(traces.begin())
    tokens = steps = step = 0
    walks = static_walks(traces, policy.tree) if isinstance(policy.tree, TokenTree) else None
    while True:
        place = (traces.first[running] + at) * traces.draws + rng.integers(
            traces.draws, size=requests
        )
        if walks is not None:
            accepted = walks[place]
        elif policy.tree is not None:
            accepted = traces.on[place][:, policy.tree].sum(axis=1)
        else:
            assert view is not None
            on, above, features = view.on[place], view.above[place], view.features[place]
            shift: Any = 0.0
            if policy.history:
                ratio = np.log((history[:, 0] + 2) / (history[:, 1] + 2))
                shift = policy.history * ratio[:, None]
            chances = estimator.chances(features, shift) if policy.calibrated else view.q[place]
            chances = chances * view.readable[place]
            values = np.ones((requests, on.shape[1] + 2))
            values[:, -1] = 0.0
            for nodes in view.levels:
                whole = np.take_along_axis(values, above[:, nodes], 1)
                values[:, nodes + 1] = whole * chances[:, nodes]
                for node in nodes if (earlier := view.previous) else ():
                    if earlier and (before := earlier[node]) >= 0:
                        values[:, node + 1] = np.minimum(
                            values[:, node + 1], 0.999 * values[:, before + 1]
                        )
            values = values[:, 1:-1]
            if policy.most < values.shape[1]:
                worst = np.argsort(-values, axis=1, kind="stable")[:, policy.most :]
                np.put_along_axis(values, worst, 0.0, 1)
            chosen = np.zeros_like(on)
            if policy.shared:
                best = np.argsort(-values.ravel(), kind="stable")[: requests * drafts]
                chosen.ravel()[best] = True
            else:
                best = np.argsort(-values, axis=1, kind="stable")[:, :drafts]
                np.put_along_axis(chosen, best, True, 1)
            chosen &= values > 0
            known = np.pad(on, ((0, 0), (1, 1)))
            known[:, 0] = True
            seen = chosen & np.take_along_axis(known, above, 1)
            estimator.learn(features[seen], on[seen], step)
            history *= 0.9
            history[:, 0] += (seen & on).sum(1)
            history[:, 1] += np.where(seen, chances, 0).sum(1)
            accepted = (chosen & on).sum(axis=1)
        left = traces.lengths[running] - 1 - at
        gained = np.minimum(accepted + 1, left)
        if step >= 8:  # the first steps teach
            tokens, steps = tokens + gained.sum(), steps + requests
        at += gained
        for slot in np.flatnonzero(gained == left):
            if not queue:
                return tokens / steps
            running[slot], at[slot], history[slot] = queue.pop(), 0, 0
        step += 1


def static_trees(traces: Traces, drafts: int) -> list[TokenTree]:
    """The best trees by the traces' own acceptance, and by the shipped one, and a chain."""
    table, covered = [], np.ones(len(traces.ranks), dtype=bool)
    for rank in traces.ranks.T:
        table.append([float((rank[covered] == child).mean()) for child in range(8)])
        covered &= rank < 4
    vectors = Acceptance.of(table), find_vector("smollm2-greedy")
    found = [optimize_tree(vector, drafts + 1, LEVELS) for vector in vectors]
    return [*found, TokenTree.chain(drafts)]


def policies(traces: Traces, drafts: int) -> list[Policy]:
    """The rules that are compared; the first ones are static."""
    if not traces.greedy:
        means = traces.on.mean(axis=0)
        nodes = np.sort(np.argsort(-means, kind="stable")[:drafts])
        passes = int(traces.level[nodes].max()) + 1
        most = int(traces.level.max()) + 1
        rule = "known before the draw"
        return [
            Policy("static", passes, tree=nodes),
            Policy(f"own share, {rule}", passes),
            Policy(f"own share, {rule}, more passes", most),
            Policy(f"batch, {rule}", passes, shared=True),
            Policy(f"batch, {rule}, more passes", most, shared=True),
            Policy(f"batch, {rule}, more passes, history", most, shared=True, history=0.5),
        ]
    trees = static_trees(traces, drafts)
    passes = max(trees[0].depth, 1)
    width = min(max(inner_width(drafts + 1, passes), 1), WIDTH)
    found = [Policy("static", tree.depth, tree=tree) for tree in trees]
    return [
        *found,
        Policy("own share, Q", passes, width, calibrated=False, chains=False),
        Policy("own share, calibrated", passes, width, chains=False),
        Policy("own share, calibrated, told chains", passes, width),
        Policy("batch, Q", passes, width, shared=True, calibrated=False, chains=False),
        Policy("batch, Q, told chains", passes, width, shared=True, calibrated=False),
        Policy(
            "batch, Q, told chains, at most 15 nodes, 6 deep",
            passes,
            width,
            shared=True,
            calibrated=False,
            most=15,
            deepest=6,
        ),
        Policy("batch, calibrated", passes, width, shared=True, chains=False),
        Policy("batch, calibrated, told chains", passes, width, shared=True),
        Policy("batch, calibrated, told chains, history", passes, width, shared=True, history=0.5),
        Policy(
            "batch, calibrated, told chains, 2 more passes",
            min(passes + 2, LEVELS),
            width,
            shared=True,
        ),
        Policy("batch, calibrated, told chains, 8 passes of 4", LEVELS, WIDTH, shared=True),
    ]


@app.command()
def simulate(
    folder: Annotated[Path, typer.Argument(help="Folder with the traces.")],
    cases: Annotated[str, typer.Option(help="REQUESTS:DRAFTS, comma-separated.")] = (
        "8:7,8:12,32:2,32:3,32:5,64:1,64:3"
    ),
    temperatures: Annotated[str, typer.Option(help="Comma-separated.")] = "0,0.6,1",
    seeds: Annotated[int, typer.Option(help="Streams of each case.")] = 8,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Serves the same streams of answers with each rule; prints tokens per step and gains."""
    rows: list[dict[str, Any]] = []
    for temperature in map(float, temperatures.split(",")):
        traces = Traces(torch.load(folder / f"{temperature:g}.pt", weights_only=False))
        for case in cases.split(","):
            requests, drafts = map(int, case.split(":"))
            rules, found = policies(traces, drafts), {}
            for place, policy in enumerate(rules):
                view = View(traces, policy) if policy.tree is None else None
                found[place] = np.array([
                    simulate_once(traces, policy, view, requests, drafts, seed)
                    for seed in range(seeds)
                ])  # fmt: skip
            static = [place for place in found if rules[place].tree is not None]
            best = max(static, key=lambda place: found[place].mean())

            def price(place: int) -> float:
                passes = rules[place].passes  # noqa: B023
                return MACHINE.seconds(passes, drafts, requests, requests * (1 + drafts), 0, 0)  # noqa: B023

            for place in [best, *(set(found) - set(static))]:
                gain = found[place] / found[best] - 1
                rows.append({
                    "T": temperature, "requests": requests, "drafts each": drafts,
                    "nodes chosen by": rules[place].name, "draft passes": rules[place].passes,
                    "tokens per step": round(float(found[place].mean()), 3),
                    "gain, %": round(100 * float(gain.mean()), 1),
                    "its spread, %": round(100 * float(gain.std(ddof=1)), 1),
                    "gain in speed at an H200's prices, %": round(100 * float(
                        (gain.mean() + 1) * price(best) / price(place) - 1), 1),
                })  # fmt: skip
                typer.echo(json.dumps(rows[-1]))
    shown = [[str(value) for value in row.values()] for row in rows]
    typer.echo(markdown_table(list(rows[0]), shown))
    if out is not None:
        models = {"draft": model_hashes(DRAFT)}
        out.write_text(json.dumps({"rows": rows, "provenance": provenance(models=models)}) + "\n")


if __name__ == "__main__":
    app()
