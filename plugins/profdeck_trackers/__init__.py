"""Listeners that put the numbers of each capture where people look: MLflow, wandb, SwanLab, TensorBoard."""
