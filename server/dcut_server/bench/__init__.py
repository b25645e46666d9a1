"""`dcut-trt bench`: compare policies on one engine, and what belongs to it."""
