"""Listeners that log the metrics of each capture to experiment trackers: MLflow, wandb, SwanLab, TensorBoard."""
