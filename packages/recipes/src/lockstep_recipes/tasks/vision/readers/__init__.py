"""Images with labels, masks or boxes, as files, tables, shards and data sets have them."""
