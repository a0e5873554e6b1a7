"""Which samples an epoch draws, unless it draws each once: weights, labels, an order of the data set. The core asks an
`Order` (`core/data/order.py`)."""
