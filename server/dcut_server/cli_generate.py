"""dcut-trt generate: one prompt in this process, with the same engine that serves."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcut_server.cli_options import add_engine_flags, add_prompt_flags, engine_options, request_flags, sampling_flags
from dcut_server.report import logprob_lines, usage_line
from dcut_trt.types import Request, SamplingParams, StepEvent, TokenLogprob

if TYPE_CHECKING:
    from dcut_trt.engine import Engine
    from dcut_trt.tokenizer import Tokenizer


def add_generate_parser(commands: Any) -> None:
    parser = commands.add_parser("generate", help="answer one prompt without a server")
    parser.add_argument("bundle", type=Path, metavar="DIR", help="what dcut-trt build made")
    parser.add_argument("prompt", nargs="?", help="without one: all of stdin")
    add_prompt_flags(parser)
    add_engine_flags(parser)


def run_generate(args: argparse.Namespace) -> int:
    from dcut_server.compose import open_engine  # noqa: PLC0415 - loads the runtimes

    text = args.prompt if args.prompt is not None else sys.stdin.read()
    engine = open_engine(args.bundle, engine_options(args))
    try:
        begun = time.monotonic()
        logprobs: list[TokenLogprob] = []
        for event in generate(engine, request_of(args, engine.tokenizer, text)):
            print(event.text, end="", flush=True)
            logprobs.extend(event.logprobs)
            if event.finish is not None:
                print(flush=True)
                print(*logprob_lines(logprobs), sep="\n", end="\n" if logprobs else "", file=sys.stderr)
                print(usage_line(event.usage, event.finish, time.monotonic() - begun), file=sys.stderr)
    finally:
        engine.close()
    return 0


def generate(engine: Engine, request: Request) -> Iterator[StepEvent]:
    """Run one request alone on an engine that no loop runs. Raises the error that the request ends with."""
    engine.submit(request)
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise event.error
            yield event


def request_of(args: argparse.Namespace, tokenizer: Tokenizer, text: str) -> Request:
    """The request that the prompt flags describe."""
    if args.raw:
        ids = tokenizer.encode(text)
    else:
        prompt = tokenizer.render_chat([{"role": "user", "content": text}])
        ids = tokenizer.encode(prompt, add_special_tokens=False)
    return Request(
        request_id="generate",
        prompt_ids=tuple(ids),
        max_tokens=args.max_tokens,
        sampling=SamplingParams(**sampling_flags(args)),
        stop=tuple(args.stop),
        **request_flags(args),
    )
