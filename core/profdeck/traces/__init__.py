"""Chrome traces as profilers write them: read, check, pack and summarise, in one pass and bounded memory."""
