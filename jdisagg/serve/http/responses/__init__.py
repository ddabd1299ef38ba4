"""OpenAI's Responses API, stateless: items in, items out, each answer by itself."""
