"""Every figure of the pages' tables is what the file that stands beside it says."""

import json
import re
from functools import cache
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from benchmarks.serving.table import make_summary
from benchmarks.speed_picture import report_of
from benchmarks.synthetic_target.__main__ import app as synthetic_target
from sequoia_vllm.cli import bench, tune
from sequoia_vllm.library.tree_library import find_tree
from tests.support.commands import command
from tests.support.models import TARGET

ROOT = Path(__file__).parents[2]
README, BENCHMARKS, OFFLOADING = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/benchmarks.md", "docs/offloading.md")
)
H100, H200 = "benchmarks/speeds/h100.json", "benchmarks/gpu/h200.jsonl"
# What pages call a method of `bench`, where it is not the same name.
ALIASES = {
    "Sequoia auto": "Sequoia", "Sequoia, always 6 nodes, 4 deep": "Sequoia 6x4",
    "chain of 2, of ours": "Sequoia 3x2", "plain": "plain vLLM",
}  # fmt: skip
SPEED = re.compile(r"(\d+\.\d\d)x \((\d+\.\d\d) to (\d+\.\d\d)(?:; ([^)]*))?\)")
RATE = re.compile(r"plain vLLM, ([\d.]+) tokens/s")


def name_of(label):
    name = re.sub(r"\*\*|`|vLLM's |head: | as it is|, tokens/s|, `?prob.*", "", label).strip()
    return ALIASES.get(name, name)


def spread(speeds):
    return {"median": median(speeds), "low": min(speeds), "high": max(speeds)}


@cache
def measured(file):
    """Results by (temperature, requests, method), and the first of each (rate, method) that
    arrived."""
    text = (ROOT / file).read_text(encoding="utf-8")
    parts = [json.loads(x) for x in (text.splitlines() if file.endswith("l") else [text])]
    found, arrived = {}, {}
    for row in [row for part in parts for row in part.get("results", [])]:
        found.setdefault((row["temperature"], row["batch_size"], name_of(row["method"])), row)
    for row in parts[0].get("speeds", []):
        plain, *_ = row["rounds"]
        for method, rates in zip(parts[0]["methods"], row["rounds"], strict=True):
            ratios = [rate / base for rate, base in zip(rates, plain, strict=True)]
            found[row["temperature"], row["requests"], name_of(method)] = {
                "speedup": spread(ratios), "tokens_per_second": spread(rates)
            }  # fmt: skip
    for row in parts[0].get("arrivals", []) + [x for x in parts if x.get("what") == "arrivals"]:
        arrived.setdefault((row["rate"], name_of(row["method"])), row)
    return found, arrived


def rounded(value, like):
    """A number with as many decimals as ``like``."""
    return f"{value:,.{len(like.partition('.')[2])}f}"


def speed_of(result):
    speed = result["speedup"]
    return f"{speed['median']:.2f}x ({speed['low']:.2f} to {speed['high']:.2f})"


def tables(text):
    """Tables as lists of rows, a row as a list of cells; without bold type."""
    for block in re.findall(r"(?:^\|.*\n)+", text.replace("**", ""), re.M):
        rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in block.splitlines()
        ]
        yield [row for row in rows if not set("".join(row)) <= set("-:")]


def wrong_cell(corner, row, column, cell, results):
    """Why a cell is wrong; None: it says what was measured."""
    words = f"{corner} {row} {column}"
    temperature = re.search(r"(?:temperature|T =) ([\d.]+)", words)
    requests = re.search(r"(\d+) request", words)
    names = {name for *_, name in results}
    rate = RATE.fullmatch(row)
    labels = "plain" if rate else row, column
    method = next((name for name in map(name_of, labels) if name in names), None)
    if method is None or requests is None or not (temperature or "greedy" in words):
        return f"whose is {cell!r} ({words})?"
    case = float(temperature[1]) if temperature else 0.0, int(requests[1]), method
    if case not in results:
        return f"not measured: {case}"
    result, said = results[case], cell
    if rate and rate[1] != rounded(result["tokens_per_second"]["median"], rate[1]):
        return f"{row}: {result['tokens_per_second']}"
    if found := SPEED.fullmatch(cell):
        said = f"{found[1]}x ({found[2]} to {found[3]})"
        right = speed_of(result)
    elif "tokens/s" in column or row == "plain vLLM, tokens/s":
        right = rounded(result["tokens_per_second"]["median"], cell)
    elif column == "speed":
        right = f"{result['speedup']['median']:.2f}x"
    elif column == "tokens per step":
        right = f"{result['tokens_per_step']:.2f}"
    elif column == "a step":
        right = f"{1e3 * result['step_seconds']:.0f} ms"
    else:
        return f"what is {cell!r}?"
    return None if said == right else f"{cell!r} ({words}) is {right!r}"


