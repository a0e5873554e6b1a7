"""Initial weights of a run: from safetensors files, `torch.save` files, and other runs."""
