"""CPU time of an event of a streamed completion, by HTTP client and by JSON decoder.

A server in another process sends each event in a packet of its own, as an engine does that decodes
one token a step. What is measured is the CPU time of the receiving process for each event: it is
what bounds how many streams one worker can follow. The clients take turns, so that a change of the
machine's speed hits all of them.

    python benchmarks/engine_clients.py [--events 2000] [--turns 7]

Clients that are not installed are left out (``pip install httpx aiohttp urllib3 orjson``).
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

BODY = b'{"model":"m","prompt":[1,2,3],"stream":true}'
EVENT = (
    b'data: {"id":"cmpl-8c7d2f0e1a3b4c5d","object":"text_completion","created":1790000000,'
    b'"model":"m","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,'
    b'"stop_reason":null,"token_ids":[12345]}],"usage":null}\n\n'
)


def serve(events: int) -> None:
    """Answer every request with ``events`` events; prints its port first."""
    server = socket.create_server(("127.0.0.1", 0))
    print(server.getsockname()[1], flush=True)
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    chunk = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
    while True:
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            connection.recv(1 << 16)
            connection.sendall(head)
            for _ in range(events):
                connection.sendall(chunk)
                time.sleep(0.0002)
            connection.sendall(b"0\r\n\r\n")


def read_http_client(port: int) -> Iterator[bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", BODY, {"Content-Type": "application/json"})
    response = connection.getresponse()
    while data := response.read1(1 << 16):
        yield data
    connection.close()


def read_urllib3(port: int) -> Iterator[bytes]:
    import urllib3

    with urllib3.PoolManager() as pool:
        url = f"http://127.0.0.1:{port}/v1/completions"
        yield from pool.request("POST", url, body=BODY, preload_content=False).stream(1 << 16)


def read_httpx(port: int) -> Iterator[bytes]:
    import httpx

    with (
        httpx.Client() as client,
        client.stream("POST", f"http://127.0.0.1:{port}/", content=BODY) as response,
    ):
        yield from response.iter_raw()


def count_aiohttp(port: int) -> int:
    import asyncio

    import aiohttp

    async def count() -> int:
        seen = 0
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://127.0.0.1:{port}/", data=BODY) as response,
        ):
            async for data in response.content.iter_any():
                seen += data.count(b"\n\n")
        return seen

    return asyncio.run(count())


def counting(read: Callable[[int], Iterator[bytes]]) -> Callable[[int], int]:
    return lambda port: sum(data.count(b"\n\n") for data in read(port))


def clients() -> dict[str, Callable[[int], int]]:
    found: dict[str, Callable[[int], int]] = {"http.client": counting(read_http_client)}
    optional = {
        "urllib3": counting(read_urllib3),
        "httpx": counting(read_httpx),
        "aiohttp": count_aiohttp,
    }
    found |= {name: run for name, run in optional.items() if importlib.util.find_spec(name)}
    return found


def decoders() -> dict[str, Callable[[bytes], object]]:
    found: dict[str, Callable[[bytes], object]] = {"json": json.loads}
    if importlib.util.find_spec("msgspec"):
        import msgspec

        from lmcache_mp.engines.completions_api import Chunk

        found["msgspec, typed"] = msgspec.json.Decoder(Chunk).decode
    if importlib.util.find_spec("orjson"):
        import orjson

        found["orjson"] = orjson.loads
    return found


def table(title: str, samples: dict[str, list[float]]) -> None:
    best = min(statistics.median(values) for values in samples.values())
    print(f"\n{title:<16} {'median':>9} {'least':>9} {'most':>9}   ratio")
    for name, values in samples.items():
        middle, least, most = statistics.median(values), min(values), max(values)
        print(f"{name:<16} {middle:7.1f}us {least:7.1f}us {most:7.1f}us {middle / best:6.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--events", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.events)
    command = [sys.executable, __file__, "--serve", "--events", str(arguments.events)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        spent: dict[str, list[float]] = {}
        for turn in range(arguments.turns + 1):
            for name, run in clients().items():
                start = time.process_time()
                assert run(port) == arguments.events, name
                if turn:  # the first one imports
                    spent.setdefault(name, []).append(time.process_time() - start)
        server.kill()
    each = 1e6 / arguments.events
    table("receive", {name: [value * each for value in values] for name, values in spent.items()})
    payload = EVENT[6:-2]
    times: dict[str, list[float]] = {}
    for _ in range(arguments.turns):
        for name, decode in decoders().items():
            start = time.process_time()
            for _ in range(10_000):
                decode(payload)
            times.setdefault(name, []).append((time.process_time() - start) * 100)
    table("decode", times)


if __name__ == "__main__":
    main()
