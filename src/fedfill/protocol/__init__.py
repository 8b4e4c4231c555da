"""All that an algorithm and an engine know of each other: messages, client, server, engine."""
