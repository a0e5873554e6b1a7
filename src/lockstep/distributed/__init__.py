"""The only home of torch.distributed."""
