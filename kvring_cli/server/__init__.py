"""The HTTP server: OpenAI's and Anthropic's forms over one engine that one thread owns."""
