"""OpenVINO GenAI and our plain policy in turns: the same GGUF model, prompts, lengths and arithmetic.

Needs the package openvino-genai of openvino's version beside dcut-trt[build], best in an environment of its own:
python -m dcut_server.bench.peer_openvino_genai BUNDLE
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from dcut_engines.checkpoint import load_target
from dcut_engines.digests import cache_dir
from dcut_engines.publish import staged
from dcut_engines.sources import Source, resolve_target
from dcut_server.bench import environment, report
from dcut_server.bench.cli import integers
from dcut_server.bench.datasets import load_dataset
from dcut_server.bench.options import BenchOptions, check_batch, check_requests
from dcut_server.bench.runner import chat_requests, round_slice, serve
from dcut_server.compose import open_engine
from dcut_trt.admission import blocks_needed
from dcut_trt.backends.base import Limits
from dcut_trt.config import EngineOptions
from dcut_trt.engine import Engine
from dcut_trt.errors import DcutError, UnsupportedOption
from dcut_trt.manifest import read_manifest
from dcut_trt.types import FloatArray, Request

IR_NAME = "openvino_model.xml"
WEIGHTS = ("ours", "int4")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Output tokens per second at one concurrency, one value per round. same: requests with equal outputs."""

    concurrency: int
    ours: tuple[float, ...]
    peer: tuple[float, ...]
    same: int
    requests: int

    @property
    def ratio(self) -> float:
        """Ours over the peer's: median of the rounds, each of which served both."""
        return median(our / peer for our, peer in zip(self.ours, self.peer, strict=True))


class Peer:
    """GenAI's continuous batching, plain greedy decoding."""

    def __init__(self, model: Path, precision: str, limits: Limits, blocks: int, threads: int | None) -> None:
        self._genai, self._openvino = _genai(), importlib.import_module("openvino")
        scheduler = self._genai.SchedulerConfig()
        scheduler.max_num_seqs = limits.max_batch
        scheduler.num_kv_blocks = blocks
        scheduler.max_num_batched_tokens = EngineOptions().prefill_chunk
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        kind = "f32" if precision == "fp32" else "bf16"
        settings = {"INFERENCE_PRECISION_HINT": kind, "KV_CACHE_PRECISION": kind, "PERFORMANCE_HINT": "LATENCY"}
        if threads is not None:
            settings["INFERENCE_NUM_THREADS"] = str(threads)
        self._pipeline = self._genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", settings)
        self._next_id = 0

    def serve(self, requests: Sequence[Request], concurrency: int) -> tuple[float, list[list[int]]]:
        """Tokens per second and the outputs; like runner.serve()."""
        done = self._genai.GenerationStatus.FINISHED
        generated: list[list[int]] = [[] for _ in requests]
        waiting = deque(enumerate(requests))
        live: dict[int, Any] = {}
        begun = time.perf_counter()
        while waiting or live:
            while waiting and len(live) < concurrency:
                index, request = waiting.popleft()
                live[index] = self._add(request)
            self._pipeline.step()
            for index in [index for index, handle in live.items() if handle.get_status() == done]:
                generated[index] = list(live.pop(index).read_all()[0].generated_ids)
        wall_s = time.perf_counter() - begun
        return sum(map(len, generated)) / wall_s, generated

    def _add(self, request: Request) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.do_sample = False
        config.ignore_eos = True
        self._next_id += 1
        ids = self._openvino.Tensor(np.array([request.prompt_ids], np.int64))
        return self._pipeline.add_request(self._next_id, ids, config)


def compare(engine: Engine, peer: Peer, requests: Sequence[Request], options: BenchOptions) -> list[Comparison]:
    """Serve every slice with both, the other one first in every second round."""
    found: list[Comparison] = []
    for concurrency in options.concurrency:
        rates: tuple[list[float], list[float]] = ([], [])
        same = 0
        warm = round_slice(requests, concurrency, 0)
        serve(engine, warm, concurrency, "plain")
        peer.serve(warm, concurrency)
        for round_number in range(options.rounds):
            part = round_slice(requests, options.requests_at(concurrency), round_number)
            if round_number % 2:
                rate, outputs = peer.serve(part, concurrency)
                ours = serve(engine, part, concurrency, "plain", round_number)
            else:
                ours = serve(engine, part, concurrency, "plain", round_number)
                rate, outputs = peer.serve(part, concurrency)
            rates[0].append(ours.output_tokens / ours.wall_s)
            rates[1].append(rate)
            same += sum(stream.tokens == output for stream, output in zip(ours.streams, outputs, strict=True))
        served = options.rounds * options.requests_at(concurrency)
        found.append(Comparison(concurrency, tuple(rates[0]), tuple(rates[1]), same, served))
        print(f"concurrency {concurrency}: ours / peer = {found[-1].ratio:.3f}", file=sys.stderr, flush=True)
    return found


def prepare_model(target: Source, weights: str) -> Path:
    """A directory that GenAI loads: the graph that it makes of the GGUF, with our float weights or with its int4 ones.

    GenAI keeps Q4_1 as int4 with integer zero points, which is another model by a little. With our weights both sides
    do the same arithmetic, and in fp32 their outputs must be equal.
    """
    checkpoint = load_target(target)
    out = cache_dir() / "peers" / f"{checkpoint.sha256[:16]}-{weights}"
    if (out / IR_NAME).is_file():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with staged(out) as staging:
        copy = Path(shutil.copy(target.path, staging))
        _genai().LLMPipeline(str(copy), "CPU", enable_save_ov_model=True)
        copy.unlink()
        if weights == "ours":
            _use_weights(staging / IR_NAME, [np.asarray(value, np.float32) for value in checkpoint.weights.values()])
    return out


