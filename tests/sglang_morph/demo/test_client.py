import asyncio
import time
from contextlib import asynccontextmanager

import orjson
import pytest
from aiohttp import web

from sglang_morph.demo.burst import BurstRequest
from sglang_morph.demo.client import replay


def chunk(tokens, reason=None):
    meta = {"prompt_tokens": 7, "completion_tokens": tokens, "finish_reason": reason}
    return {"text": "x" * tokens, "meta_info": meta}


STEP_S = 0.02
DONE = {"type": "length"}
SCRIPTS = {
    "good": [chunk(1), chunk(2), chunk(2), chunk(4, DONE)],
    "short": [chunk(1), chunk(2, {"type": "stop"})],
    "error": [chunk(1), {"error": {"message": "out of luck"}}],
    "aborted": [chunk(1), chunk(1, {"type": "abort", "message": "too long"})],
}


async def generate(request):
    """Streams the script that the prompt names, in SGLang's form."""
    body = await request.json()
    assert body["stream"] and body["sampling_params"]["ignore_eos"]
    if body["text"] == "refused":
        raise web.HTTPServiceUnavailable
    response = web.StreamResponse()
    await response.prepare(request)
    for event in SCRIPTS[body["text"]]:
        await asyncio.sleep(STEP_S)
        await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


@asynccontextmanager
async def server():
    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def send(*burst):
    finished = []

    async def main():
        async with server() as url:
            return await replay(url, burst, time.monotonic(), finished.append)

    results = asyncio.run(main())
    assert sorted(r.index for r in finished) == list(range(len(burst)))
    return results


def ask(prompt, at_s=0.0):
    return BurstRequest(at_s, "burst", prompt, output_tokens=4)


def test_a_good_answer_is_timed_token_by_token():
    (result,) = send(ask("good"))
    assert result.ok and result.error is None
    assert (result.prompt_tokens, result.output_tokens) == (7, 4)
    # The chunk without a new token makes no gap.
    assert len(result.gaps_s) == 2
    assert result.ttft_s >= STEP_S
    assert result.tpot_s == pytest.approx(sum(result.gaps_s) / 3)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("short", "2 of 4 tokens came"),
        ("error", "out of luck"),
        ("aborted", "aborted: too long"),
        ("refused", "503"),
    ],
)
def test_a_bad_answer_is_a_failed_result_with_its_reason(prompt, error):
    bad, good = send(ask(prompt), ask("good"))
    assert not bad.ok and error in bad.error
    assert good.ok


def test_arrivals_do_not_wait_for_answers():
    results = send(*(ask("good", at_s=0.01 * i) for i in range(5)))
    for i, result in enumerate(results):
        # An event loop may wake a timer up to its clock's resolution early.
        assert 0.01 * i - 0.005 <= result.sent_s < 0.01 * i + 0.05
    assert results[-1].sent_s < results[0].end_s


def test_a_server_that_is_not_there_fails_every_request():
    results = asyncio.run(
        replay("http://127.0.0.1:9", [ask("good")] * 2, time.monotonic(), lambda result: None)
    )
    assert [r.ok for r in results] == [False, False]
    assert all(r.error and r.ttft_s is None and r.tpot_s is None for r in results)
