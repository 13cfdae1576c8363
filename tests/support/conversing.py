"""Requests whose prompts come in pieces, each answered before the next is read."""

from typing import Any


class Session:
    """One such request.

    Args:
        llm: An engine in this process.
        pieces: Token ids of each piece of its prompt.
        params: How each answer is sampled.
    """

    def __init__(self, llm: Any, name: str, pieces: list[list[int]], params: Any) -> None:
        self._llm, self.name, self._params = llm, name, params
        self._pieces = list(pieces)
        self.answers: list[list[int]] = [[] for _ in pieces]
        self.ended = 0

    def send(self) -> None:
        """The next piece; after the last, that there are no more."""
        more = bool(self._pieces)
        engine = self._llm.llm_engine
        request = engine.input_processor.process_inputs(
            self.name, {"prompt_token_ids": self._pieces.pop(0) if more else [0]}, self._params,
            supported_tasks=("generate",), resumable=more,
        )  # fmt: skip
        engine.engine_core.add_request(request)


def converse(llm: Any, pieces: Any, params: Any, at_once: bool) -> list[list[list[int]]]:
    """What each of some sessions answers to each of its pieces.

    Args:
        at_once: All pieces are there from the start, else each comes after the last answer.
    """
    sessions = {
        str(place): Session(llm, str(place), own, params[place]) for place, own in enumerate(pieces)
    }
    for session in sessions.values():
        for _ in range(len(session.answers) + 1 if at_once else 1):
            session.send()
    while any(session.ended < len(session.answers) for session in sessions.values()):
        for output in llm.llm_engine.engine_core.get_output().outputs:
            session = sessions[output.request_id]
            session.answers[session.ended] += output.new_token_ids
            if output.finish_reason is not None:
                session.ended += 1
                if not at_once:
                    session.send()
    return [session.answers for session in sessions.values()]


def turns(texts: list[str], tokenizer: Any) -> list[list[list[int]]]:
    """Three pieces of each of these texts, of 50 tokens together."""
    encoded = [tokenizer.encode(text) for text in texts]
    return [[ids[:20], ids[20:33], ids[33:50]] for ids in encoded]
