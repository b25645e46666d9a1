"""dcut-trt client: one prompt, or a conversation, over the network."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from typing import TYPE_CHECKING, Any

from dcut_server.cli_options import add_prompt_flags, request_flags, sampling_flags
from dcut_server.ops.flags import add_connection_flags, connection_options
from dcut_server.report import logprob_lines, usage_line
from dcut_trt.errors import DcutError

if TYPE_CHECKING:
    from dcut_server.client import Prompt
    from dcut_trt.types import TokenLogprob


def add_client_parser(commands: Any) -> None:
    parser = commands.add_parser("client", help="send prompts to a running server")
    parser.add_argument("prompt", nargs="?", help="without one: a conversation on a terminal, or all of stdin")
    parser.add_argument("--address", default="127.0.0.1:50051", help="default: 127.0.0.1:50051")
    add_connection_flags(parser)
    add_prompt_flags(parser)


def run_client(args: argparse.Namespace) -> int:
    if args.prompt is None and sys.stdin.isatty():
        return _converse(args)
    text = args.prompt if args.prompt is not None else sys.stdin.read()
    asyncio.run(_answer(args, text if args.raw else [{"role": "user", "content": text}]))
    return 0


def _converse(args: argparse.Namespace) -> int:
    """Read prompts until an empty line or end of input; a failed one is told and forgotten."""
    turns: list[dict[str, str]] = []
    while text := _read_line():
        turns.append({"role": "user", "content": text})
        try:
            answer = asyncio.run(_answer(args, text if args.raw else turns))
        except DcutError as error:
            print(f"dcut-trt: {error}", file=sys.stderr)
            turns.pop()
            continue
        turns.append({"role": "assistant", "content": answer})
    return 0


def _read_line() -> str:
    try:
        return input("> ")
    except EOFError:
        return ""


async def _answer(args: argparse.Namespace, prompt: Prompt) -> str:
    """Stream one answer to stdout and its usage to stderr; the answer's text."""
    from dcut_server.client import DcutClient  # noqa: PLC0415 - loads gRPC

    begun = time.monotonic()
    pieces: list[str] = []
    logprobs: list[TokenLogprob] = []
    async with DcutClient(args.address, **connection_options(args)) as client:
        options = {**sampling_flags(args), **request_flags(args)}
        stream = client.generate(prompt, max_tokens=args.max_tokens, stop=args.stop, **options)
        async for chunk in stream:
            pieces.append(chunk.text)
            print(chunk.text, end="", flush=True)
            logprobs.extend(chunk.logprobs)
            if chunk.finish is not None and chunk.usage is not None:
                print(flush=True)
                print(*logprob_lines(logprobs), sep="\n", end="\n" if logprobs else "", file=sys.stderr)
                print(usage_line(chunk.usage, chunk.finish, time.monotonic() - begun), file=sys.stderr)
    return "".join(pieces)
