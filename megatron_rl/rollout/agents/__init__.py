"""Agents: programs that ask the policy over HTTP, and the episodes that are made of what it answered them."""
