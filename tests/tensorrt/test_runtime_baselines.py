"""Rules that select on the host, on the TensorRT double: any number of rows runs, padded to a token bucket."""

from __future__ import annotations

import numpy as np
import pytest
from double_bundles import MAX_BATCH, open_double, open_engine, tiny_bundle
from test_runtime_greedy import RATIOS, alone, requests, serve

from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.policies import make_policy

TABLE = CostTable((MAX_BATCH,), RATIOS, np.array([[10.0, 11.2, 12.4, 13.6]]), np.array([9.0]), "fixed", "never")


@pytest.mark.parametrize("name", ["dcut-vllm", "tetris:5", "dspark", "smartspec", "threshold:0.3", "depth:2"])
def test_no_token_differs_from_plain(name: str) -> None:
    engine = open_engine(open_double(), tiny_bundle())
    engine.policy = make_policy(name, TABLE, engine.limits.traits)
    assert serve(engine, requests()) == alone("llama")
    records = [record for record in engine.trace.records if record.kind == "decode"]
    assert max(record.batch for record in records) == MAX_BATCH
    assert sum(record.accepted for record in records) > 0
    if name in ("dspark", "threshold:0.3"):
        shares = {record.rows / record.possible for record in records}
        assert shares - {*RATIOS}, "every step verified exactly a bucket"
