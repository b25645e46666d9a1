"""What the TensorRT backend asks of the runtime, call by call, as the double saw it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from double_bundles import BLOCK, MAX_BATCH, open_double, open_engine, tiny_bundle

from dcut_trt.backends.tensorrt import TensorRt
from dcut_trt.backends.tensorrt_plan import WARM_RUNS, OutsideProfile, ProfileContext
from dcut_trt.engine import Engine
from dcut_trt.manifest import read_manifest
from dcut_trt.spec.packing import budget
from dcut_trt.spec.policies import make_policy
from dcut_trt.spec.rules import FixedRatio
from dcut_trt.types import Request, SamplingParams

RATIOS = (0.25, 0.5, 0.75, 1.0)
I32 = 4  # bytes


def decoding(runtime: TensorRt, batch: int, policy: Any, **fields: Any) -> Engine:
    """An engine in which `batch` requests decode, and have decoded once."""
    engine = open_engine(runtime, tiny_bundle(), policy, **fields)
    for index in range(batch):
        prompt = np.random.default_rng(index).integers(0, 260, 5 + index).tolist()
        engine.submit(Request(f"r{index}", tuple(prompt), 50, ignore_eos=True))
    while any(sequence.output_length < 2 for sequence in engine.scheduler.running) or engine.waiting:
        engine.step()
    forget(runtime)
    return engine


def forget(runtime: TensorRt) -> None:
    runtime.module.runs.clear()
    runtime.device.syncs.clear()
    runtime.device.gathered = 0


def contexts(engine: Engine) -> list[ProfileContext]:
    return [*engine.target._plan.contexts, *engine.drafter._plan.contexts]  # type: ignore[attr-defined]


def profiles_run(runtime: TensorRt) -> list[str]:
    plans = read_manifest(tiny_bundle()).plans
    return [f"{run.engine} {plans[run.engine].profiles[run.profile].name}" for run in runtime.module.runs]


def test_a_drafting_step_reads_one_int_and_later_all_the_rest() -> None:
    runtime = open_double()
    engine = decoding(runtime, 3, "ratio:0.75")
    bucket, possible = 12, 3 * BLOCK  # of 9 rows, which no captured batch has
    for _ in range(4):
        forget(runtime)
        engine.step()
        assert profiles_run(runtime) == ["drafter draft-4", f"target verify-{bucket}"]
        assert runtime.device.syncs == [I32, I32 * (bucket + 3 + possible)]  # argmax, keep, token ids
        assert runtime.device.gathered == 1  # features went straight from output to input


def test_a_plain_step_reads_the_argmax_alone() -> None:
    runtime = open_double()
    engine = decoding(runtime, 3, "plain")
    for _ in range(4):
        forget(runtime)
        engine.step()
        assert profiles_run(runtime) == ["target decode"]
        assert runtime.device.syncs == [I32 * 3]


def test_a_sampled_request_costs_its_logits() -> None:
    runtime = open_double()
    engine = open_engine(runtime, tiny_bundle(), "dflash")
    engine.submit(Request("sampled", (5, 6, 7), 20, SamplingParams(1.0, seed=1), ignore_eos=True))
    engine.submit(Request("greedy", (8, 9), 20, ignore_eos=True))
    for _ in range(4):
        engine.step()
    forget(runtime)
    engine.step()
    assert profiles_run(runtime) == ["drafter draft-2", "target verify-8"]
    assert runtime.module.runs[-1].shapes["logit_rows"] == (BLOCK,)
    assert len(runtime.device.syncs) == 2


def test_a_prompt_is_waited_for_only_where_it_ends() -> None:
    runtime = open_double()
    engine = open_engine(runtime, tiny_bundle(), "dflash", prefill_chunk=24)
    engine.submit(Request("long", tuple(range(1, 50)), 4, ignore_eos=True))
    forget(runtime)
    engine.step()
    assert runtime.device.syncs == []
    engine.step()
    assert runtime.device.syncs == []
    engine.step()
    assert runtime.device.syncs == [I32]
    chunks = ["target prefill", "target prefill", "drafter prefill", "drafter prefill"]  # of 16 and 8 rows
    assert profiles_run(runtime) == [*chunks, *chunks, "target prefill"]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("batch", range(1, MAX_BATCH + 1))
def test_e4_every_batch_and_ratio_runs_in_the_next_bucket(batch: int, ratio: float) -> None:
    runtime = open_double()
    engine = decoding(runtime, batch, FixedRatio(ratio))
    engine.step()
    buckets = read_manifest(tiny_bundle()).token_buckets
    bucket = min(rows for rows in buckets if rows >= budget(ratio, batch, BLOCK))
    target, record = runtime.module.runs[-1], engine.trace.records[-1]
    assert target.shapes["token_ids"] == (bucket,)
    assert target.shapes["key_cache.0"][0] == batch
    # The target runs what was planned: a bucket's spare rows are filled with drafts as long as there are any.
    assert record.rows == min(bucket, batch * BLOCK)
    assert record.kept == record.rows - batch
    assert record.ratio == ratio


def sizes_at(context: ProfileContext, place: int) -> dict[str, int]:
    return {dim: values[place] for dim, values in context.profile.dims.items()}


def test_e4_every_profile_runs_at_its_ends_and_not_beyond() -> None:
    runtime = open_double()
    engine = open_engine(runtime, tiny_bundle())
    for context in contexts(engine):
        for place in (0, 2):
            forget(runtime)
            context.run(sizes_at(context, place), {})
            runtime.device.synchronize()
            assert len(runtime.module.runs) == 1
        for dim, (least, _, most) in context.profile.dims.items():
            for size in (least - 1, most + 1):
                with pytest.raises(OutsideProfile, match=rf"{dim} = {size} is not in {least}\.\.{most}"):
                    context.run({**sizes_at(context, 2), dim: size}, {})
        assert runtime.device.queue == []


def test_e4_nothing_runs_after_a_shape_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = open_double()
    engine = open_engine(runtime, tiny_bundle())
    monkeypatch.setattr(ProfileContext, "check", lambda self, sizes: None)
    for context in contexts(engine):
        wrong = sizes_at(context, 2)
        wrong["B"] += 1
        with pytest.raises(OutsideProfile, match="TensorRT refused the shape"):
            context.run(wrong, {})
        with pytest.raises(OutsideProfile, match="TensorRT refused the shape"):
            context.run(wrong, {})
        assert runtime.device.queue == []
        context.run(sizes_at(context, 2), {})
        runtime.device.synchronize()
    assert len(runtime.module.runs) == len(contexts(engine))


def test_e4_more_rows_than_any_bucket_is_a_typed_error() -> None:
    engine = open_engine(open_double(), tiny_bundle())
    with pytest.raises(
        OutsideProfile, match="target: no verify profile takes K = 29, B = 7; they end at K = 28, B = 7"
    ):
        engine.target._plan.select("verify", {"K": 29, "B": 7})  # type: ignore[attr-defined]
    with pytest.raises(OutsideProfile, match="drafter: no draft profile takes B = 8"):
        engine.drafter._plan.select("draft", {"B": 8})  # type: ignore[attr-defined]


def test_e5_all_contexts_share_one_scratch_of_the_largest_size() -> None:
    runtime = open_double()
    open_engine(runtime, tiny_bundle())
    engines = runtime.module.engines.values()
    opened = [context for engine in engines for context in engine.contexts]
    assert len(opened) == sum(engine.num_optimization_profiles for engine in engines) > 10
    (scratch,) = {context.scratch for context in opened}
    sizes = [
        engine.get_device_memory_size_for_profile_v2(index)
        for engine in engines
        for index in range(engine.num_optimization_profiles)
    ]
    assert scratch[1] == max(sizes) < sum(sizes)


def test_every_context_has_its_profile_and_caches_in_place() -> None:
    runtime = open_double()
    open_engine(runtime, tiny_bundle())
    for engine in runtime.module.engines.values():
        assert [context.profile for context in engine.contexts] == list(range(len(engine.profiles)))
        for context in engine.contexts:
            caches = {name for name in context.addresses if "_cache." in name}
            assert len({context.addresses[name] for name in caches}) == len(caches)
            for name in caches:
                assert context.addresses[name.replace("_cache.", "_cache_out.")] == context.addresses[name]


def test_the_target_reads_what_the_pack_node_wrote_where_it_stands() -> None:
    runtime = open_double()
    decoding(runtime, 3, "dflash").step()
    target, drafter = (runtime.module.engines[name] for name in ("target", "drafter"))
    bound = {name: target.contexts[0].addresses[name] for name in drafter.outputs if name in target.inputs}
    assert bound.keys() == {"token_ids", "positions", "request_rows", "depths", "subsequence_begins"}
    for context in drafter.contexts:
        assert {name: context.addresses[name] for name in bound} == bound


def test_a_graph_per_profile_and_batch_is_captured_when_warm_and_replayed() -> None:
    runtime = open_double()
    engine = decoding(runtime, 4, "dflash")
    while len(runtime.device.graphs) < 2:
        engine.step()
    graphs = list(runtime.device.graphs)
    runs = [run for graph in graphs for run in (call.run for call in graph.work)]
    assert [run.engine for run in runs] == ["drafter", "target"]
    before = [graph.replays for graph in graphs]
    engine.step()
    assert [graph.replays for graph in graphs] == [count + 1 for count in before]
    engine.cancel("r1")
    while len(runtime.device.graphs) < 4:  # three requests are other shapes
        engine.step()
    for _ in range(WARM_RUNS):
        engine.step()
    assert [graph.replays for graph in graphs] == [count + 1 for count in before]
    assert all(graph.replays > WARM_RUNS for graph in runtime.device.graphs[2:])
    assert engine.running == 3


def test_prompts_make_no_graphs_and_the_switch_makes_none_at_all() -> None:
    runtime = open_double()
    engine = open_engine(runtime, tiny_bundle(), "plain", prefill_chunk=4)
    engine.submit(Request("long", tuple(range(1, 60)), 2, ignore_eos=True))
    for _ in range(14):
        engine.step()
    assert runtime.device.graphs == []
    runtime = open_double(cuda_graphs=False)
    engine = decoding(runtime, 2, "dflash")
    for _ in range(10):
        engine.step()
    assert runtime.device.graphs == []


def test_a_capture_that_fails_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = open_double()

    def refuse(self: object, work: object) -> None:
        raise RuntimeError("not on this stream")

    monkeypatch.setattr(type(runtime.device), "capture", refuse)
    engine = decoding(runtime, 2, make_policy("dflash", None))
    for _ in range(8):
        engine.step()
    assert engine.running == 2
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "drafter, profile draft-2",
        "target, profile verify-8",
    ]


def test_noise_in_rows_that_nobody_owns_changes_nothing() -> None:
    outputs = []
    for noisy in (False, True):
        runtime = open_double()
        engine = open_engine(runtime, tiny_bundle(), "ratio:0.75")
        asked = [Request(f"r{index}", tuple(range(1, 4 + 3 * index)), 12, ignore_eos=True) for index in range(9)]
        tokens: dict[str, list[int]] = {request.request_id: [] for request in asked}
        for request in asked:
            engine.submit(request)
        while engine.has_work:
            for event in engine.step():
                tokens[event.request_id].extend(event.tokens)
            if noisy:
                poison(runtime, engine)
        outputs.append(tokens)
    assert outputs[0] == outputs[1]


def poison(runtime: TensorRt, engine: Engine) -> None:
    """Large noise in every cache slot past the rows that live requests have computed."""
    runtime.device.synchronize()
    memory: Any = engine.target._memory  # type: ignore[attr-defined]
    rng = np.random.default_rng(3)
    lengths = {}
    for sequence in engine.scheduler.running:
        if sequence.kv_len:
            lengths[memory.slots.row(int(sequence.block_table[0]))] = sequence.kv_len, sequence.context_len
    for place, cache in enumerate((memory.target_cache, memory.drafter_cache)):
        values = cache._buffer.bytes.view(np.float32)
        table = values.reshape(-1, memory.slots.rows, 2, engine.limits.block_size, 16)
        for row in range(memory.slots.rows):
            start = lengths.get(row, (0, 0))[place]
            table[:, row, :, start:] = 1e3 * rng.standard_normal(table[:, row, :, start:].shape)
