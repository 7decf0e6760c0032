"""Ray plugin: engines in actors as capture targets, and a store for on-demand requests."""
