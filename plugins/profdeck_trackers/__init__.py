"""Listeners that put the numbers of each capture where people look at their jobs: MLflow, wandb and TensorBoard."""
