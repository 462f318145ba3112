"""The engine: requests through a target and a drafter, step by step."""
