pytest_plugins = ["profdeck.testing"]
