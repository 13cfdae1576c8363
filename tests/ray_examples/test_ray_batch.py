"""examples/ray_batch.py: every prompt is answered once and as by plain vLLM, whoever dies."""

import json

import psutil
import pytest

from tests.ray.cluster import START_DEADLINE, named, wait_for
from tests.ray_examples.cluster import ENGINE, ENGINE_OPTIONS, MAX_TOKENS, PROMPTS, STOP_DEADLINE
from tests.support.models import DRAFT, TARGET
from tests.support.serving import Session

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded]

BUSY = "ray::Replica.answer"  # title of an actor that answers, its engine being ready
LINES = 3 * PROMPTS  # seconds of work, so that a run can be killed before its end
TOO_LONG = {"prompt": "x = 1\n" * 600}


class Run:
    """The example at work on the same two files, time and again."""

    def __init__(self, cluster, folder) -> None:
        self.cluster = cluster
        self.folder = folder
        self.prompts = folder / "prompts.jsonl"
        self.answers = folder / "answers.jsonl"
        lines = [{"prompt": prompt} for prompt in LINES]
        lines += [{"messages": [{"role": "user", "content": "Write a loop."}]}, TOO_LONG]
        self.prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def start(self, *options: str) -> Session:
        return self.cluster.run(
            self.folder / "run.log", "ray_batch.py",
            str(self.prompts), str(self.answers), f"--model={TARGET}", f"--draft-model={DRAFT}",
            '--tree={"size": 16, "depth": 4}', "--device=cpu", "--replicas=2", "--chunk=1",
            f"--max-tokens={MAX_TOKENS}", f"--engine-options={json.dumps(ENGINE_OPTIONS)}",
            *options,
        )  # fmt: skip

    def lines(self) -> list[str]:
        text = self.answers.read_text() if self.answers.exists() else ""
        return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def busy_replicas(self) -> list[psutil.Process]:
        return named(BUSY, self.cluster.named("ray::Replica"))

    def gone(self) -> bool:
        return not self.cluster.named("ray::Replica") and not self.cluster.named(ENGINE)


def engine_of(replica: psutil.Process) -> psutil.Process:
    [engine] = named(ENGINE, replica.children(recursive=True))
    return engine


def start_with_two_frozen_replicas(run):
    """A session, and its replicas stopped at their first chunks: neither does the other's work.

    In one of many runs Ray had not started the second within minutes: then all begins anew.
    """
    for deadline in (START_DEADLINE / 3, START_DEADLINE):
        session, frozen = run.start(), {}
        try:
            while len(frozen) < 2:
                [replica] = wait_for(
                    lambda session=session, frozen=frozen: (
                        [r for r in run.busy_replicas() if r.pid not in frozen][:1]
                        or session.check_running()
                    ),
                    seconds=deadline,
                    what="the start of a replica",
                    pause=0.05,
                )
                engine_of(replica).suspend()
                frozen[replica.pid] = replica
        except AssertionError:
            for replica in frozen.values():
                engine_of(replica).kill()
            session.kill()
            if deadline == START_DEADLINE:
                raise
            wait_for(run.gone, seconds=STOP_DEADLINE, what="the end of the replicas")
        else:
            break
    return session, list(frozen.values())


def test_killed_runs_are_completed_without_loss_or_repetition(cluster, tmp_path, plain_texts):
    run = Run(cluster, tmp_path)
    session, replicas = start_with_two_frozen_replicas(run)
    try:
        first, second = replicas
        engines = [engine_of(first), engine_of(second)]
        before = len(run.lines())
        engines[0].kill()  # noticed by its replica
        second.kill()  # noticed by Ray
        wait_for(
            lambda: len(run.lines()) > before or session.check_running(),
            what="an answer of a new replica",
            pause=0.02,
        )
        session.process.suspend()  # at once: a dozen answers take the new replicas half a second
        old = {first.pid, second.pid, *(engine.pid for engine in engines)}
        left = [p for p in cluster.named("ray::Replica") + cluster.named(ENGINE) if p.pid in old]
        assert left == []
        session.process.kill()
        session.process.wait(STOP_DEADLINE)
        wait_for(run.gone, seconds=STOP_DEADLINE, what="the end of the killed run's replicas")
        kept = run.lines()
        assert before < len(kept) < len(LINES)
    finally:
        session.kill()
    with run.answers.open("a") as file:
        file.write('{"index": 3, "te')  # as if the power had failed

    session = run.start("--replicas=1")
    try:
        assert session.process.wait(START_DEADLINE) == 0, session.tail
        wait_for(run.gone, seconds=STOP_DEADLINE, what="the end of the replicas")
    finally:
        session.kill()
    assert f"{len(kept)} of {len(LINES) + 2} prompts have their answers" in session.log
    assert "up to 15 drafts" in session.log
    assert run.lines()[: len(kept)] == kept
    answers = [json.loads(line) for line in run.answers.read_text().splitlines()]
    by_index = {answer["index"]: answer for answer in answers}
    assert sorted(answer["index"] for answer in answers) == list(range(len(LINES) + 2))
    assert [by_index[index]["text"] for index in range(len(LINES))] == 3 * plain_texts
    assert "has no chat template" in by_index[len(LINES)]["error"]
    assert "tokens; the engine takes 511" in by_index[len(LINES) + 1]["error"]

    for options, refusal in (((), ""), (("--temperature=0.5",), "made with other sampling")):
        session = run.start(*options)
        assert session.process.wait(STOP_DEADLINE) == (2 if refusal else 0), session.tail
        assert refusal in session.log
        assert "Connecting" not in session.log  # there was nothing to do for a cluster
