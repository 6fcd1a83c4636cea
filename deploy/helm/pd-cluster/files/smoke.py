"""`helm test`: is a deployed router healthy, does it list its model, does it stream a completion, is gRPC up."""

import argparse
import json
import os
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0
PATIENCE_S = 60.0  # for 429 and 503, which say: come again


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    key_file = os.environ.get("API_KEY_FILE")
    key = Path(key_file).read_text().strip() if key_file else None
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code not in (429, 503) or time.monotonic() > give_up_s:
                raise SystemExit(f"{url}: {error.code} {error.read().decode(errors='replace')}") from error
        except urllib.error.URLError as error:
            if time.monotonic() > give_up_s:
                raise SystemExit(f"{url}: {error.reason}") from error
        time.sleep(2.0)


def model_of(base: str) -> str:
    with call(f"{base}/v1/models") as answer:
        models = json.load(answer)["data"]
    if not models:
        raise SystemExit("the router lists no model")
    return str(models[0]["id"])


def health(base: str) -> str:
    with call(f"{base}/health") as answer:
        return str(answer.status)


def completion(base: str, max_tokens: int) -> str:
    body = {
        "model": model_of(base),
        "prompt": [1, 2, 3],  # token ids: a model without a tokenizer takes them too
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    num_tokens, finish = 0, None
    with call(f"{base}/v1/completions", body) as answer:
        for line in answer:
            data = line.decode().removeprefix("data:").strip()
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise SystemExit(f"the stream failed: {event['error']}")
            for choice in event["choices"]:
                finish = choice["finish_reason"] or finish
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    if finish is None or not 1 <= num_tokens <= max_tokens:
        raise SystemExit(f"the stream ended with {num_tokens} tokens and finish reason {finish}")
    return f"{num_tokens} tokens, {finish}"


def grpc_health(address: str) -> str:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]  # by the resolver that HTTP uses
    target = f"[{found[0]}]:{port}" if ":" in str(found[0]) else f"{found[0]}:{port}"
    with grpc.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S, wait_for_ready=True)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise SystemExit(f"gRPC health is {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")
    return "SERVING"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("check", choices=["health", "models", "completion", "grpc"])
    parser.add_argument("address")
    parser.add_argument("--max-tokens", type=int, default=8)
    args = parser.parse_args()
    base = f"http://{args.address}"
    match args.check:
        case "health":
            result = health(base)
        case "models":
            result = model_of(base)
        case "completion":
            result = completion(base, args.max_tokens)
        case _:
            result = grpc_health(args.address)
    print(f"{args.check}: {result}")


if __name__ == "__main__":
    main()
