"""What is trained: `vision/` (images, readers, classification, segmentation, detection), `text/`, `lm/`, `ct/`, `toy/`.
Several of them use `readers/`; `lora/` is the option `task.lora`."""
