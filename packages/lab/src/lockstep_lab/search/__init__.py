"""Values that suit a training: a range test of learning rates, the largest micro-batch, sweeps."""
