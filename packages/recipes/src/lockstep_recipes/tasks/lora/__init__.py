"""Low-rank adapters (LoRA) with peft, for language models and classifiers."""
