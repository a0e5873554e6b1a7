"""Low-rank adapters (LoRA) of peft for language models."""
