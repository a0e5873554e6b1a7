"""Models with mostly frozen weights, such as peft adapters: checkpoints without the frozen weights, and exports."""
