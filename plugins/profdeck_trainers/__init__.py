"""Callbacks with which trainers that people use are captured: each module imports the trainer that it is for."""
