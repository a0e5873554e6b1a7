"""Read images with labels, masks or boxes from files, tables, shards and data sets."""