def _use_weights(path: Path, ours: Sequence[FloatArray]) -> None:
    """Fold the weights of a saved graph to floats and replace each matrix by the one of ours that it approximates."""
    openvino = importlib.import_module("openvino")
    passes = importlib.import_module("openvino.passes")
    model = openvino.Core().read_model(path)
    manager = passes.Manager()
    manager.register_pass(passes.ConstantFolding())
    manager.run_passes(model)
    left = {index: matrix for index, matrix in enumerate(ours) if matrix.ndim == 2}
    shapes = {matrix.shape for matrix in left.values()}
    for node in model.get_ops():
        if node.get_type_name() == "Constant" and node.data.shape in shapes:
            exact = openvino.op.Constant(left.pop(_nearest(node.data, left)))
            for reader in node.output(0).get_target_inputs():
                reader.replace_source_output(exact.output(0))
    if left:
        raise DcutError(f"{len(left)} matrices of the model were not found in the graph that GenAI made of it")
    exact_path = path.with_name("exact.xml")
    openvino.save_model(model, exact_path, compress_to_fp16=False)
    del model  # it maps the file that is replaced
    for suffix in (".xml", ".bin"):
        exact_path.with_suffix(suffix).replace(path.with_suffix(suffix))


def _nearest(matrix: FloatArray, candidates: dict[int, FloatArray]) -> int:
    """Key of the candidate of the same shape that differs least in its first rows."""
    same = {key: value for key, value in candidates.items() if value.shape == matrix.shape}
    return min(same, key=lambda key: float(np.abs(same[key][:16] - matrix[:16]).mean()))


def _genai() -> Any:
    try:
        return importlib.import_module("openvino_genai")
    except ImportError as error:
        raise UnsupportedOption(
            f"the comparison needs openvino-genai of the version of openvino: pip install openvino-genai ({error})"
        ) from error


def main(argv: Sequence[str] | None = None) -> int:
    """0 when measured, 2 with one line on stderr when that cannot be."""
    args = _parser().parse_args(argv)
    try:
        options = BenchOptions(
            ("plain",), args.concurrency, args.requests, args.rounds, args.max_tokens, ignore_eos=True
        )
        _run(args, options)
    except DcutError as error:
        print(f"peer: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _run(args: argparse.Namespace, options: BenchOptions) -> None:
    _genai()
    manifest = read_manifest(args.bundle)
    check_batch(options, manifest.max_batch)
    model = prepare_model(resolve_target(args.target), args.weights)
    engine = open_engine(args.bundle, EngineOptions(policy="plain", threads=args.threads, profile=False))
    try:
        requests = chat_requests(load_dataset(args.dataset).prompts, engine.tokenizer, options)
        check_requests(options, requests, engine.limits)
        blocks = max(options.concurrency) * max(blocks_needed(request, engine.limits) for request in requests) + 1
        peer = Peer(model, manifest.precision, engine.limits, blocks, args.threads)
        found = compare(engine, peer, requests, options)
    finally:
        engine.close()
    _publish(args, manifest.precision, found)


def _publish(args: argparse.Namespace, precision: str, found: Sequence[Comparison]) -> None:
    columns = ("live", "ours, tokens/s", "GenAI, tokens/s", "ours / GenAI", "(rounds)", "equal outputs")
    table = report.table(f"plain decoding, {precision}, GenAI with {args.weights} weights", columns)
    for row in found:
        ratios = [our / peer for our, peer in zip(row.ours, row.peer, strict=True)]
        table.add_row(
            f"{row.concurrency}",
            f"{median(row.ours):.1f}",
            f"{median(row.peer):.1f}",
            f"{row.ratio:.3f}",
            f"{min(ratios):.2f}-{max(ratios):.2f}",
            f"{row.same} of {row.requests}",
        )
    Console(width=report.NARROWEST).print(table)
    if args.json is not None:
        versions = environment.versions() | {"openvino-genai": _genai().__version__}
        rows = [asdict(row) | {"ratio": row.ratio} for row in found]
        document = {"command": sys.argv, "precision": precision, "weights": args.weights, "versions": versions}
        args.json.write_text(json.dumps(document | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="our plain policy against OpenVINO GenAI, in turns")
    add = parser.add_argument
    add("bundle", type=Path, metavar="DIR", help="what dcut-trt build made; its precision is used for both")
    add("--target", default="smollm2-135m-instruct", metavar="T", help="the GGUF that the bundle was built from")
    add("--weights", choices=WEIGHTS, default=WEIGHTS[0], help="GenAI's: ours (default), or its int4")
    add("--concurrency", type=integers, default="1,4,16,32", metavar="C,..", help="default: 1,4,16,32")
    add("--dataset", default="gsm8k", metavar="NAME|FILE")
    add("--requests", type=int, metavar="N", help="per round; default: 3 x concurrency, at least 8")
    add("--rounds", type=int, default=4, metavar="R", help="default: 4")
    add("--max-tokens", type=int, default=128, metavar="N", help="tokens of every request; default: 128")
    add("--threads", type=int, metavar="N", help="CPU threads of both (default: their choice)")
    add("--json", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
