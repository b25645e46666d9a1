"""Build time: checkpoints to engine bundles."""
