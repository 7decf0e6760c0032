"""Ray plugin: engines in actors as capture targets, a store for on-demand requests, and a trace executor."""