def wrong_arrival(rate, name, cells, arrived):
    row = arrived.get((float(rate), name_of(name)))
    if row is None:
        return f"not measured: {rate}, {name}"
    right = [f"{row['e2e_ms']:.0f} ms", f"{row['ttft_ms']:.0f} ms", f"{row['tpot_ms']:.1f} ms",
             f"{row['tokens_per_second']:,.0f}"]  # fmt: skip
    return None if cells == right else f"{cells} is {right}"


def errors_in(text, files):
    """What is wrong in the tables of a section of a page, with the results of its files."""
    results, arrived = {}, {}
    for file in files:
        for both, own in zip((results, arrived), measured(file), strict=True):
            both.update(own)
    found, shown = [], set()
    for [corner, *columns], *rows in tables(text):
        for label, *cells in rows:
            if corner == "arrivals":
                rate = re.fullmatch(r"(\d+) a second", label)
                wrong = rate and wrong_arrival(rate[1], cells[0], cells[1:], arrived)
                found.append(wrong if rate else label)
                continue
            for column, cell in zip(columns, cells, strict=True):
                found.append(wrong_cell(corner, label, column, cell, results))
            shown |= {f"{x[1]}x ({x[2]} to {x[3]})" for x in map(SPEED.fullmatch, cells) if x}
    left = {speed_of(row) for row in results.values()} - shown - {"1.00x (1.00 to 1.00)"}
    return [one for one in found if one] + [f"not shown: {one}" for one in sorted(left)]


def slug(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def section(page, anchor):
    [found] = [x for x in page.split("\n## ") if slug(x.partition("\n")[0]) == anchor]
    return found + "\n"


def linked(row):
    """The page and the anchor of the section that a row links to."""
    for path, anchor in re.findall(r"\((?:docs/)?([\w.-]*)#([\w-]+)\)", row):
        if path in ("", "benchmarks.md", "offloading.md"):
            return (OFFLOADING if path == "offloading.md" else BENCHMARKS), anchor
    return None


FILES = {
    linked(row): tuple(re.findall(r"`(benchmarks/[\w/.-]+)`", row))
    for row in re.findall(r"^\| .*`benchmarks/.*$", BENCHMARKS, re.M)
}
SECTIONS = {anchor: (page, anchor) for page, anchor in FILES if "arrivals" not in anchor}
# The first table of that section: older runs below it have no files.
OLDER = "**Older runs**"


def checked(page, anchor):
    return section(page, anchor).partition(OLDER)[0]


def mutants(text):
    """The text with one number of its tables changed, for each number."""
    for line in re.finditer(r"^\|.*", text, re.M):
        for number in re.finditer(r"\d", line[0]):
            at = line.start() + number.start()
            yield text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]


@pytest.mark.parametrize("name", SECTIONS)
def test_tables_say_what_their_files_say(name):
    where = SECTIONS[name]
    text, files = checked(*where), FILES[where]
    assert errors_in(text, files) == []
    changed = list(mutants(text))
    assert len(changed) > 10
    assert all(errors_in(mutant, files) for mutant in changed)


def test_every_file_of_bench_has_a_section():
    named = {name for files in FILES.values() for name in files}
    others = {f"benchmarks/speeds/{x.name}" for x in (ROOT / "benchmarks/speeds").glob("*")} - named
    assert all("/echo-kinds" in name for name in others)  # in the notebook


def test_the_table_of_servers_is_what_the_command_prints():
    [file] = FILES[BENCHMARKS, "servers-under-random-arrivals"]
    rows = json.loads((ROOT / file).read_text(encoding="utf-8"))["rows"]
    assert make_summary(rows) in BENCHMARKS


