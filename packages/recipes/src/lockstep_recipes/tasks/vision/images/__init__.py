"""Images: decoding, geometry, colour, augmentation, normalisation, for every task that reads images."""
