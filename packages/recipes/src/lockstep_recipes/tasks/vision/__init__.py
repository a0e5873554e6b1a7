"""Tasks on images: classification, semantic segmentation, object detection."""
