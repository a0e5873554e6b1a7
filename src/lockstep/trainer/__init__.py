"""`Trainer`, and what happens with a trained model: predictions and exports."""
