"""What plain torch makes of the same training: gradients, updates, evaluations and predictions."""
