"""Clients of SGLang work unchanged, at full and at lowered precision."""

from __future__ import annotations

import openai
import pytest
import sglang as sgl
from openai.types.chat import ChatCompletionUserMessageParam

from tests.server.client import Client

QUESTION = ChatCompletionUserMessageParam(role="user", content="What is the capital of France?")


@pytest.fixture(params=[0, 3], ids=["full", "int8"])
def client(request: pytest.FixtureRequest, elastic: Client) -> Client:
    elastic.go_to(request.param)
    return elastic


@pytest.fixture
def oai(client: Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{client.url}/v1", api_key="none")


def test_chat(oai: openai.OpenAI) -> None:
    answer = oai.chat.completions.create(model="m", messages=[QUESTION], temperature=0)
    assert "Paris" in str(answer.choices[0].message.content)


def test_chat_streamed(oai: openai.OpenAI) -> None:
    stream = oai.chat.completions.create(model="m", messages=[QUESTION], temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert "Paris" in text


def test_completions(oai: openai.OpenAI) -> None:
    answer = oai.completions.create(
        model="m", prompt="The capital of France is", temperature=0, max_tokens=8
    )
    assert "Paris" in answer.choices[0].text


def test_completions_streamed(oai: openai.OpenAI) -> None:
    stream = oai.completions.create(
        model="m", prompt="The capital of France is", temperature=0, max_tokens=8, stream=True
    )
    assert "Paris" in "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def test_sglang_frontend(client: Client) -> None:
    @sgl.function
    def capital(s: sgl.ProgramState, country: str) -> None:
        s += sgl.user(f"What is the capital of {country}?")
        s += sgl.assistant(sgl.gen("answer", max_tokens=16, temperature=0))

    sgl.set_default_backend(sgl.RuntimeEndpoint(client.url))
    states = capital.run_batch([{"country": "France"}, {"country": "Italy"}])
    assert "Paris" in states[0]["answer"]
    assert "Rome" in states[1]["answer"]
