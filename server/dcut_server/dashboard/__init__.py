"""The live page that `serve --dashboard-port` shows to a browser: numbers of the server, never its prompts or texts."""
