"""Plain nn.Modules."""
