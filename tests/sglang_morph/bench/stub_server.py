"""A stand-in for a server: real sockets, SGLang's and OpenAI's event streams, no model.

python -m tests.sglang_morph.bench.stub_server --port PORT [--slots N] [--tbt SECONDS]
    [--start-after SECONDS]
    [--memory-backend layer_swap --morph-event-log FILE [--morph-policy manual]]

At most `--slots` requests are answered at a time, each a token every `--tbt` seconds; the others
wait. With a memory backend it doubles its slots at level 1, and logs every level change. It goes
there by itself while somebody waits, or, under the manual policy, when it is told to. Prompts
whose first token id is REFUSED are refused, SILENT ones never get an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import time
from dataclasses import dataclass, field
from typing import Any

import orjson

REFUSED = 1_000_666
SILENT = 1_000_667
"""Token ids that no tokenizer of the tests has."""
PAGE_TOKENS = 4096
LAYER_BYTES = 64 * 2**20


@dataclass
class Stub:
    slots: int
    tbt_s: float
    event_log: str | None
    manual: bool = False
    running: int = 0
    waiting: int = 0
    held_tokens: int = 0
    level: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def limit(self) -> int:
        return self.slots * (2 if self.level else 1)

    async def enter(self, tokens: int) -> float:
        """Wait for a slot; how long that took."""
        begin = time.monotonic()
        self.waiting += 1
        async with self.changed:
            full = self.running >= self.limit
            if full and self.event_log and not self.manual and not self.level:
                self.move(1)
            await self.changed.wait_for(lambda: self.running < self.limit)
        self.waiting -= 1
        self.running += 1
        self.held_tokens += tokens
        self.sample()
        return time.monotonic() - begin

    async def leave(self, tokens: int) -> None:
        self.running -= 1
        self.held_tokens -= tokens
        if self.level and not self.running and not self.manual:
            self.move(0)
        self.sample()
        async with self.changed:
            self.changed.notify_all()

    def move(self, level: int) -> None:
        row = {
            "kind": "transition", "from": self.level, "to": level, "result": "completed",
            "duration_s": 0.01, "pages_lent": 512 * level, "pages_withdrawn": 512 * (1 - level),
            "reason": "queue" if level else "idle",
        }  # fmt: skip
        self.level = level
        self.log(row)

    def sample(self) -> None:
        capacity = PAGE_TOKENS + 512 * self.level
        used = min(self.held_tokens, capacity)
        full = LAYER_BYTES // (1 + self.level)
        self.log(
            {
                "kind": "signals", "used_pages": used, "evictable_pages": 0,
                "free_pages": capacity - used, "running": self.running, "waiting": self.waiting,
                "level": self.level,
                "bytes": {"full_weights": full, "variant_weights": (LAYER_BYTES - full) // 2},
            }
        )  # fmt: skip

    def log(self, row: dict[str, Any]) -> None:
        if self.event_log is not None:
            with open(self.event_log, "ab") as file:  # noqa: PTH123
                file.write(orjson.dumps({"time": time.time(), **row}) + b"\n")

    def metrics(self) -> str:
        used = min(self.held_tokens, PAGE_TOKENS)
        values = {
            "sglang:kv_used_tokens": used,
            "sglang:kv_evictable_tokens": 0,
            "sglang:kv_available_tokens": PAGE_TOKENS - used,
            "sglang:num_running_reqs": self.running,
            "sglang:num_queue_reqs": self.waiting,
        }
        return "".join(f"# TYPE {k} gauge\n{k} {v}\n" for k, v in values.items())

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1].split(b"?")[0].decode()
                length = 0
                for line in head.split(b"\r\n"):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                body = await reader.readexactly(length)
                await self.answer(path, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            await self.stream(path, orjson.loads(body), writer)
        elif path == "/metrics":
            plain(writer, self.metrics().encode())
        elif path == "/server_info":
            memory = {"weight": LAYER_BYTES / 2**30, "kvcache": 0.25, "token_capacity": PAGE_TOKENS}
            plain(writer, orjson.dumps({"internal_states": [{"memory_usage": memory}]}))
        elif path == "/morph/status":
            bytes_ = {"kv_base": 2**28, "full_weights": LAYER_BYTES}
            status = {
                "level": self.level, "levels": [0, 1], "bytes": bytes_,
                "base_tokens": PAGE_TOKENS - 1, "plan_digest": "abc", "restoring": False,
                "capacity_tokens": PAGE_TOKENS - 1 + 512 * self.level,
            }  # fmt: skip
            plain(writer, orjson.dumps(status))
        elif path == "/morph/level":
            self.move(orjson.loads(body)["level"])
            plain(writer, b"{}")
        elif path == "/morph/verify":
            plain(writer, orjson.dumps({"digest": "0" * 64, "level": self.level}))
        elif path in ("/health", "/flush_cache"):
            plain(writer, b"", 400 if self.running else 200)
        else:
            plain(writer, b"not here", 404)

    async def stream(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        generate = path == "/generate"
        prompt = body["prompt"] if path == "/v1/completions" else body["input_ids"]
        wanted = body["sampling_params"]["max_new_tokens"] if generate else body["max_tokens"]
        if prompt[0] == REFUSED:
            return plain(writer, b"no such luck", 503)
        if prompt[0] == SILENT:
            await asyncio.sleep(3600)
        tokens = len(prompt) + wanted
        queued = await self.enter(tokens)
        event = EVENTS[path]
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        word = hashlib.sha256(orjson.dumps(prompt)).hexdigest()[:4]
        for count in range(1, wanted + 1):
            await asyncio.sleep(self.tbt_s)
            chunk(writer, event(word, len(prompt), count, wanted, queued))
        await self.leave(tokens)
        chunk(writer, b"[DONE]")
        writer.write(b"0\r\n\r\n")
        return None


def generate_event(word: str, prompt: int, count: int, wanted: int, queued: float) -> bytes:
    meta = {
        "prompt_tokens": prompt, "completion_tokens": count, "cached_tokens": 0,
        "num_retractions": 0, "queue_time": queued,
        "finish_reason": {"type": "length", "length": count} if count == wanted else None,
    }  # fmt: skip
    return orjson.dumps({"text": f"{word} " * count, "meta_info": meta})


def completion_event(word: str, prompt: int, count: int, wanted: int, queued: float) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": count}
    return orjson.dumps({"choices": [{"index": 0, "text": f"{word} "}], "usage": usage})


def chat_event(word: str, prompt: int, count: int, wanted: int, queued: float) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": count}
    choice = {"index": 0, "delta": {"role": "assistant", "content": f"{word} "}}
    return orjson.dumps({"choices": [choice], "usage": usage})


EVENTS = {
    "/generate": generate_event,
    "/v1/completions": completion_event,
    "/v1/chat/completions": chat_event,
}


def chunk(writer: asyncio.StreamWriter, event: bytes) -> None:
    data = b"data: " + event + b"\n\n"
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def plain(writer: asyncio.StreamWriter, body: bytes, status: int = 200) -> None:
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=10_000)
    parser.add_argument("--tbt", type=float, default=0.01)
    parser.add_argument("--start-after", type=float, default=0.0)
    parser.add_argument("--memory-backend", default="static")
    parser.add_argument("--morph-event-log")
    parser.add_argument("--morph-policy", default="threshold")
    parser.add_argument("--enable-metrics", action="store_true")
    options = parser.parse_args()
    manual = options.morph_policy == "manual"
    stub = Stub(options.slots, options.tbt, options.morph_event_log, manual)
    await asyncio.sleep(options.start_after)
    server = await asyncio.start_server(stub.serve, options.host, options.port, limit=2**22)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