OURS = {
    "": "Sequoia", "without a draft": "Sequoia, lookup",
    "without retrieval": "Sequoia, no retrieval",
}  # fmt: skip


def wrong_row(files, requests, temperature, chain, ours):
    """Why a row of the README's is wrong; None: it is right."""
    results = {key: row for file in files for key, row in measured(file)[0].items()}
    case = float(temperature), int(requests)
    rivals = {n: row for (*of, n), row in results.items() if (*of,) == case and "chain" in n}
    best = max(rivals, key=lambda name: rivals[name]["speedup"]["median"], default=None)
    if best is None:
        return f"not measured: {case}"
    number = best.rpartition(" ")[2]
    what = f"n-grams, of {number}" if best.startswith("n-gram") else f"of {number}"
    right = [speed_of(rivals[best]).replace(")", f"; {what})")]
    said = [chain]
    for one in re.split(r"; (?=\d)", ours):
        how = one.partition(") ")[2]
        right.append(f"{speed_of(results[*case, OURS[how]])} {how}".strip())
        said.append(one)
    return None if said == right else f"{said} is {right}"


def errors_in_readme(text):
    by_arrival, by_speed = [x for x in tables(text) if x[0][-2].startswith("vLLM's chain")]
    found, files = [], None
    for row in by_speed[1:]:
        if where := linked(row[1]):
            files = FILES.get(where)
        found.append(wrong_row(files, *row[2:]) if files else f"no file: {row}")
    for label, *cells in by_arrival[1:]:
        device, rate = re.fullmatch(r"(H\d00), (\d+) a second", label).groups()
        file = {"H100": H100, "H200": H200}.get(device)
        for name, cell in zip(by_arrival[0][1:], cells, strict=True):
            row = file and measured(file)[1].get((float(rate), name_of(name)))
            right = row and f"{row['e2e_ms']:.0f} ms, first token {row['ttft_ms']:.0f} ms"
            found.append(None if cell == right else f"{cell} is {right}")
    return [one for one in found if one]


def test_the_readme_says_what_the_files_say():
    assert errors_in_readme(README) == []
    text = section(README, "measured")
    rows = re.findall(r"^\| (?:H\d00,|.*\d to ).*", text, re.M)
    assert len(rows) == 18
    for row in rows:  # numbers of the target's column are no figures
        cells = row.split(" | ")
        figures = " | ".join(cells[1:] if cells[0].endswith("second") else cells[2:])
        for mutant in mutants(f"| {figures}"):
            assert errors_in_readme(README.replace(row, row.replace(figures, mutant[2:]))), mutant


