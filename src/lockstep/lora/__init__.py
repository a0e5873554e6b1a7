"""Models with few trainable parameters: checkpoints without frozen weights, exports of adapters."""
