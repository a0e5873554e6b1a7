"""Weights from elsewhere, with which a training begins: files of safetensors and `torch.save`, and other runs."""
