"""Initial weights from other sources, `train.init_from`: safetensors files, `torch.save` files, other runs."""