CHAT, BIG = "benchmarks/speeds/smollm2-epyc-greedy.json", "benchmarks/speeds/800m-epyc.json"
NGRAM, HEAD, LOOKUP = "n-gram chain of 4", "chain of 3", "Sequoia, lookup"
BOTH = [(H200, 0, n, name) for n in (1, 8, 32) for name in ("Sequoia", HEAD)]
ARRIVED = [(H200, 16, name) for name in (NGRAM, HEAD, "Sequoia", "plain vLLM")]
CHATS = [
    (CHAT, 0, requests, name)
    for requests, chain in ((1, 2), (4, 2), (8, 1))
    for name in ("Sequoia", f"chain of {chain}")
]
ARRIVED += [(H200, 48, name) for _, _, name in ARRIVED]
SENTENCES = [
    ("README.md", r"(\S+)x plain vLLM, and (\S+)x with vLLM's own chain of the same head. 32 "
     r"requests: (\S+)x and (\S+)x", [*BOTH[:2], *BOTH[4:]]),
    ("README.md", r"two CPU cores: (\S+)x, the chain (\S+)x; .*?\[(\S+)x and (\S+)x, (\S+)x and "
     r"(\S+)x\]", CHATS),
    ("README.md", r"(\S+) ms with n-grams at 16 a second, Sequoia (\S+), plain vLLM (\S+)\.",
     [ARRIVED[0], ARRIVED[2], ARRIVED[3]]),
    ("README.md", r"(\S+)x with 32 requests on the H100", [(H100, 0, 32, "Sequoia")]),
    ("docs/benchmarks.md", r"request\*\*: (\S+)x on an H100 and (\S+)x on an H200",
     [(H100, 0, 1, "Sequoia"), BOTH[0]]),
    ("docs/benchmarks.md", r"(\S+)x and (\S+)x with one request, (\S+)x and (\S+)x with eight, "
     r"(\S+)x and (\S+)x with 32\.", BOTH),
    ("docs/benchmarks.md", r"answer took (\S+) ms with n-grams, (\S+) ms with the head's chain, "
     r"(\S+) ms with Sequoia and (\S+) ms with plain vLLM. At 48 a second it took (\S+), (\S+), "
     r"(\S+) and (\S+) ms", ARRIVED),
    ("docs/benchmarks.md", r"ran at (\S+)x with \[a target of 800M .*? best chain at (\S+)x",
     [(BIG, 0, 1, "Sequoia"), (BIG, 0, 1, "chain of 4")]),
    ("docs/benchmarks.md", r"it ran at (\S+)x, the chain at (\S+)x;",
     CHATS[:2]),
    ("docs/benchmarks.md", r"(\S+)x, and (\S+)x without it\.",
     [(H200, 1, 32, "Sequoia"), (H200, 1, 32, "Sequoia, no retrieval")]),
    ("CHANGELOG.md", r"(\S+) against (\S+) ms an answer at 16 a second, (\S+) against (\S+) at 48",
     [(H200, rate, name) for rate in (16, 48) for name in (NGRAM, LOOKUP)]),
    ("docs/drafters.md", r"\((\S+) against (\S+) ms at 16 a second, (\S+) against (\S+) at 48\)",
     [(H200, rate, name) for rate in (16, 48) for name in (NGRAM, LOOKUP)]),
]  # fmt: skip


@pytest.mark.parametrize(("page", "pattern", "wanted"), SENTENCES)
def test_sentences_say_what_the_files_say(page, pattern, wanted):
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    [said] = re.findall(pattern, text)
    right = []
    for file, *key in wanted:
        results, arrived = measured(file)
        of_speed = len(key) == 3
        row = results[float(key[0]), *key[1:]] if of_speed else arrived[float(key[0]), key[1]]
        right.append(f"{row['speedup']['median']:.2f}" if of_speed else f"{row['e2e_ms']:,.0f}")
    assert [said] == right if isinstance(said, str) else list(said) == right


def tuned():
    """What `tune` prints of the library's entry; what counting left open is not kept there."""
    entry = find_tree("x86-cpu/135m-2.9m/smollm2-greedy").entry
    tune.print_report({
        "target": "a/smollm2-135m-instruct", "draft": "b/smollm2-draft", "dtype": "float32",
        "context_length": 192, "tokens_margins": [0.03, 0.02, 0.02, 0.02], "speculates": True,
        "estimates": [one.model_dump() for one in entry.estimates[:4]], "now_used": "",
        "command": "", "file": "", "measurements": "", "picture": None,
    })  # fmt: skip


def enlarged(folder):
    made = CliRunner().invoke(synthetic_target, [TARGET, str(folder / "new"), "--params", "30M"])
    print(made.stdout.replace(str(folder / "new"), "synthetic"))


PRINTS = {
    ("docs/measuring.md", "chain of 2 +"): lambda _: bench.print_report(report_of(ROOT / CHAT)),
    ("docs/measuring.md", "drafts per request"): lambda _: tuned(),
    ("docs/measuring.md", "30.0M parameters"): enlarged,
    ("docs/predictions.md", "best chain"): lambda _: print(
        command("advise", "meta-llama/Llama-3.1-8B", "--device", "h100", "--batch-sizes", "1,8,32")
        .stdout
    ),
}  # fmt: skip


@pytest.mark.parametrize("where", PRINTS, ids=" ".join)
def test_samples_are_what_programs_print(where, tmp_path, capsys, monkeypatch):
    """Rows may be left out, and titles stand at the margin."""
    monkeypatch.setenv("COLUMNS", "160")
    words, page = where[1], (ROOT / where[0]).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S)
    [sample] = [block for opening, block in blocks if not opening and words in block]
    PRINTS[where](tmp_path)
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    shown = [line.strip() for line in sample.splitlines() if "..." not in line]
    assert [line for line in shown if line not in printed] == []
    assert shown
