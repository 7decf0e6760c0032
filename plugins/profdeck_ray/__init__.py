"""Ray plugin. It captures engines in Ray actors and provides a store for on-demand requests."""
