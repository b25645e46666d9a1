"""Flags that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dcut_trt.config import EngineOptions
from dcut_trt.spec.policies import POLICY_NAMES

SAMPLING_FLAGS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
REQUEST_FLAGS = ("min_tokens", "logprobs")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for EngineOptions; unset ones keep its defaults."""
    defaults = EngineOptions()
    parser.add_argument("--policy", default=defaults.policy, help=f"{POLICY_NAMES} (default: {defaults.policy})")
    parser.add_argument("--cost-table", type=Path, metavar="FILE", help="use this table instead of the bundle's own")
    parser.add_argument("--no-profile", action="store_true", help="never measure step costs")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of the runtime (default: its choice)")
    parser.add_argument("--kv-memory-mib", type=int, metavar="N", help="memory for both KV caches")
    parser.add_argument(
        "--prefill-chunk",
        type=int,
        default=defaults.prefill_chunk,
        metavar="N",
        help="prompt rows computed in one step",
    )
    parser.add_argument(
        "--busy-prefill-chunk",
        type=int,
        default=defaults.busy_prefill_chunk,
        metavar="N",
        help="at most so many prompt rows in one step while streams wait for it",
    )
    parser.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt from its beginning")
    parser.add_argument("--max-queue", type=int, default=defaults.max_queue, metavar="N", help="requests that may wait")


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """Raises UnsupportedOption naming the flag's option, value and limit."""
    return EngineOptions(
        policy=args.policy,
        max_queue=args.max_queue,
        prefill_chunk=args.prefill_chunk,
        busy_prefill_chunk=args.busy_prefill_chunk,
        prefix_cache=not args.no_prefix_cache,
        kv_memory_mib=args.kv_memory_mib,
        threads=args.threads,
        cost_table=args.cost_table,
        profile=not args.no_profile,
    )


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """The prompt and the options of one request."""
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default: 256")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--min-p", type=float, metavar="P", help="drop what is less likely than P times the best")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--repetition-penalty", type=float, metavar="X", help="over prompt and output; 1 is none")
    parser.add_argument("--presence-penalty", type=float, metavar="X", help="over the output, once per token")
    parser.add_argument("--frequency-penalty", type=float, metavar="X", help="over the output, per occurrence")
    parser.add_argument("--min-tokens", type=int, metavar="N", help="tokens before which nothing ends the answer")
    parser.add_argument("--logprobs", type=int, metavar="N", help="report log probabilities and the N best, to stderr")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be given several times")


def sampling_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given."""
    return _given(args, SAMPLING_FLAGS)


def request_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of the request itself that were given."""
    return _given(args, REQUEST_FLAGS)


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}
