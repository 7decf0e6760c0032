"""Ray plugin, which captures engines in Ray actors and stores on-demand capture requests."""
