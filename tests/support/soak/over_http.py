"""Random requests to a server, as its clients send them: at once, streamed or not, some leave."""

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from sequoia_vllm.engine.core.eligibility import MOST_DRAFTS
from tests.support.serving import Server
from tests.support.soak.random_requests import RandomRequest

# A request that takes longer than this hangs; an idle machine answers the longest in a second.
HANGS_AFTER = 120.0
_AT_ONCE = 24
_OF_OPENAI = {
    "temperature", "max_tokens", "seed", "top_p", "presence_penalty", "frequency_penalty",
    "logit_bias", "stop", "logprobs", "n",
}  # fmt: skip


@dataclass
class Tally:
    """What became of the requests.

    Attributes:
        hung: Requests that got no answer within their endpoint's patience.
        failed: The error that a request got, with its address, and the request.
        tokens: Returned, of the requests whose clients stayed.
    """

    answered: int = 0
    left: int = 0
    different: list[RandomRequest] = field(default_factory=list)
    hung: list[RandomRequest] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    tokens: int = 0


class Endpoint:
    """A server's completions."""

    def __init__(self, server: Server, patience: float = HANGS_AFTER) -> None:
        self.model = server.model
        self._client = openai.AsyncOpenAI(
            **server.openai_options,
            timeout=patience,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        )

    async def answer(self, request: RandomRequest) -> list[Any]:
        """Token ids, text and end of each of a request's outputs, by index."""
        found = await self._client.completions.create(model=self.model, **_arguments(request))
        return [
            (choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason)
            for choice in sorted(found.choices, key=lambda choice: choice.index)
        ]

    async def leave(self, request: RandomRequest) -> None:
        """Streams a request, and closes the connection after its first pieces."""
        stream = await self._client.completions.create(
            model=self.model, stream=True, **_arguments(request)
        )
        pieces = 0
        async for _ in stream:
            pieces += 1
            if pieces == request.leaves:
                await stream.close()
                return


async def compare(
    ours: Endpoint, plain: Endpoint, requests: Iterable[RandomRequest], tally: Tally
) -> None:
    """Sends all requests to both servers, many at once, and counts what comes back.

    An answer that differs is asked for once more, alone. Of two tokens that are equally likely
    but for rounding, either may come first, depending on what else is in the batch.
    """
    waiting = iter(requests)
    suspects: list[tuple[RandomRequest, list[Any]]] = []

    async def client(number: int) -> None:
        pauses = random.Random(number)
        for request in waiting:  # shared: each client takes the next one
            await asyncio.sleep(pauses.choice((0, 0, 0.01, 0.1)))
            try:
                if request.leaves is not None:
                    await ours.leave(request)
                    tally.left += 1
                    continue
                found, expected = await asyncio.gather(ours.answer(request), plain.answer(request))
            except openai.APITimeoutError:
                tally.hung.append(request)
                continue
            except (openai.APIError, httpx.TransportError) as error:
                tally.failed.append(f"{_told(error)}: {request}")
                continue
            tally.answered += 1
            tally.tokens += sum(len(tokens) for tokens, *_ in found)
            if found != expected:
                suspects.append((request, expected))

    await asyncio.gather(*(client(number) for number in range(_AT_ONCE)))
    for request, expected in suspects:
        try:
            found = await ours.answer(request)
        except (openai.APIError, httpx.TransportError) as error:
            tally.failed.append(f"{_told(error)}: {request}")
            continue
        tally.tokens += sum(len(tokens) for tokens, *_ in found)
        if found != expected:
            tally.different.append(request)


def compare_all(
    ours: Server, plain: Server, requests: Sequence[RandomRequest], tally: Tally
) -> None:
    """`compare`, then waits until the server is idle."""
    asyncio.run(compare(Endpoint(ours), Endpoint(plain), requests, tally))
    ours.wait_until_idle()


def _told(error: openai.APIError | httpx.TransportError) -> str:
    """A client's error, and where it asked."""
    address = error.request.url if isinstance(error, openai.APIError) else "a stream"
    return f"{address}: {type(error).__name__}: {error}"


def _arguments(request: RandomRequest) -> dict[str, Any]:
    """The request as the openai client takes it; it does not know all of vLLM's parameters."""
    own = {key: value for key, value in request.parameters.items() if key in _OF_OPENAI}
    if "logit_bias" in own:
        own["logit_bias"] = {str(token): bias for token, bias in own["logit_bias"].items()}
    more = {key: value for key, value in request.parameters.items() if key not in own}
    more["return_token_ids"] = True
    if request.structured is not None:
        more["structured_outputs"] = request.structured
    if request.most_drafts is not None:
        more["vllm_xargs"] = {MOST_DRAFTS: request.most_drafts}
    return {"prompt": request.prompt, **own, "extra_body": more}
