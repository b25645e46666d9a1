"""The runtime library of dcut-trt: batched speculative decoding with D-cut pruning."""
