"""`Trainer`: composes a run from core, parts and task; predictions, exports, ranks that a script starts."""
