"""Tasks on pictures: classification, semantic segmentation, object detection."""
