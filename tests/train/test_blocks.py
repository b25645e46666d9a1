"""What a block sees and should draft, and that what is trained drafts as what is served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from dflash_reference import draft_block, tiny_drafter
from graph_runner import DraftRows, PagedRunner, run_drafter

from dcut_engines.checkpoint import TargetCheckpoint, load_target
from dcut_engines.drafter_checkpoint import load_drafter
from dcut_engines.emit_openvino import emit_drafter
from dcut_engines.model_config import DecoderConfig, RopeConfig
from dcut_engines.sources import Source, resolve_drafter
from dcut_engines.train.blocks import Example, block_bias, make_batch
from dcut_engines.train.drafting import TorchDrafter, torch_drafter

CPU = torch.device("cpu")


@pytest.mark.parametrize("causal", [True, False])
def test_the_mask_equals_asking_row_by_row(causal: bool) -> None:
    anchors, context, width = np.array([[3, 9], [1, 12]]), 12, 4
    bias = block_bias(torch.tensor(anchors), context, width, causal=causal)
    for sequence in range(2):
        for block in range(2):
            for row in range(width):
                for seen in range(context + width):
                    before = seen < min(context, anchors[sequence, block])
                    inside = seen >= context and (not causal or seen - context <= row)
                    sees = before or inside
                    assert bias[sequence, block, row, seen] == (0.0 if sees else -np.inf)


def test_a_batch_places_anchors_masks_and_labels() -> None:
    config = tiny_drafter(causal=True).config  # blocks of 4, mask token 5
    tokens = np.arange(10, 20)
    example = Example(tokens, torch.ones(7, 96, dtype=torch.bfloat16), np.array([2, 7]))
    batch = make_batch([example], config, CPU)
    assert batch.block_ids.tolist() == [12, 5, 5, 5, 17, 5, 5, 5]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 2, 3, 4, 5, 7, 8, 9, 10]
    assert batch.labels.tolist() == [[13, 14, 15], [18, 19, -1]]
    assert batch.draft_rows.tolist() == [1, 2, 3, 5, 6, 7]


@pytest.mark.parametrize("vocab", [None, (3, 5, 8, 17, 22, 41, 60)], ids=["whole_vocab", "draft_vocab"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_blocks_in_a_batch_draft_as_each_would_alone(causal: bool, vocab: tuple[int, ...] | None) -> None:
    rope = RopeConfig(theta=10000.0, kind="yarn", factor=4.0, original_max_position=16)
    tiny = tiny_drafter(causal=causal, attention_bias=True, rope=rope, layers=3)
    target = target_of(tiny.config.vocab_size, tiny.config.hidden_size, tiny.embedding, tiny.head)
    drafter = torch_drafter(tiny.config, tiny.weights, target, vocab, max_len=64, precision=torch.float32, device=CPU)
    rng = np.random.default_rng(1)
    examples = []
    for seed, anchors in enumerate(([1, 5, 30], [2, 20, 21])):
        features = torch.tensor(tiny.random_features(anchors[-1], seed)).bfloat16()
        examples.append(Example(rng.integers(0, 61, 40), features, np.array(anchors)))
    tokens, probability = drafter.draft(make_batch(examples, tiny.config, CPU))
    rows = None if vocab is None else np.array(vocab)
    for block in range(6):
        example, anchor = examples[block // 3], int(examples[block // 3].anchors[block % 3])
        context, first = example.features[:anchor].float().numpy(), int(example.tokens[anchor])
        alone = draft_block(context, first, tiny.config, tiny.weights, tiny.embedding, tiny.head, rows)
        np.testing.assert_array_equal(tokens[block].numpy(), alone.tokens)
        np.testing.assert_allclose(probability[block].numpy(), alone.confidence, atol=1e-5)


def test_the_shipped_drafter_drafts_in_torch_as_in_openvino(smollm2_gguf: Path, tmp_path: Path) -> None:
    checkpoint = load_drafter(resolve_drafter("smollm2-135m-dflash-b8"))
    target = load_target(Source("smollm2-135m-instruct", smollm2_gguf))
    config, vocab = checkpoint.config, checkpoint.draft_vocab
    embedding = target.weights["model.embed_tokens.weight"]
    ids = np.array(vocab, np.int32)
    emit_drafter(config, checkpoint.weights, embedding, embedding[ids], ids, "fp32", 64, tmp_path / "drafter.xml")
    drafter = torch_drafter(config, checkpoint.weights, target, vocab, max_len=64, precision=torch.float32, device=CPU)

    scale = np.float32(3.0)  # about what the residual stream has
    features = scale * np.random.default_rng(0).standard_normal((24, 1728), dtype=np.float32)
    example = Example(np.arange(1000, 1030), torch.tensor(features).bfloat16(), np.array([7, 24]))
    tokens, probability = drafter.draft(make_batch([example], config, CPU))
    rounded = example.features.float().numpy()
    rows = [DraftRows(place, 0, rounded[:anchor], 1000 + anchor) for place, anchor in enumerate((7, 24))]
    served_tokens, confidence = run_drafter(PagedRunner(tmp_path / "drafter.xml"), config, rows)
    np.testing.assert_array_equal(tokens.numpy(), served_tokens)
    np.testing.assert_allclose(probability.numpy(), confidence, rtol=2e-3, atol=1e-5)


def test_the_loss_is_the_weighted_entropy_of_what_can_be_drafted() -> None:
    tiny = tiny_drafter(causal=True)
    vocab = (3, 5, 8, 17)
    target = target_of(61, 32, tiny.embedding, tiny.head)
    drafter = torch_drafter(tiny.config, tiny.weights, target, vocab, max_len=64, precision=torch.float32, device=CPU)
    tokens = np.array([1, 2, 9, 8, 60, 17, 3])  # behind the anchor: 8, 60 (never drafted), 17; then 3 alone
    features = torch.tensor(tiny.random_features(5, 0)).bfloat16()
    batch = make_batch([Example(tokens, features, np.array([2, 5]))], tiny.config, CPU)
    logits = drafter.logits(batch).detach().numpy().astype(np.float64)
    entropy = np.log(np.exp(logits).sum(axis=1)) - logits.T
    expected = [(0, 2, 1.0), (2, 3, np.exp(-2 / 4.0)), (3, 0, 1.0)]  # draft row, its label's head row, weight
    wanted = sum(entropy[label, row] * weight for row, label, weight in expected) / sum(w for *_, w in expected)
    assert float(drafter.loss(batch, gamma=4.0).detach()) == pytest.approx(wanted, rel=1e-5)


def target_of(vocab_size: int, hidden: int, embedding: np.ndarray, head: np.ndarray) -> TargetCheckpoint:
    """No more of a target than a drafter borrows."""
    config = DecoderConfig(
        "llama", 4, hidden, 48, 4, 2, 16, vocab_size, 512, 1e-5, RopeConfig(1e4), False, False, False
    )
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    return TargetCheckpoint("tiny", "0", config, weights, tokenizer=None)  # type: ignore[arg-type]


def test_drafting_leaves_no_gradient_behind() -> None:
    tiny = tiny_drafter(causal=True)
    target = target_of(61, 32, tiny.embedding, tiny.head)
    drafter: TorchDrafter = torch_drafter(
        tiny.config, tiny.weights, target, None, max_len=64, precision=torch.bfloat16, device=CPU
    )
    features = torch.tensor(tiny.random_features(5, 0)).bfloat16()
    batch = make_batch([Example(np.arange(9), features, np.array([4]))], tiny.config, CPU)
    drafter.draft(batch)
    assert all(tensor.grad is None for tensor in drafter.trained.values())
    drafter.loss(batch, 4.0).backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in drafter.trained.values())
