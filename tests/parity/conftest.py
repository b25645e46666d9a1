"""Set-up of the parity tests."""

from pathlib import Path

import pytest
import torch
from tiny_targets import TinyTarget
from transformers import AutoModelForCausalLM

from dcut_engines.checkpoint import load_target
from dcut_engines.sources import Source

torch.set_num_threads(1)  # the references are tiny; torch's threads would only spin beside the runtime's own


@pytest.fixture(scope="session")
def smollm2_target(smollm2_gguf: Path) -> TinyTarget:
    """SmolLM2-135M-Instruct, and transformers' model of it in fp32."""
    checkpoint = load_target(Source("smollm2", smollm2_gguf))
    model = AutoModelForCausalLM.from_pretrained(
        str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    return TinyTarget(checkpoint.config, checkpoint.weights, model.eval())
