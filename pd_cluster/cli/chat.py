"""`pd-cluster chat`: a conversation with a running cluster on the terminal, or one answer to what stdin says."""

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pd_cluster.cli import reaching
from pd_cluster.cli.reaching import reach

if TYPE_CHECKING:
    from pd_cluster.client import Client, Options

HELP = "/reset forgets the conversation, /retry asks again, /quit or Ctrl-D ends; Ctrl-C stops an answer\n"


def chat(
    address: reaching.Address = "127.0.0.1:8001",
    model: Annotated[str, typer.Option(help="The only one when left out.", metavar="NAME")] = "",
    system: Annotated[str | None, typer.Option(help="What the assistant is told first.", metavar="TEXT")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Of an answer; default: what the context leaves.", min=1)
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: 1.", min=0)] = None,
    top_p: Annotated[float | None, typer.Option(help="Default: 1.", min=0, max=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Default: another each time.", min=0)] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Say how long each answer took.")] = False,
    api_key: reaching.ApiKey = None,
    tls: reaching.UseTls = False,
    tls_roots: reaching.TlsRoots = None,
    tls_certificate: reaching.TlsCertificate = None,
    tls_key: reaching.TlsKey = None,
    allow_insecure: reaching.AllowInsecure = False,
) -> None:
    """Talk to a running cluster. When stdin is no terminal, it is one message, and only the answer is printed."""
    given: Options = {"model": model}
    if max_tokens is not None:
        given["max_tokens"] = max_tokens
    if temperature is not None:
        given["temperature"] = temperature
    if top_p is not None:
        given["top_p"] = top_p
    if seed is not None:
        given["seed"] = seed
    with reach(address, api_key, tls, tls_roots, tls_certificate, tls_key, allow_insecure) as client:
        conversation = Conversation(client, system, given, stats)
        if sys.stdin.isatty():
            interact(conversation)
        else:
            conversation.say(sys.stdin.read())


class Conversation:
    """Messages so far; `say` adds one and its answer, which goes to stdout as it comes."""

    def __init__(self, client: "Client", system: str | None, options: "Options", stats: bool = False) -> None:
        self._client = client
        self._options = options
        self._stats = stats
        self._system = [{"role": "system", "content": system}] if system is not None else []
        self.messages = list(self._system)

    def reset(self) -> None:
        self.messages = list(self._system)

    def retract(self) -> str | None:
        """Take back the last message of the user, and its answer; None when there is none."""
        while self.messages and self.messages[-1]["role"] != "system":
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None

    def say(self, text: str) -> None:
        """Raises the request's error; then the message is not part of the conversation."""
        self.messages.append({"role": "user", "content": text})
        try:
            self._answer()
        except BaseException:
            self.messages.pop()
            raise

    def _answer(self) -> None:
        with self._client.stream_chat(self.messages, **self._options) as stream:
            try:
                for chunk in stream:
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
            except KeyboardInterrupt:  # enough: what was said so far stands
                if not stream.text:
                    raise
            sys.stdout.write("\n")
            self.messages.append({"role": "assistant", "content": stream.text})
            if self._stats and stream.done:
                timings, usage = stream.completion.timings, stream.completion.usage
                speed = f", {1 / timings.tpot_s:.1f} tokens/s" if timings.tpot_s else ""
                sys.stderr.write(
                    f"[{usage.num_prompt_tokens} tokens in ({usage.num_cached_tokens} cached), "
                    f"{usage.num_output_tokens} out, first after {1000 * timings.ttft_s:.0f} ms{speed}]\n"
                )


def interact(conversation: Conversation) -> None:
    """Read lines until the user has enough. An error ends an answer, not the conversation."""
    from pd_cluster.errors import PdClusterError

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (input() then edits lines and remembers them)
    sys.stderr.write(HELP)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            sys.stdout.write("\n")
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            continue
        match line:
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/reset":
                conversation.reset()
                continue
            case "/help":
                sys.stderr.write(HELP)
                continue
            case "/retry":
                again = conversation.retract()
                if again is None:
                    continue
                line = again
            case _ if line.startswith("/"):
                sys.stderr.write(HELP)
                continue
        try:
            conversation.say(line)
        except PdClusterError as error:
            sys.stderr.write(f"\n{error.message}\n")
        except KeyboardInterrupt:
            sys.stdout.write("\n")
