"""Models of which little trains, such as adapters of peft: checkpoints without the frozen weights, and exports."""
