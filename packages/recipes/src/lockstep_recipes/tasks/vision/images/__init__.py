"""Images: decoding, geometry, colour, augmentation, normalisation. For every task that reads images."""
