"""How a model is spread over ranks, and how ranks communicate: the only user of torch.distributed."""
